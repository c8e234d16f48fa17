"""Invalid input is refused in one line that names it, and changes nothing."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.comparing import same
from tests.helpers.operations import Weightserver
from tests.helpers.ports import reserved_ports
from tests.helpers.watching import wait_until
from weightserver import (
    Checkpoint,
    ClusterError,
    FencedError,
    LocalCluster,
    NoTableError,
    ShardUnavailableError,
    StepError,
    TableMismatchError,
    TableSpec,
    WeightClient,
    WeightServerError,
)
from weightserver.cli import main
from weightserver.client.calls import WATCH
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.server.config import ServerConfig

SPEC = TableSpec(num_rows=100, dim=4, rows_per_block=3)
ONES = np.ones((2, 4), np.float32)
NAN = np.array([[1, 1, 1, 1], [1, np.nan, 1, 1]], np.float32)
INF = np.array([[1, 1, 1, 1], [1, np.inf, 1, 1]], np.float32)
HUGE = np.full((2, 4), 3e38, np.float32)
LOST_ROWS = r"shard {} holds rows of a table that shard {} lacks: is a disk not mounted, .* restore all shards from one"

Call = Callable[[WeightClient], object]
HALF: Any = 0.5
BEYOND = "needs the learning rates of 21 steps, but this client and the shards know those of 20: extend the schedule"
REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    # what the client sees by itself
    "rows of two dimensions": (lambda c: c.fetch([[1]], step=0), ValueError, r"shape \[n\], got \[1, 1\]"),
    "rows that are no integers": (lambda c: c.fetch([1.5], step=0), TypeError, r"rows must be integers, got .*float64"),
    "an unknown row": (lambda c: c.fetch([1, 100], step=0), ValueError, r"row 100 does not exist: .* rows 0\.\.99"),
    "a row that only uint64 holds": (
        lambda c: c.fetch(np.array([2**63], np.uint64), step=0),
        ValueError,
        r"rows must be less than 2⁶³, got 9223372036854775808",
    ),
    "a negative row": (lambda c: c.push_gradients([-1, 0], ONES, step=0), ValueError, r"row -1 does not exist"),
    "a step that is no integer": (lambda c: c.fetch([1], step=HALF), TypeError, r"step must be an integer, got 0\.5"),
    "a negative step": (
        lambda c: c.push_gradients([1, 2], ONES, step=-1),
        ValueError,
        r"step must lie in 0\.\.\d+, got -1",
    ),
    "a gradient for fewer rows": (
        lambda c: c.push_gradients([1, 2, 3], ONES, step=0),
        ValueError,
        r"gradients must have shape \[3, 4\], got \[2, 4\]",
    ),
    "a gradient in float64": (
        lambda c: c.push_gradients([1, 2], ONES.astype(np.float64), step=0),
        TypeError,
        r"gradients must be float32, got float64: convert it first",
    ),
    "NaN in a gradient": (lambda c: c.push_gradients([1, 2], NAN, step=0), ValueError, r"got nan at \[1, 1\]"),
    "infinity in a gradient": (lambda c: c.push_gradients([1, 2], INF, step=0), ValueError, r"got inf at \[1, 1\]"),
    "NaN in a weight": (
        lambda c: c.write_state([1, 2], NAN, ONES, 0),
        ValueError,
        r"weight must be finite, .* nothing",
    ),
    "NaN in a momentum": (lambda c: c.write_state([1, 2], ONES, NAN, 0), ValueError, r"momentum_buffer must be finite"),
    "repeats that overflow": (
        lambda c: c.push_gradients([7, 7], HUGE, step=9),
        ValueError,
        r"of row 7 add up beyond float32: nothing was sent, scale",
    ),
    "a row written twice": (lambda c: c.write_state([5, 5], ONES, ONES, 0), ValueError, r"row 5 is given twice"),
    "a negative last_step": (lambda c: c.write_state([1, 2], ONES, ONES, -1), ValueError, r"must not be negative"),
    "last_steps for other rows": (
        lambda c: c.write_state([1, 2], ONES, ONES, [1, 2, 3]),
        ValueError,
        r"last_step must be an integer or have shape \[2\], got \[3\]",
    ),
    "a negative learning rate": (
        lambda c: c.extend_schedule(20, [0, -0.1]),
        ValueError,
        r"step 21 .* got -0\.1",
    ),
    "an infinite learning rate": (
        lambda c: c.extend_schedule(20, [np.inf]),
        ValueError,
        r"step 20 must be a finite .* got inf",
    ),
    "a learning rate for nothing": (lambda c: c.extend_schedule(20, 0.1), ValueError, r"shape \[n\], got \[\]"),
    "a session of no number": (lambda c: c.open_session("run", join=0), ValueError, r"join must lie in 1\.\."),
    "an output that is read-only": (
        lambda c: c.fetch([1], step=0, out=np.frombuffer(bytes(16), np.float32).reshape(1, 4)),
        ValueError,
        r"out must be a writable, .* got float32 of shape \[1, 4\], read-only: or omit it",
    ),
    "an output that is a list": (
        lambda c: c.fetch([1], step=0, out=[[0.0] * 4]),  # type: ignore[arg-type]
        TypeError,
        "out must be a NumPy array, got list",
    ),
    "a checkpoint in the place of its name": (
        lambda c: c.rollback(Checkpoint("first", 1)),  # type: ignore[arg-type]
        ValueError,
        r"name must be a non-empty text that UTF-8 can hold, got Checkpoint\(name='first'",
    ),
    "the same, to release": (
        lambda c: c.release(Checkpoint("first", 1)),  # type: ignore[arg-type]
        ValueError,
        "name must be a non-empty text",
    ),
    "a session without a name": (lambda c: c.open_session(""), ValueError, r"name must be a non-empty text"),
    "a place for other rows": (
        lambda c: c.fetch([1], step=0, out=np.empty((2, 4), np.float32)),
        ValueError,
        r"out must be a writable, contiguous float32 array of shape \[1, 4\], got float32 of shape \[2, 4\]: or",
    ),
    # what a shard refuses, in the client's classes
    "a fetch beyond the schedule": (lambda c: c.fetch([1], step=21), StepError, BEYOND),
    "a push beyond the schedule": (lambda c: c.push_gradients([1, 2], ONES, step=20), StepError, BEYOND),
    "a fetch from a row's past": (lambda c: c.fetch([50], step=6), StepError, r"row 50 has seen 8 updates"),
    "a state older than the row": (lambda c: c.write_state([50, 51], ONES, ONES, 7), StepError, r"row 50 has seen 8"),
    "a gap in the schedule": (lambda c: c.extend_schedule(22, [0.1]), StepError, r"ends at 20: step 22 would leave"),
    "another rate for a step that was used": (
        lambda c: c.extend_schedule(6, np.full(4, 0.7)),
        TableMismatchError,
        r"learning rate of step 6 .* was used: only steps from 8 on may be rewritten",
    ),
}


@pytest.fixture(scope="module")
def table() -> Iterator[WeightClient]:
    """Has a schedule of 20 rates, the last a large one; rows 50 and 51 have seen 8 updates."""
    with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, np.append(np.full(19, 0.5), 4.0))
        client.open_session("test")
        client.push_gradients([50, 51], ONES, step=7)
        yield client


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_and_nothing_changed(table: WeightClient, call: Call, error: type[Exception], message: str) -> None:
    before, info = table.fetch_state(np.arange(100)), table.describe()
    with pytest.raises(error, match=message) as raised:
        call(table)
    assert "\n" not in str(raised.value)
    assert same(table.fetch_state(np.arange(100)), before)
    now = table.describe()
    for name in ("spec", "clock", "rows_stored", "horizon", "epoch"):
        assert getattr(now, name) == getattr(info, name), name
    table.push_gradients([60, 61], ONES, step=7)  # the writer can continue


@pytest.mark.parametrize(("limit", "most"), [("MAX_WRITE_ROWS", 3), ("MAX_WRITE_BYTES", 3 * (8 + 16))])
def test_a_write_of_too_many_rows(table: WeightClient, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(f"weightserver.client.transfer.{limit}", most)
    rows = np.array([0, 1, 2, 3, 4, 6])  # four of them on shard 0
    with pytest.raises(ValueError, match="4 rows of one shard in one write, at most 3 are taken: split it"):
        table.push_gradients(rows, np.ones((6, 4), np.float32), step=8)
    table.push_gradients(rows[:5], np.ones((5, 4), np.float32), step=8)


def test_a_write_that_cannot_be_made_says_why(table: WeightClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in making its messages is that of the call; gRPC would tell an UNKNOWN one."""

    def no_room(*_: object) -> bytes:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("weightserver.client.transfer.to_bytes", no_room)
        with pytest.raises(MemoryError, match="no room"):
            table.push_gradients([1, 2], ONES, step=8)
    table.push_gradients([1, 2], ONES, step=8)


