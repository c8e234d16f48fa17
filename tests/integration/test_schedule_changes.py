"""Learning rates that change while shards and clients run, die and race: on all shards or on none."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.dense_sgd import Oracle
from tests.helpers.failpoints import DyingCluster
from tests.helpers.row_model import schedule
from tests.helpers.watching import metric
from weightserver import (
    ClusterError,
    FencedError,
    LocalCluster,
    OverloadedError,
    ShardUnavailableError,
    StepError,
    TableMismatchError,
    TableSpec,
    WeightClient,
)
from weightserver.client import schedule_caller
from weightserver.client.connection import ShardConnection
from weightserver.core.arrays import Float32Array
from weightserver.operations.backup import backup
from weightserver.operations.compact import compact
from weightserver.operations.reshard import reshard
from weightserver.operations.restore import restore
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import ScheduleHash
from weightserver.shard.shard import Shard
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=60, dim=4, momentum=0.9, weight_decay=1e-3, rows_per_block=7, seed=2)
ROWS = np.arange(SPEC.num_rows)
NUM_STEPS, CLOCK, CHANGED_AT = 20, 2, 12
OLD = schedule(NUM_STEPS)
NEW = np.append(OLD[:CHANGED_AT], 3 * OLD[CHANGED_AT:])


def gradients(step: int) -> Float32Array:
    return np.random.default_rng(step).standard_normal((len(ROWS), SPEC.dim)).astype(np.float32)


def push(client: WeightClient, step: int) -> None:
    client.push_gradients(ROWS, gradients(step), step=step)


def prepare(client: WeightClient, rates: Float32Array = OLD) -> int:
    """The steps before CLOCK are finished."""
    client.create_table(SPEC)
    client.extend_schedule(0, rates)
    epoch = client.open_session("test")
    for step in range(CLOCK):
        push(client, step)
    return epoch


def descriptions(cluster: LocalCluster) -> list[pb.DescribeResponse]:
    with WeightClient(cluster.addresses) as client:
        return [client.call_shard(shard, "Describe", pb.DescribeRequest()) for shard in range(len(cluster.addresses))]


def is_pending(cluster: LocalCluster) -> list[bool]:
    return [answer.HasField("pending_schedule") for answer in descriptions(cluster)]


def assert_have(cluster: LocalCluster, rates: Float32Array) -> None:
    """Checks the schedule of all shards, and that nothing is pending."""
    with WeightClient(cluster.addresses) as client:
        for shard in range(len(cluster.addresses)):
            np.testing.assert_array_equal(client.learning_rates(shard=shard), rates, f"shard {shard}")
        client.describe()
    digests = {answer.schedule_digest for answer in descriptions(cluster)}
    assert digests == {ScheduleHash(rates).digest}
    assert not any(is_pending(cluster))


def assert_goes_on(client: WeightClient, rates: Float32Array, first: int = CLOCK) -> None:
    """Applies the updates from `first`, and compares every row with dense SGD with these learning rates."""
    oracle = Oracle(SPEC, rates)
    for step in range(len(rates)):
        if step >= first:
            push(client, step)
        oracle.step(step, gradients(step).astype(np.float64))
    oracle.assert_equals(client.fetch_state(ROWS, step=len(rates)))


# ---- who knows what


def test_clients_that_know_an_earlier_schedule(client: WeightClient, cluster: LocalCluster) -> None:
    with WeightClient(cluster.addresses) as other:
        epoch = prepare(client)
        other.open_session("test", join=epoch)
        push(other, CLOCK)
        client.extend_schedule(NUM_STEPS, [0.25, 0.125])  # more steps, of which no writer has to know
        push(other, CLOCK + 1)
        other.fetch(ROWS, step=NUM_STEPS)
        other.fetch(ROWS, step=NUM_STEPS + 1)  # it learns of them
        client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
        push(other, CHANGED_AT - 1)
        other.write_state(ROWS[:2], np.ones((2, 4), np.float32), np.ones((2, 4), np.float32), CHANGED_AT)
        other.checkpoint("before", step=CHANGED_AT)
        other.fetch(ROWS, step=CHANGED_AT)
        beyond: list[Callable[[], object]] = [
            lambda: push(other, CHANGED_AT),
            lambda: other.fetch(ROWS, step=CHANGED_AT + 1),
            lambda: other.fetch_state(ROWS[:2], step=CHANGED_AT + 1, checkpoint="before"),
            lambda: other.write_state([1], np.ones((1, 4), np.float32), np.ones((1, 4), np.float32), CHANGED_AT + 1),
            lambda: other.checkpoint("later", step=CHANGED_AT + 1),
        ]
        for call in beyond:
            with pytest.raises(TableMismatchError, match=r"from step 12 on were changed .*: call describe"):
                call()
        assert client.describe().clock == CHANGED_AT
        other.describe()
        for call in beyond[1:3]:
            call()
        push(other, CHANGED_AT)
        client.extend_schedule(CHANGED_AT + 5, OLD[CHANGED_AT + 5 :])
        client.extend_schedule(NUM_STEPS + 2, [0.5])
        with pytest.raises(TableMismatchError, match=r"of steps below 22 were changed by another call: call describe"):
            other.fetch(ROWS, step=NUM_STEPS + 3)
        other.describe()
        other.fetch(ROWS, step=NUM_STEPS + 3)


def test_known_values_cost_no_commit(client: WeightClient, cluster: LocalCluster) -> None:
    """Any client may repeat them: during a writer, while another change is pending, and from a superseded session."""

    def commits() -> list[float]:
        return [metric(address, "weightserver_commit_seconds_count") for address in cluster.metrics_addresses]

    prepare(client)
    with WeightClient(cluster.addresses) as other:
        other.open_session("newer")
        before, versions = commits(), [answer.schedule_version for answer in descriptions(cluster)]
        for giver in (client, other):
            giver.extend_schedule(0, OLD)
            giver.extend_schedule(7, OLD[7:9])
            giver.extend_schedule(NUM_STEPS, [])
        assert commits() == before
        assert [answer.schedule_version for answer in descriptions(cluster)] == versions
        with pytest.raises(FencedError, match="superseded"):
            client.extend_schedule(CHANGED_AT, [0.5])
        with pytest.raises(StepError, match="would leave a gap"):
            other.extend_schedule(NUM_STEPS + 1, [])
    assert_have(cluster, OLD)


@pytest.mark.guard
def test_a_schedule_of_many_parts(client: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_caller, "_RATES_PER_CALL", 7)
    prepare(client)
    for rates in (NEW, np.append(OLD, OLD)):
        client.extend_schedule(0, rates)
        assert_have(cluster, rates)
    client.extend_schedule(CLOCK, NEW[CLOCK:15])
    assert_have(cluster, rates := np.concatenate([NEW[:15], OLD[15:], OLD]))
    assert_goes_on(client, rates)


@pytest.mark.guard
def test_directories_made_otherwise_have_the_same_digest(
    client: WeightClient, cluster: LocalCluster, tmp_path: Path
) -> None:
    """Directories that are restored, resharded and compacted."""
    prepare(client)
    client.extend_schedule(0, NEW)
    client.checkpoint("kept", step=CLOCK)
    backup(client, tmp_path / "backup")
    restored = [tmp_path / f"restored-{shard}" for shard in range(2)]
    for shard, directory in enumerate(restored):
        restore(tmp_path / "backup", directory, shard=shard)
    reshard(restored, resharded := [tmp_path / f"resharded-{shard}" for shard in range(3)])
    compact(resharded[2], compacted := tmp_path / "compacted")
    for shard, directory in (*enumerate(restored), *enumerate([*resharded[:2], compacted])):
        num_shards = 2 if directory in restored else 3
        with closing(LmdbStorage(directory)) as storage:
            assert Shard(storage, shard=shard, num_shards=num_shards).schedule.digest == ScheduleHash(NEW).digest


# ---- with concurrent calls


@pytest.mark.guard
@pytest.mark.parametrize(("num_changes", "num_steps"), [(8, 40), pytest.param(200, 600, marks=pytest.mark.slow)])
def test_changes_during_a_running_writer(
    client: WeightClient, cluster: LocalCluster, num_changes: int, num_steps: int
) -> None:
    """Steps that it is about to use change repeatedly: all rows move alike, by the rates that the shards then have."""
    client.create_table(SPEC)
    client.extend_schedule(0, schedule(num_steps))
    client.open_session("test")
    generator, refused = np.random.default_rng(3), list[str]()

    def change() -> None:
        with WeightClient(cluster.addresses) as changer:
            for _ in range(num_changes):
                start = min(changer.describe().clock + int(generator.integers(0, 3)), num_steps - 1)
                try:
                    changer.extend_schedule(start, generator.uniform(0.01, 0.3, num_steps - start))
                except TableMismatchError as error:
                    refused.append(str(error))
                time.sleep(generator.uniform(0, 0.05))

    num_told = 0
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        for step in range(num_steps):
            while True:
                try:
                    push(client, step)
                    break
                except TableMismatchError:
                    num_told += 1
                    client.describe()
        changing.result(60)
    print(f"{num_changes} changes, {len(refused)} refused, the writer got {num_told} errors")
    assert all("and was used" in error for error in refused), refused
    assert len(refused) < num_changes
    assert num_told
    assert_have(cluster, rates := client.learning_rates())
    client.describe()
    assert_goes_on(client, rates, first=num_steps)


@pytest.mark.guard
def test_changes_of_many_at_once(client: WeightClient, cluster: LocalCluster) -> None:
    """Each change is made on all shards or on none, even if another client gives it up."""
    prepare(client)
    outcomes: list[str] = []

    def change(number: int) -> None:
        with WeightClient(cluster.addresses) as changer:
            for turn in range(8):
                start = CLOCK + (number * turn) % 11
                try:
                    changer.extend_schedule(start, np.full(5, 0.01 + 0.001 * (8 * number + turn)))
                    outcomes.append("changed")
                except FencedError as error:
                    outcomes.append(str(error))

    for turns in range(1, 11):  # clients that give up each other's changes may all be refused on a busy machine
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(change, number) for number in range(4)]:
                future.result(60)
        assert len(outcomes) == 32 * turns
        if "changed" in outcomes:
            break
    assert "changed" in outcomes
    assert all("call extend_schedule() again" in outcome for outcome in outcomes if outcome != "changed"), outcomes
    change(4)
    assert outcomes[-8:] == ["changed"] * 8, "by itself"
    client.extend_schedule(0, OLD[:1])
    assert_have(cluster, client.learning_rates())
    assert_goes_on(client, client.learning_rates())


# ---- clients that are stopped


class Interrupted(BaseException):
    """The client is interrupted as by Ctrl-C, or dies."""


NUM_CALLS = 4
"""The calls of a change of two shards: both are prepared, shard 0 decides, shard 1 follows."""
STOPS = [(call, when) for call in range(1, NUM_CALLS + 1) for when in ("before", "after")]


class Stopping:
    """Stops clients at a call of a change; a dead client sends nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, when: str, *, dead: bool) -> None:
        self._stopped: list[ShardConnection] = []
        original, calls, one_by_one, stopped = ShardConnection.call, itertools.count(1), threading.Lock(), False

        def call(connection: ShardConnection, method: str, request: Any, **options: Any) -> Any:
            nonlocal stopped
            if connection not in self._stopped:
                return original(connection, method, request, **options)
            with one_by_one:
                if stopped and dead:
                    raise Interrupted
                if method != "ExtendSchedule" or next(calls) != number:
                    return original(connection, method, request, **options)
                stopped = True
                if when == "after":
                    original(connection, method, request, **options)
                raise Interrupted

        monkeypatch.setattr(ShardConnection, "call", call)

    def stop(self, client: WeightClient) -> None:
        self._stopped = client._shards.connections()


