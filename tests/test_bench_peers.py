"""benchmarks.peers: the rows of each call, tiny runs with the peers that are installed, and what is left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.peers.__main__ import PEERS, main
from benchmarks.peers.lmdb_service import LmdbService
from benchmarks.peers.ours import MAX_WRITES
from benchmarks.peers.peer import keys_of, missing_of, rows_of, values_of
from benchmarks.peers.report import Measured
from benchmarks.peers.worker import OPERATIONS, PATTERNS, Case, Worker
from weightserver.common.installing import install_command

TINY = ["--rows", "2048", "--fetches", "64", "--writes", "32", "--case-seconds", "0.1"]
CASES = [
    str(Case(operation, pattern, 64 if operation == "fetch" else 32))
    for operation in OPERATIONS
    for pattern in PATTERNS
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_call_has_distinct_rows_of_the_table_that_depend_on_its_number_only(pattern: str) -> None:
    case = Case("fetch", pattern, 64)
    calls = [case.ids(1_000, number) for number in range(40)]
    for number, ids in enumerate(calls):
        assert ids.dtype == np.int64
        assert len(ids) == 64
        assert (np.diff(ids) > 0).all()
        assert ids[0] >= 0
        assert ids[-1] < 1_000
        assert np.array_equal(ids, Case("write", pattern, 64).ids(1_000, number))
        assert ids[-1] - ids[0] < {"contiguous": 64, "half of a window": 128, "scattered": 1_000}[pattern]
    assert not np.array_equal(calls[0], calls[1])
    assert len(case.ids(128, 1)) == 64, "the largest window that a table may have"


def test_keys_and_values_are_those_of_the_rows() -> None:
    ids = np.array([0, 1, 255, 256, 1 << 40])
    assert keys_of(ids) == [int(i).to_bytes(8, "big") for i in ids]
    rows = np.random.default_rng(0).standard_normal((5, 128), np.float32)
    rows[:, -1] = 0  # bytes that numpy's S would strip
    assert np.array_equal(rows_of(values_of(rows)), rows)


def test_times_are_quartiles() -> None:
    measured = Measured.of([0.004, 0.001, 0.002, 0.003, 0.005], 0.1, 0, 0)
    assert str(measured) == "3.00 (2.00–4.00) ms"
    assert measured.num_calls == 5


def test_what_lacks_is_named() -> None:
    assert missing_of(modules=["json"], program="sh", package="dash") is None
    assert missing_of(modules=["json", "no_such"]) == f"no module no_such ({install_command('peers')})"
    assert missing_of(program="no-such-server", package="some") == "no program no-such-server (apt-get install some)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "100"], "a window of 131,072 rows needs a table of as many, got 100"),
        (["--rows", "0"], "must be a positive number, got '0'"),
        (["--peers", "mysql"], "invalid choice: 'mysql'"),
        (["--writes", *map(str, range(1, MAX_WRITES))], "--writes takes at most 3 numbers"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.slow  # starts every peer that is installed
def test_every_peer_is_measured(tmp_path: Path) -> None:
    main([*TINY, "--output", str(tmp_path)])
    results = json.loads((tmp_path / "peers.json").read_text())["results"]
    installed = {peer.key for peer in PEERS if peer.name not in results["left_out"]}
    # torch.distributed.rpc may be left out: TensorPipe ends now and then in std::bad_alloc.
    assert {"ours", "lmdb", "lmdb-grpc"} <= installed <= {p.key for p in PEERS if p.missing() is None}
    assert {name: set(of_case) for name, of_case in results["cases"].items()} == dict.fromkeys(CASES, installed)
    for of_case in results["cases"].values():
        for key, one in of_case.items():
            assert 0 < one["p25"] <= one["p50"] <= one["p75"]
            assert one["processor_seconds"] > 0
            assert (one["server_bytes"] == 0) == (key in ("lmdb", "rocksdb", "rocksdb-synced"))
    table = (tmp_path / "peers.md").read_text()
    assert all((f"\n| {peer.name} | " in table) == (peer.key in installed) for peer in PEERS)
    assert (tmp_path / "peers.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["peers.json", "peers.md", "peers.png"]


@pytest.mark.slow  # starts shards three times
def test_an_interrupted_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TINY, "--peers", "lmdb", "--output", str(tmp_path)]
    measured: set[str] = set()
    perform = Worker.perform

    def noted(self: Worker, case: Case, number: int) -> float:
        measured.add(str(case))
        return perform(self, case, number)

    monkeypatch.setattr(Worker, "perform", noted)
    main([*command, "--stop-after", "0"])
    assert "0 of 9 cases are measured; the same command continues" in capsys.readouterr().err
    main(command)
    assert measured == set(CASES)
    results = json.loads((tmp_path / "peers.json").read_text())["results"]
    kept: dict[str, Any] = dict(list(results["cases"].items())[:-1])
    (tmp_path / "peers.partial.json").write_text(json.dumps({"settings": results["settings"], "cases": kept}))
    measured.clear()
    main(command)
    assert measured == results["cases"].keys() - kept.keys()
    assert json.loads((tmp_path / "peers.json").read_text())["results"]["cases"].items() >= kept.items()


@pytest.mark.slow
def test_a_peer_that_does_not_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LmdbService, "missing", lambda: "no module lmdb")
    monkeypatch.setattr("benchmarks.peers.__main__.PEERS", [PEERS[0], LmdbService])
    main([*TINY, "--peers", "lmdb-grpc", "--output", str(tmp_path)])
    assert "LMDB over gRPC is left out: no module lmdb" in capsys.readouterr().err
    assert "\nLMDB over gRPC was left out: no module lmdb.\n" in (tmp_path / "peers.md").read_text()