def test_a_fetch_of_more_rows_than_a_request_may_name(table: WeightClient, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = table.fetch(np.arange(100), step=9)
    monkeypatch.setattr("weightserver.client.fetched_rows.MAX_ROWS", 7)
    assert np.array_equal(table.fetch(np.arange(100), step=9), expected)


SPECS = {
    "no rows": ({"num_rows": 0}, r"num_rows must lie in 1\.\.\d+, got 0"),
    "no columns": ({"dim": 0}, r"dim must lie in 1\.\.65536, got 0"),
    "momentum of one": ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1\.0"),
    "negative decay": ({"weight_decay": -1e-4}, r"weight_decay must lie in \[0, ∞\), got -0\.0001"),
    "huge init_std": ({"init_std": 10**400}, r"init_std must lie in \[0, 1e15\), got inf"),
    "negative seed": ({"seed": -1}, r"seed must lie"),
    "rows_per_block": ({"rows_per_block": 0}, r"rows_per_block must lie in 1\.\.2048, got 0"),
    "blocks too large": ({"dim": 65_536, "rows_per_block": 2_048}, "rows_per_block is 2048, .*: choose fewer"),
    "rows in words": ({"num_rows": "many"}, r"num_rows must be an integer, got 'many'"),
    "half a column": ({"dim": 1.5}, r"dim must be an integer, got 1\.5"),
    "correction in words": ({"correction": "yes"}, r"correction must be a bool, got 'yes'"),
}


@pytest.mark.parametrize(("changes", "message"), SPECS.values(), ids=SPECS.keys())
def test_impossible_tables(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TableSpec(**{"num_rows": 10, "dim": 4} | changes)  # type: ignore[arg-type]


def test_without_a_table_or_a_session(client: WeightClient, cluster: LocalCluster) -> None:
    with pytest.raises(NoTableError, match=r"shard 0 .*holds no table: a run begins one, or create_table\(\)"):
        client.fetch([1], step=0)
    with pytest.raises(NoTableError, match="holds no table"):
        client.open_session("x")
    client.create_table(SPEC)
    client.extend_schedule(0, np.full(20, 0.5))
    with pytest.raises(FencedError, match=r"call open_session\(\) before the first write"):
        client.push_gradients([1, 2], ONES, step=0)
    client.open_session("first")
    with WeightClient(cluster.addresses) as newer:
        newer.open_session("second")
        with pytest.raises(FencedError, match=r"superseded by epoch \d+ \(run 'second'\): this writer must stop"):
            client.push_gradients([1, 2], ONES, step=0)
        assert newer.describe().rows_stored == 0
        newer.drop_table()
        newer.create_table(SPEC)
        newer.extend_schedule(0, np.full(20, 0.5))
        with pytest.raises(TableMismatchError, match="the table was replaced"):  # though its spec is the same
            client.push_gradients([1, 2], ONES, step=0)


OTHERS = [{"dim": 8}, {"rows_per_block": 4}, {"num_rows": 200, "seed": 1}]
"""The last has rows of the same length, with other values."""


@pytest.mark.parametrize("changes", OTHERS)
def test_a_client_and_a_replaced_table(client: WeightClient, cluster: LocalCluster, changes: dict[str, int]) -> None:
    """The client never returns a row in the wrong place, nor raises an error of NumPy's."""
    with WeightClient(cluster.addresses) as old:
        client.create_table(SPEC)
        client.extend_schedule(0, np.full(20, 0.5))
        old.open_session("old")
        old.fetch(np.arange(100), step=0)
        client.drop_table()
        other = replace(SPEC, **changes)  # type: ignore[arg-type]
        client.create_table(other)
        client.extend_schedule(0, np.full(20, 0.5))
        for call in (lambda: old.fetch(np.arange(100), step=0), lambda: old.fetch_state(np.arange(100))):
            with pytest.raises(WeightServerError, match=r"shard . at ") as raised:
                call()
            assert "\n" not in str(raised.value)
        with pytest.raises(WeightServerError):
            old.push_gradients(np.arange(2), ONES, step=0)
        assert client.describe().rows_stored == 0
        assert old.describe().spec == other
        client.open_session("new")
        assert np.array_equal(old.fetch([49], step=0), client.fetch([49], step=0))


@pytest.mark.guard  # seconds
def test_addresses_that_are_not_one_cluster_are_refused(cluster: LocalCluster) -> None:
    def describe(*addresses: str) -> object:
        with WeightClient(addresses, timeout_seconds=20, connect_seconds=1, insecure=True) as client:
            return client.describe()

    first, second = cluster.addresses
    with pytest.raises(ClusterError, match="1 of 2 shards were given: add the address of shard 1"):
        describe(first)
    with pytest.raises(ClusterError, match=f"{second} and {second} are both shard 1: give each shard once"):
        describe(second, second)
    with LocalCluster(1) as other, pytest.raises(ClusterError, match=r"is a shard of .*: give the addresses of one"):
        describe(first, other.addresses[0])
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ShardUnavailableError, match=f"{address} did not answer for .*refused.* check the address"):
            describe(first, address)
        assert time.monotonic() - started < 4
    unknown = "no-such-name.invalid:1"
    with pytest.raises(ShardUnavailableError, match=rf"{unknown} did not answer for .*\(.*{unknown}.*\): check"):
        describe(first, unknown)
    with pytest.raises(ValueError, match="timeout_seconds must be positive"):
        WeightClient([first], timeout_seconds=0)


@pytest.mark.parametrize("addresses", [[], [""], [" "], [","], "127.0.0.1:1", ["nonsense"], ["127.0.0.1:99999"]])
def test_what_names_no_shards_is_refused_at_once(addresses: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        WeightClient(addresses)


def test_a_closed_client_says_so(cluster: LocalCluster) -> None:
    client = WeightClient(cluster.addresses)
    client.close()
    client.close()
    with pytest.raises(ValueError, match="the client is closed: make a new one"):
        client.describe()


def test_a_call_that_waits_for_its_first_answer_ends_with_its_client() -> None:
    with reserved_ports(1) as (port,), ThreadPoolExecutor(1) as pool:
        client = WeightClient([f"127.0.0.1:{port}"], connect_seconds=30)
        told = pool.submit(client.describe)
        wait_until(lambda: any(str(port) in call.target and call.num_attempts > 1 for call in list(WATCH.waiting)))
        client.close()
        with pytest.raises(ValueError, match="the client is closed: make a new one"):
            told.result(40)


@pytest.mark.guard
def test_calls_that_lose_a_race_with_close_say_so(cluster: LocalCluster, client: WeightClient) -> None:
    """Before a call, in the middle of one, and between two attempts: never in the words of gRPC."""
    client.create_table(SPEC)
    client.extend_schedule(0, np.full(5, 0.1))
    epoch, rows = client.open_session("race"), np.arange(SPEC.num_rows)
    ones = np.ones((SPEC.num_rows, SPEC.dim), np.float32)
    for number in range(30):
        own = WeightClient(cluster.addresses, retry_seconds=number % 2)
        own.extend_schedule(0, np.full(5, 0.1))
        own.open_session("race", join=epoch)

        def call_until_closed(own: WeightClient, push: bool) -> BaseException:
            try:
                while True:
                    own.push_gradients(rows, ones, step=0) if push else own.fetch(rows, step=5)
            except (ValueError, WeightServerError) as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(call_until_closed, own, push) for push in (True, True, False)]
            time.sleep(0.002 * number)
            own.close()
            for call in calls:
                assert isinstance(call.result(20), ValueError)
                assert str(call.result()) == "the client is closed: make a new one"


@pytest.mark.guard
def test_a_drop_that_ended_halfway_can_be_repeated(weightserver: Weightserver, tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path) as cluster, WeightClient(cluster.addresses, retry_seconds=1) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, [0.5])
        client.open_session("old")
        client.push_gradients([1, 4], ONES, step=0)  # one on each shard
        cluster.processes[1].kill()
        with pytest.raises(ShardUnavailableError, match="shard 1 at"):
            client.drop_table()
        cluster.restart(1)
        assert client.describe().rows_stored == 2, "a shard that is away: nothing is dropped anywhere"
        client.call_shard(0, "DropTable", pb.DropTableRequest())  # as if it had gone away a moment later
        with pytest.raises(TableMismatchError, match=LOST_ROWS.format(1, 0)):
            client.create_table(SPEC)
        message = r"would delete 1 stored rows of run 'old' at step 1 \(shard 0 holds no table\): give --yes to do it"
        assert_refused(weightserver("drop", *cluster.addresses), message)
        done = (0, "deleted 1 stored rows of run 'old' at step 1 (shard 0 holds no table)\n", "")
        assert weightserver("drop", *cluster.addresses, "--yes") == done
        assert_refused(weightserver("drop", *cluster.addresses, "--yes"), "no shard holds a table: there is nothing to")
        client.drop_table()
        client.create_table(SPEC)
        assert client.describe().rows_stored == 0


