"""Parsing of host:port, and which addresses need no TLS."""

from __future__ import annotations

import pytest

from weightserver.common.addresses import is_loopback, split_address


@pytest.mark.parametrize(
    ("address", "parts", "loopback"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051), True),
        ("127.9.9.9:1", ("127.9.9.9", 1), True),
        ("localhost:0", ("localhost", 0), True),
        ("[::1]:65535", ("::1", 65535), True),
        ("0.0.0.0:50051", ("0.0.0.0", 50051), False),
        ("[::]:50051", ("::", 50051), False),
        ("10.0.0.7:50051", ("10.0.0.7", 50051), False),
        ("128.0.0.1:50051", ("128.0.0.1", 50051), False),
        ("localhost.example.com:50051", ("localhost.example.com", 50051), False),
        ("127.0.0.1.example.com:50051", ("127.0.0.1.example.com", 50051), False),
    ],
)
def test_addresses(address: str, parts: tuple[str, int], loopback: bool) -> None:
    assert split_address(address) == parts
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":",
        "host",
        "host:",
        ":50051",
        "host:port",
        "host:-1",
        "host:1.5",
        "host:65536",
        "[]:1",
        "::1:5",
        "[::1:5",
        "::1]:5",
        "h:\u0663",
    ],
)
def test_rejects_invalid_addresses(address: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not an address: write host:port, such as 127\.0\.0\.1:50051 or \[::1\]:50051"
    ):
        split_address(address)
    with pytest.raises(ValueError, match="is not an address"):
        is_loopback(address)
