"""host:port as text, and whether it stays on this machine."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = re.compile(r"(\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,9})")


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is no address: write host:port, such as 127.0.0.1:50051 or [::1]:50051")
    return found["v6"] or found["host"], int(found["port"])


def is_loopback(address: str) -> bool:
    """Whether "host:port" can only be reached from this machine. Raises ValueError."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
