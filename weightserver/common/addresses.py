"""Parses addresses of the form host:port, also of many servers at once: ws-{0..63}.ws:50051."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = re.compile(r"(\[(?P<v6>[^\[\]{}]+)\]|(?P<host>[^\[\]{}:]+)):(?P<port>[0-9]{1,9})")

_RANGE = re.compile(r"([^{}]*)\{([0-9]{1,9})\.\.([0-9]{1,9})\}([^{}]*)")
_BETWEEN = re.compile(r"[,\s]+(?![^{}]*\})")
"""What separates addresses; within braces it is part of a range, although of a wrong one."""
_MOST_NAMES = 4096


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[v6]:port" into host and port. Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is not an address: write host:port, such as 127.0.0.1:50051 or [::1]:50051")
    return found["v6"] or found["host"], int(found["port"])


def parse_addresses(*texts: str) -> list[str]:
    """The addresses in `texts`, each "host:port" or several, separated by commas or blanks: the form of all commands.

    An address with a range of numbers, ws-{0..63}.ws:50051, stands for several: see `expand_range`.

    Raises:
        ValueError: one that is not an address.
    """
    words = [word for text in texts for word in _BETWEEN.split(text.strip()) if word]
    addresses = [address for word in words for address in expand_range(word)]
    for address in addresses:
        split_address(address)
    return addresses


def expand_range(text: str) -> list[str]:
    """The names that `text` stands for, from the first number to the last: "ws-{0..2}" for ws-0, ws-1, ws-2.

    If one end has leading zeros, both have as many digits: "{00..63}" begins with 00. A text without braces stands for
    itself.

    Raises:
        ValueError: anything else in braces, several ranges, one that goes down, or of more than 4,096 numbers.
    """
    if "{" not in text and "}" not in text:
        return [text]
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a range of servers: write one {{FIRST..LAST}}, as in ws-{{0..63}}.ws:50051")
    before, first, last, after = found.groups()
    numbers, digits = range(int(first), int(last) + 1), 1
    if not numbers:
        raise ValueError(f"{text!r} goes down from {first} to {last}: write the smaller number first")
    if len(numbers) > _MOST_NAMES:
        raise ValueError(f"{text!r} names {len(numbers)} servers: at most {_MOST_NAMES} can be given")
    if first != str(int(first)) or last != str(int(last)):
        digits = len(first)
        if len(last) != digits:
            raise ValueError(f"{text!r}: with leading zeros, write both numbers with as many digits")
    return [f"{before}{number:0{digits}}{after}" for number in numbers]


def is_loopback(address: str) -> bool:
    """Whether "host:port" can be reached only from this machine. Raises ValueError."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