def stops(*quick: tuple[int, str]) -> list[Any]:
    return [pytest.param(*stop, marks=[] if stop in quick else pytest.mark.guard) for stop in STOPS]


@pytest.mark.parametrize(("number", "when"), stops((2, "after"), (3, "after")))
def test_a_client_that_dies_in_between(
    number: int, when: str, client: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call of another client finishes the change, even a call that changes nothing itself."""
    epoch = prepare(client)
    decided = number > 3 or (number, when) == (3, "after")
    stopping = Stopping(monkeypatch, number, when, dead=True)
    with WeightClient(cluster.addresses) as dying:
        dying.open_session("test", join=epoch)
        dying.describe()
        stopping.stop(dying)
        with pytest.raises(Interrupted):
            dying.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
    pending = is_pending(cluster)
    with WeightClient(cluster.addresses, timeout_seconds=10, retry_seconds=0.3) as other:
        other.open_session("test", join=epoch)
        other.describe()
        push(other, CLOCK)  # rows that are not touched stay writable
        other.fetch(ROWS, step=CHANGED_AT)
        if any(pending):
            with pytest.raises(OverloadedError, match=r"neither finished nor given up: .* call extend_schedule\(\)"):
                other.fetch(ROWS, step=CHANGED_AT + 1)
        assert is_pending(cluster) == pending
        other.extend_schedule(0, OLD[:1])
        assert_have(cluster, rates := NEW if decided else OLD)
        assert_goes_on(other, rates, first=CLOCK + 1)


@pytest.mark.parametrize(("number", "when"), stops((1, "after"), (3, "before"), (3, "after")))
def test_a_client_that_is_interrupted_in_between(
    number: int, when: str, client: WeightClient, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up an undecided change at once, and repeating the call makes the change."""
    prepare(client)
    stopping = Stopping(monkeypatch, number, when, dead=False)
    stopping.stop(client)
    with pytest.raises(Interrupted):
        client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
    decided = number > 3 or (number, when) == (3, "after")
    assert any(is_pending(cluster)) == (decided and (number, when) != (4, "after"))
    if not decided:
        assert_have(cluster, OLD)
    client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
    assert_have(cluster, NEW)
    assert_goes_on(client, NEW)


@pytest.mark.parametrize("late", [0, 1])
def test_a_change_that_is_given_up_while_its_caller_lives(
    late: int, client: WeightClient, cluster: LocalCluster
) -> None:
    """One shard was prepared; the caller is slow with the other, and then finds that the change was given up."""
    prepare(client)
    answers, change = descriptions(cluster), bytes(16)

    def call(shard: int, phase: pb.SchedulePhase, **fields: Any) -> pb.ExtendScheduleResponse:
        request = pb.ExtendScheduleRequest(phase=phase, change=change, **fields)
        answer: pb.ExtendScheduleResponse = client.call_shard(shard, "ExtendSchedule", request)
        return answer

    def prepare_on(shard: int) -> pb.ExtendScheduleResponse:
        rates, version = NEW[CHANGED_AT:].tobytes(), answers[shard].schedule_version
        return call(
            shard, pb.SCHEDULE_PHASE_PREPARE, start_step=CHANGED_AT, learning_rates=rates, version=version, last=True
        )

    first = prepare_on(1 - late)
    with WeightClient(cluster.addresses) as other:
        other.extend_schedule(0, OLD[:1])
    if late == 0:
        with pytest.raises(FencedError, match="changed by another call"):
            prepare_on(late)
    else:
        prepare_on(late)
    with pytest.raises(FencedError, match="given up by another call"):
        call(0, pb.SCHEDULE_PHASE_COMMIT, schedule=first.schedule)
    client.extend_schedule(0, OLD[:1])
    assert_have(cluster, OLD)
    assert_goes_on(client, OLD)


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.guard), 2, pytest.param(3, marks=pytest.mark.guard)]
)
def test_a_writer_waits_for_a_change_whose_client_was_killed(
    number: int, client: WeightClient, cluster: LocalCluster
) -> None:
    """Kill -9 after one shard was prepared, after all, or after shard 0's decision; the writer is not informed."""
    prepare(client)
    for step in range(CLOCK, CHANGED_AT):
        push(client, step)
    command = [sys.executable, "-m", "tests.helpers.dying_schedule", str(number), str(CHANGED_AT), "0.25"]
    command += cluster.addresses
    root = Path(__file__).parents[2]
    assert subprocess.run(command, timeout=60, check=False, cwd=root).returncode == -signal.SIGKILL
    assert sum(is_pending(cluster)) == (2 if number == 2 else 1)
    with ThreadPoolExecutor(1) as pool, WeightClient(cluster.addresses) as other:
        if number < 3:
            writing = pool.submit(push, client, CHANGED_AT)
            time.sleep(0.5)
            assert not writing.done()
            other.extend_schedule(0, OLD[:2])
            writing.result(10)
            assert_have(cluster, OLD)
            assert_goes_on(client, OLD, first=CHANGED_AT + 1)
        else:  # who knows the old ones is refused by the shard that decided
            with pytest.raises(TableMismatchError):
                push(client, CHANGED_AT)
            other.extend_schedule(0, OLD[:2])
            rates = OLD.copy()
            rates[CHANGED_AT] = 0.25
            assert_have(cluster, rates)
            client.describe()
            assert_goes_on(client, rates, first=CHANGED_AT)


