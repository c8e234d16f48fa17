"""host:port as text, and whether it stays on this machine."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ValueError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is no address: write host:port, such as 127.0.0.1:50051")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether "host:port" can only be reached from this machine. Raises ValueError."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
