"""Parsing of host:port, and which addresses need no TLS."""

from __future__ import annotations

import pytest

from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.cli import main
from weightserver.common.addresses import is_loopback, parse_addresses, split_address


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


@pytest.mark.guard
def test_every_command_takes_addresses_with_commas(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    with WeightClient(cluster.addresses) as client:
        client.create_table(TableSpec(num_rows=100, dim=4))
        client.extend_schedule(0, [0.1] * 4)
        client.open_session("forms")
        client.push_gradients([1, 70], [[1.0] * 4] * 2, step=0)
        client.checkpoint("kept", step=1)
    shards, metrics = ",".join(cluster.addresses), ",".join(cluster.metrics_addresses)
    said = {
        "health": ["health", shards],
        "top": ["top", metrics, "--count", "1", "--interval-seconds", "0.1"],
        "checkpoints": ["checkpoints", shards],
        "extend": ["extend", "--num-rows", "120", shards],
        "rollback": ["rollback", "kept", "--yes", shards],
        "release": ["release", "kept", shards],
        "drop": ["drop", "--yes", shards],
    }
    for name, arguments in said.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        printed = capsys.readouterr()
        assert ended.value.code == 0, (name, printed.err)
    with pytest.raises(SystemExit):
        main(["checkpoints", ","])
    assert "no address is given: give host:port,host:port" in capsys.readouterr().err