# ---- shards that are killed

PREPARED, COMMITTED = 2, 3
"""Number of commits of a shard since its start, including the first, which is its own."""
KILLS = [
    (shard, commit, point) for shard in (0, 1) for commit in (PREPARED, COMMITTED) for point in ("before", "after")
]


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DyingCluster]:
    with DyingCluster(2, tmp_path_factory.mktemp("dying")) as dying:
        yield dying


@pytest.mark.parametrize(
    "repeated",
    [pytest.param(True, id="repeated", marks=pytest.mark.guard), pytest.param(False, id="never repeated")],
)
@pytest.mark.parametrize(
    ("shard", "commit", "point"),
    [pytest.param(*kill, marks=[] if kill == (0, COMMITTED, "after") else pytest.mark.guard) for kill in KILLS],
)
def test_a_shard_killed_half_way_through(
    shard: int, commit: int, point: str, repeated: bool, dying: DyingCluster
) -> None:
    dying.arm(shard, point, commit)
    with (
        WeightClient(dying.addresses) as other,
        WeightClient(dying.addresses, timeout_seconds=10, retry_seconds=1.5) as client,
    ):
        client.drop_table()
        prepare(client)
        dying.restart(shard)
        with pytest.raises(ShardUnavailableError, match=f"shard {shard}"):
            client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
        assert dying.processes[shard].wait(10) == -signal.SIGKILL
        dying.restart(shard)
        decided = commit == COMMITTED and (shard, point) != (0, "before")
        rates = NEW if decided or repeated else OLD
        if repeated:
            client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
        else:
            other.extend_schedule(0, OLD[:1])
        assert_have(dying, rates)
        client.describe()
        assert_goes_on(client, rates)


