"""Parses addresses of the form host:port."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = re.compile(r"(\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,9})")


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port" or "[v6]:port" into host and port. Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is not an address: write host:port, such as 127.0.0.1:50051 or [::1]:50051")
    return found["v6"] or found["host"], int(found["port"])


def parse_addresses(*texts: str) -> list[str]:
    """The addresses in `texts`, each "host:port" or several, separated by commas or blanks: the form of all commands.

    Raises:
        ValueError: one that is not an address.
    """
    addresses = [address for text in texts for address in re.split(r"[,\s]+", text.strip()) if address]
    for address in addresses:
        split_address(address)
    return addresses


def is_loopback(address: str) -> bool:
    """Whether "host:port" can be reached only from this machine. Raises ValueError."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
