"""Parsing of host:port, and which addresses need no TLS."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from trainer.rows_config import ServersConfig
from trainer.settings import SettingError
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.addresses import is_loopback, parse_addresses, split_address
from weightserver.operations.certificates import write_certificates
from weightserver.torch.settings import Servers


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


INVALID = ["", ":", "host", "host:", ":50051", "host:port", "host:-1", "host:1.5", "host:65536"]
INVALID += ["[]:1", "::1:5", "[::1:5", "::1]:5", "h:\u0663"]


@pytest.mark.parametrize("address", INVALID)
def test_rejects_invalid_addresses(address: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not an address: write host:port, such as 127\.0\.0\.1:50051 or \[::1\]:50051"
    ):
        split_address(address)
    with pytest.raises(ValueError, match="is not an address"):
        is_loopback(address)


@pytest.mark.parametrize(
    "texts", [("a:1,b:2",), ("a:1", "b:2"), ("a:1, b:2",), (" a:1 b:2 ",), ("a:1,", "", ",b:2"), ("a:1\nb:2",)]
)
def test_several_addresses_have_one_form(texts: tuple[str, ...]) -> None:
    assert parse_addresses(*texts) == ["a:1", "b:2"]
    assert parse_addresses("", " , ") == []
    with pytest.raises(ValueError, match="'b' is not an address"):
        parse_addresses(*texts, "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ws-{0..2}.ws:50051", ["ws-0.ws:50051", "ws-1.ws:50051", "ws-2.ws:50051"]),
        ("10.0.0.{9..11}:1", ["10.0.0.9:1", "10.0.0.10:1", "10.0.0.11:1"]),
        ("127.0.0.1:{50051..50052}", ["127.0.0.1:50051", "127.0.0.1:50052"]),
        ("node{08..10}:1", ["node08:1", "node09:1", "node10:1"]),
        ("[fd00::{1..2}]:5", ["[fd00::1]:5", "[fd00::2]:5"]),
        ("a{7..7}:1,b:2 c{1..2}:3", ["a7:1", "b:2", "c1:3", "c2:3"]),
    ],
)
def test_a_range_stands_for_servers_in_the_order_of_their_numbers(text: str, expected: list[str]) -> None:
    assert parse_addresses(text) == expected
    assert Servers(text).parsed() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w{3..1}:5", "'w{3..1}:5' goes down from 3 to 1: write the smaller number first"),
        ("w{0..4096}:5", "'w{0..4096}:5' names 4097 servers: at most 4096 can be given"),
        ("w{00..100}:5", "'w{00..100}:5': with leading zeros, write both numbers with as many digits"),
        ("w{0..01}:5", "'w{0..01}:5': with leading zeros, write both numbers with as many digits"),
        *(
            (word, f"'{word}' is not a range of servers: write one {{FIRST..LAST}}, as in ws-{{0..63}}.ws:50051")
            for word in (
                "w{a..b}:5",
                "w{0..3:5",
                "w0..3}:5",
                "w{0...3}:5",
                "w{0..3..2}:5",
                "w{-1..3}:5",
                "w{3}:5",
                "w{0,1}:5",
                "w{0 .. 1}:5",
            )
        ),
        ("r{0..1}w{0..1}:5", "'r{0..1}w{0..1}:5' is not a range of servers: write one {FIRST..LAST}"),
        ("w{0..1}", "'w0' is not an address: write host:port"),
    ],
)
def test_a_wrong_range_is_refused_in_one_line(text: str, message: str) -> None:
    callers: list[Callable[[str], Any]] = [parse_addresses, Servers, lambda text: WeightClient([text], insecure=True)]
    for refuses in callers:
        with pytest.raises(ValueError, match=re.escape(message)) as refused:
            refuses(text)
        assert "\n" not in str(refused.value)
    with pytest.raises(SettingError, match=re.escape(message)):
        ServersConfig(servers=text).check()


def test_a_certificate_has_the_names_of_a_range(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["ws-{0..2}.ws", "127.0.0.1"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["ws-0.ws", "ws-1.ws", "ws-2.ws"]
    with pytest.raises(ValueError, match=r"'ws-\{2..1\}.ws' goes down"):
        write_certificates(tmp_path / "other", ["ws-{2..1}.ws"])


def test_a_client_calls_the_servers_of_a_range(cluster: LocalCluster) -> None:
    ranges = [re.sub(r":(\d+)$", r":{\1..\1}", address) for address in cluster.addresses]
    with WeightClient(ranges) as client:
        client.create_table(TableSpec(num_rows=100, dim=4))
        assert [shard.address for shard in client.describe().shards] == cluster.addresses