# ---- shards that differ all the same


def rewrite(cluster: LocalCluster, shard: int, start: int, rates: Float32Array) -> None:
    """Only one shard has the change, as after an earlier version or a restored directory."""
    answer, change = descriptions(cluster)[shard], bytes(16)
    request = pb.ExtendScheduleRequest(
        phase=pb.SCHEDULE_PHASE_PREPARE,
        change=change,
        start_step=start,
        learning_rates=rates.tobytes(),
        version=answer.schedule_version,
        last=True,
    )
    with WeightClient(cluster.addresses) as client:
        prepared = client.call_shard(shard, "ExtendSchedule", request)
        commit = pb.SCHEDULE_PHASE_COMMIT
        request = pb.ExtendScheduleRequest(phase=commit, change=change, schedule=prepared.schedule)
        client.call_shard(shard, "ExtendSchedule", request)


@pytest.mark.parametrize("shard", [0, 1])
def test_shards_that_differ_are_refused_and_mended(client: WeightClient, cluster: LocalCluster, shard: int) -> None:
    prepare(client)
    rewrite(cluster, shard, CHANGED_AT, NEW[CHANGED_AT:])
    with WeightClient(cluster.addresses) as other:
        other.open_session("again")
        differ = r"shard 1 has another learning rate of step 12 than shard 0: repeat extend_schedule\(\) with all"
        calls: list[Callable[[], object]] = [
            other.describe,
            lambda: other.fetch(ROWS, step=CLOCK),
            lambda: push(other, CLOCK),
            lambda: other.checkpoint("differ", step=CLOCK),
        ]
        for call in calls:
            with pytest.raises(ClusterError, match=differ):
                call()
        with pytest.raises(ClusterError, match=r"for steps that were not given: call extend_schedule\(0, \.\.\.\)"):
            other.extend_schedule(CHANGED_AT, np.full(3, 0.5))
        assert not any(is_pending(cluster))
        other.extend_schedule(0, OLD[:1])  # known ones are no error, and mend nothing
        with pytest.raises(ClusterError, match=differ):
            other.describe()
        other.extend_schedule(0, NEW)
        assert_have(cluster, NEW)
        assert_goes_on(other, NEW)