def test_an_empty_shard_next_to_one_with_rows_costs_no_row(tmp_path: Path) -> None:
    """The disk was not mounted when --init was given."""
    with LocalCluster(2, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        client.create_table(SPEC)
        client.extend_schedule(0, [0.5])
        client.open_session("run")
        client.push_gradients([1, 4], ONES, step=0)  # one on each shard
    shutil.rmtree(tmp_path / "shard-1")
    with LocalCluster(2, tmp_path, serve_options=["--init"]) as cluster, WeightClient(cluster.addresses) as client:
        with pytest.raises(TableMismatchError, match=LOST_ROWS.format(0, 1)):
            client.create_table(SPEC)
        with pytest.raises(TableMismatchError):
            client.create_table(replace(SPEC, seed=1))
        with pytest.raises(WeightServerError):
            client.extend_table(SPEC.num_rows + 1)
        sound = client.call_shard(0, "Describe", pb.DescribeRequest())
        assert (sound.rows_stored, sound.spec.num_rows) == (1, SPEC.num_rows)


# ---- the command line


def assert_refused(done: tuple[int | str | None, str, str], message: str) -> None:
    """Checks for exit status 1 and one line."""
    status, _, errors = done
    lines = [line for line in errors.splitlines() if " INFO " not in line]
    assert (status, len(lines)) == (1, 1), errors
    assert re.search(f"^weightserver [a-z]+: .*{message}", lines[0]), errors


@pytest.mark.guard
def test_serve_rejects_invalid_settings(cluster: LocalCluster, tmp_path: Path) -> None:
    address, served = cluster.addresses[0], cluster.directory / "shard-0"
    new, metrics_port = tmp_path / "new", cluster.metrics_addresses[0].rpartition(":")[2]
    with LocalCluster(2, tmp_path / "two"):
        held = tmp_path / "two/shard-0"
    cases: list[tuple[list[str | Path], str]] = [
        (["--data-dir", new, "--listen", address], f"cannot listen on {address}: Address already in use; is another"),
        (
            ["--data-dir", new, "--listen", "192.0.2.1:50051", "--insecure"],
            "cannot listen on 192.0.2.1:50051: Cannot assign requested address: give an address of this machine's own",
        ),
        (["--data-dir", new, "--listen", "no.invalid:50051", "--insecure"], "on no.invalid:50051: .*[Nn]ame"),
        (["--data-dir", served], "is served by another process, perhaps of a run or an open head: end it"),
        (["--data-dir", new, "--init", "--metrics-port", metrics_port], f"serve metrics on port {metrics_port}"),
        (["--data-dir", held, "--shard", "1", "--num-shards", "2"], "holds shard 0 of 2, not shard 1 of 2"),
    ]
    if socket.has_dualstack_ipv6():  # [::] takes the port of IPv4 too
        every_host = f"[::]:{address.rpartition(':')[2]}"
        cases.append((["--data-dir", new, "--listen", every_host, "--insecure"], "cannot listen on .*: Address"))
    for options, message in cases:
        command = [sys.executable, "-m", "weightserver", "serve", "--listen", "127.0.0.1:0", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert_refused((done.returncode, done.stdout, done.stderr), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": 2}, r"--shard must lie in 0\.\.num_shards-1, and --num-shards be at most 2147483647, got 2 of 2"),
        ({"num_shards": 2**31}, "be at most 2147483647, got 0 of 2147483648"),
        *(
            ({"grace_seconds": seconds}, r"--grace-seconds must lie in 0\.\.3600")
            for seconds in (float("nan"), -1.0, float("inf"))
        ),
    ],
)
def test_a_shards_settings_are_checked(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"data_dir": Path("unused"), "shard": 0, "num_shards": 2}
    with pytest.raises(ValueError, match=message):
        ServerConfig(**good | options)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export 127.0.0.1:9 --output ? --rows 5:1", "'5:1' is not of the form FIRST:END, such as 0:1000"),
        ("export 127.0.0.1:9 --output ? --step=-1", "step must not be negative"),
        ("export 127.0.0.1:9 --output .", "is a mounted disk or the current directory: give a new directory in it"),
        ("backup 127.0.0.1:9 --output .", "is a mounted disk or the current directory: give a new directory in it"),
        ("extend 127.0.0.1:9 --num-rows 0", r"num_rows must lie in 1\.\.\d+, got 0"),
        ("export 127.0.0.1:9 --output ? --checkpoint=", "--checkpoint: the name is empty"),
        ("rollback  127.0.0.1:9", "argument name: the name is empty"),
        ("checkpoints 127.0.0.1", "'127.0.0.1' is not an address"),
        ("health ,", "no address is given: give host:port,host:port"),
        ("health 127.0.0.1:9 --timeout-seconds=nan", "argument --timeout-seconds: must be positive and at most 3600"),
        ("drop 127.0.0.1:9 --wait-for-servers=0", "argument --wait-for-servers: must be positive and at most 3600"),
        ("top nowhere", "'nowhere' is not an address"),
        ("top 127.0.0.1:9 --count 0", "--count must be at least 1, got 0"),
        ("top 127.0.0.1:9 --interval-seconds nan", r"--interval-seconds must lie in 0\.1\.\.3600, got nan"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_call(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No shard is at this address, which a call would take ten seconds to find out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")
    began = time.monotonic()
    with pytest.raises(SystemExit):
        main([argument.replace("?", "new") for argument in command.split(" ")])
    assert time.monotonic() - began < 5
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "command",
    [
        "serve --data-dir ?",
        "serve --data-dir d --init --tls-cert ?",
        "serve --data-dir d --token-file=?",
        "certs ? --host h",
        "inspect ?",
        "verify ?",
        "backup h:1 --output ?",
        "restore ? --data-dir d --shard 0",
        "restore b --data-dir ? --shard 0",
        "reshard --from h:1 --shard 0/1 --target ?",
        "export h:1 --output ?",
        "checkpoints h:1 --tls-ca ?",
    ],
)
def test_a_path_is_not_empty_and_no_url(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty path comes from an unset variable, and would be the current directory; a URL would be made a folder."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    for path, message in (
        ("", "the path is empty: is a variable not set? The current directory is ."),
        ("gs://bucket/x", "gs://bucket/x is a URL: copy or mount what is there, "),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([argument.replace("?", path) for argument in command.split()])
        assert message in capsys.readouterr().err
    assert (tmp_path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o755, [])


def test_the_other_commands_refuse(
    weightserver: Weightserver, client: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    for command, message in (
        (("inspect", tmp_path), "holds no weight server data: give the --data-dir of a shard"),
        (("inspect", tmp_path / "missing"), "holds no weight server data"),
        (
            ("health", "127.0.0.1:9", "--timeout-seconds=1"),
            "127.0.0.1:9 does not answer .UNAVAILABLE: .*Connection refused.*: check that its shard is running",
        ),
        (("top", "127.0.0.1:9"), r"no shard serves metrics \(127.0.0.1:9: .*Connection refused\)"),
        (("drop", *cluster.addresses), "no shard holds a table: there is nothing to drop"),
    ):
        assert_refused(weightserver(*command), message)
    client.create_table(SPEC)
    assert_refused(weightserver("drop", *cluster.addresses), "this would delete 0 stored rows .*: give --yes to do it")
    assert client.describe().spec == SPEC
    assert weightserver("drop", *cluster.addresses, "--yes")[0] == 0
    with pytest.raises(NoTableError):
        client.describe()
    assert weightserver("nonsense")[0] == 2