def test_a_client_meets_a_shard_that_differs(client: WeightClient, cluster: LocalCluster) -> None:
    """It knows the earlier schedule, and the shard misses a change: its writes from there on are refused."""
    prepare(client)
    client.extend_schedule(CHANGED_AT, NEW[CHANGED_AT:])
    rewrite(cluster, 1, CHANGED_AT + 5, OLD[CHANGED_AT + 5 :])
    client.fetch(ROWS, step=CHANGED_AT + 5)
    for call in (lambda: client.fetch(ROWS, step=CHANGED_AT + 6), lambda: push(client, CHANGED_AT + 5)):
        with pytest.raises(TableMismatchError, match=r"shard 1 at .*: the learning rates from step 17 on were changed"):
            call()


def test_shards_that_used_different_ones_are_mended_by_a_rollback(client: WeightClient, cluster: LocalCluster) -> None:
    epoch = prepare(client)
    client.checkpoint("early", step=CLOCK)
    of_shard_0, of_shard_1 = ROWS[:7], ROWS[7:14]
    client.push_gradients(of_shard_0, gradients(0)[:7], step=CHANGED_AT)
    rewrite(cluster, 1, CHANGED_AT, NEW[CHANGED_AT:])
    opener = descriptions(cluster)[1].opener
    header = pb.WriteHeader(
        epoch=epoch, opener=opener, writer=b"x" * 16, sequence=1, step=CHANGED_AT, num_rows=len(of_shard_1)
    )  # of a writer that sends no digest
    message = pb.PushGradientsRequest(
        header=header, rows=pb.Rows(ids=of_shard_1.tobytes()), gradients=gradients(0)[:7].tobytes()
    )
    client._shards.connections()[1].write("PushGradients", lambda: iter([message]), len(of_shard_1))
    for rates in (OLD, NEW):
        with pytest.raises(TableMismatchError, match="and was used: only steps from 13 on may be rewritten"):
            client.extend_schedule(0, rates)
    assert not any(is_pending(cluster))
    client.rollback("early")
    client.extend_schedule(0, OLD)
    assert_have(cluster, OLD)
    assert_goes_on(client, OLD)


def test_a_shard_that_knows_fewer_rates_continues_with_those(client: WeightClient, cluster: LocalCluster) -> None:
    """The shard was restored from a backup taken before an extension."""
    prepare(client)
    rewrite(cluster, 0, NUM_STEPS, np.full(5, 0.1, np.float32))
    assert client.describe().horizon == NUM_STEPS
    client.extend_schedule(0, OLD)
    push(client, CLOCK)
    for call in (lambda: client.fetch(ROWS, step=NUM_STEPS + 1), lambda: push(client, NUM_STEPS)):
        with pytest.raises(StepError, match=r"has learning rates for 20 steps, others for more: call extend_schedule"):
            call()
    client.extend_schedule(0, rates := np.append(OLD, np.full(5, 0.1, np.float32)))
    assert_have(cluster, rates)
    assert_goes_on(client, rates, first=CLOCK + 1)
