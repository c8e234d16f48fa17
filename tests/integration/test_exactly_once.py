"""Every acknowledged call counts exactly once, whatever the network does and whatever is killed.

Threads of several writers push gradients and write states through a faulty proxy in front of each shard, while shards
are killed and old requests arrive again. At barriers, where all threads wait, something else happens (a checkpoint, a
rollback, a longer schedule, a new session), and all rows must equal a replay of each call, once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf.message_factory import GetMessageClass

import weightserver.client.transfer
from tests.helpers.faulty_proxy import Answer, Fault, Faults, FaultyProxy
from tests.helpers.row_model import RowModel
from tests.helpers.watching import metric
from weightserver import (
    Checkpoint,
    ClusterError,
    FencedError,
    LocalCluster,
    OverloadedError,
    ShardUnavailableError,
    TableSpec,
    WeightClient,
)
from weightserver.core.arrays import Float32Array, Float64Array, Int64Array
from weightserver.core.initial import initial_rows
from weightserver.core.sharding import Sharding
from weightserver.protocol._generated import weight_server_pb2 as pb

# More than a MiB of weights on each shard: a fetch of all rows is answered in two messages.
SPEC = TableSpec(num_rows=70_000, dim=8, momentum=0.8, weight_decay=0.01, init_std=1.0, rows_per_block=63)
ROWS = np.arange(SPEC.num_rows)
INITIAL = initial_rows(SPEC, ROWS)
NUM_BLOCKS_USED, ROWS_USED_PER_BLOCK, NUM_SHARED_ROWS = 10, 6, 20
RATES = np.linspace(0.3, 0.1, 64, dtype=np.float32)
MODEL = RowModel(SPEC, RATES)
FIRST_HORIZON, EXTENSION = 8, 6
BYTES_PER_MESSAGE = 2 * SPEC.dim * np.float32().nbytes
"""A push of three rows is two messages."""
TOLERANCE = 1e-5
CLEAR = 100
"""In each comparison every push must change each of its rows by at least this many tolerances."""
RUN = "exactly once"

NUM_SHARDS, NUM_THREADS = 2, 8
TIMEOUT_SECONDS = 0.3
RETRY_SECONDS = (60, 60, 0.05)
"""Retry time of each writer. The last one is short: its calls fail, and it repeats them."""
GIVE_UP_SECONDS = 60
MAX_CHECKPOINTS = 3
NUM_REPLAYED = 25
"""Each shard receives this many of the newest and of all requests again at each barrier, and more at any time."""

METHODS = pb.DESCRIPTOR.services_by_name["WeightServer"].methods_by_name
WRITES: dict[str, Any] = {
    name: GetMessageClass(method.input_type)
    for name, method in METHODS.items()
    if method.output_type.name == "WriteResponse"
}
NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)

Result = TypeVar("Result")


# ---- the calls


@dataclass(frozen=True)
class Push:
    number: int
    rows: Int64Array  # (n,)
    gradients: Float32Array  # (n, D)
    step: int

    def send(self, client: WeightClient) -> None:
        client.push_gradients(self.rows, self.gradients, step=self.step)


@dataclass(frozen=True)
class Write:
    number: int
    rows: Int64Array  # (n,)
    weight: Float32Array  # (n, D)
    momentum_buffer: Float32Array  # (n, D)
    last_step: Int64Array  # (n,)

    def send(self, client: WeightClient) -> None:
        client.write_state(self.rows, self.weight, self.momentum_buffer, self.last_step)


@dataclass(frozen=True)
class Look:
    """Reads all rows of a shard while others write: a thread sees its own calls, and unwritten rows do not change."""

    number: int
    rows: Int64Array  # (n,), the shard's
    last_step: dict[int, int]
    """Returns the state of the thread's own rows."""
    untouched: npt.NDArray[np.bool_]  # (n,)

    def send(self, client: WeightClient) -> None:
        state = client.fetch_state(self.rows)
        for row, last_step in self.last_step.items():
            seen = state.last_step[np.searchsorted(self.rows, row)]
            assert seen == last_step, f"row {row} at look {self.number}: last_step is {seen}, not {last_step}"
        initial = INITIAL[self.rows[self.untouched]]
        assert np.array_equal(state.weight[self.untouched], initial), f"look {self.number}"


Call = Push | Write | Look


class Workload:
    """Draws the calls of each thread from a seed. Some rows are shared by all threads, which only push to them; each
    other row has an owner, which also writes its state. Blocks are shared by all threads."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self._numbers = itertools.count()
        blocks = self.generator.choice(SPEC.num_rows // SPEC.rows_per_block, NUM_BLOCKS_USED, replace=False)
        slots = [self.generator.choice(SPEC.rows_per_block, ROWS_USED_PER_BLOCK, replace=False) for _ in blocks]
        used = self.generator.permutation((blocks[:, None] * SPEC.rows_per_block + slots).ravel())
        self.rows = np.sort(used)
        self.shared = used[:NUM_SHARED_ROWS]
        self._owned = np.array_split(used[NUM_SHARED_ROWS:], NUM_THREADS)

    def round(self, oracle: Oracle, horizon: int, num_calls: int, num_looks: int = 0) -> list[list[Call]]:
        """Returns the calls of each thread until the next barrier: `num_calls` writes in all, and `num_looks` reads."""
        calls_of, looks_of = (np.full(NUM_THREADS, number // NUM_THREADS) for number in (num_calls, num_looks))
        calls_of[: num_calls % NUM_THREADS] += 1
        looks_of[: num_looks % NUM_THREADS] += 1
        return [
            self._thread(oracle, horizon, self._owned[thread], calls_of[thread], looks_of[thread])
            for thread in range(NUM_THREADS)
        ]

    def _thread(self, oracle: Oracle, horizon: int, owned: Int64Array, num_calls: int, num_looks: int) -> list[Call]:
        last_step = dict(zip(owned.tolist(), oracle.last_step[oracle.positions(owned)].tolist(), strict=True))
        looks = set(self.generator.choice(num_calls, num_looks, replace=False).tolist())
        calls: list[Call] = []
        for place in range(num_calls):
            if self.generator.random() < 0.8:
                push = self.push(np.concatenate([self.shared, owned]), horizon)
                last_step |= {row: max(last_step[row], push.step + 1) for row in push.rows.tolist() if row in last_step}
                calls.append(push)
            else:
                rows = self._some(owned)
                ahead = self.generator.integers(0, 3, len(rows))
                write = self.write(rows, np.minimum([last_step[row] for row in rows.tolist()] + ahead, horizon))
                last_step |= zip(rows.tolist(), write.last_step.tolist(), strict=True)
                calls.append(write)
            if place in looks:
                calls.append(self._look(last_step))
        return calls

    def _look(self, last_step: dict[int, int]) -> Look:
        shard_of = Sharding(SPEC.rows_per_block, NUM_SHARDS).shard_of
        shard = self.generator.integers(NUM_SHARDS)
        rows = ROWS[shard_of(ROWS) == shard]
        seen = {row: step for row, step in last_step.items() if shard_of(np.array([row])) == shard}
        return Look(next(self._numbers), rows, seen, ~np.isin(rows, self.rows))

    def _some(self, rows: Int64Array) -> Int64Array:
        return self.generator.choice(rows, self.generator.integers(1, 5), replace=False)

    def push(self, rows: Int64Array, horizon: int) -> Push:
        """Makes a push to some of `rows` for any step, without small values."""
        rows = self._some(rows)
        size = self.generator.uniform(0.5, 1.5, (len(rows), SPEC.dim))
        gradients = (self.generator.choice([-1, 1], size.shape) * size).astype(np.float32)
        return Push(next(self._numbers), rows, gradients, int(self.generator.integers(horizon)))

    def write(self, rows: Int64Array, last_step: Int64Array) -> Write:
        """Writes new states of `rows`."""
        weight, momentum = self.generator.standard_normal((2, len(rows), SPEC.dim)).astype(np.float32)
        return Write(next(self._numbers), rows, weight, momentum, last_step)


# ---- what must come of them


class Oracle:
    """The rows after each call was applied once, by the model of rows, for many rows at a time."""

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows  # (R,), increasing
        self._base = np.stack([INITIAL[rows], np.zeros((len(rows), SPEC.dim))], axis=1)  # (R, 2, D), as last written
        self._base_step, self.last_step = np.zeros((2, len(rows)), np.int64)
        self._pushes: list[list[tuple[Push, Float32Array]]] = [[] for _ in rows]
        """The pushes to each row since it was written, each with the row's gradient."""
        self._touched = np.zeros(len(rows), bool)
        self.clock = 0

    @property
    def rows_stored(self) -> int:
        return int(self._touched.sum())

    def positions(self, rows: Int64Array) -> Int64Array:
        return np.searchsorted(self.rows, rows)

    def apply(self, call: Push | Write) -> None:
        positions = self.positions(call.rows)
        if isinstance(call, Push):
            self.last_step[positions] = np.maximum(self.last_step[positions], call.step + 1)
            self.clock = max(self.clock, call.step + 1)
            for position, gradient in zip(positions, call.gradients, strict=True):
                self._pushes[position].append((call, gradient))
        else:
            self._base[positions] = np.stack([call.weight, call.momentum_buffer], axis=1)
            self._base_step[positions] = self.last_step[positions] = call.last_step
            self.clock = max(self.clock, int(call.last_step.max()))
            for position in positions:
                self._pushes[position] = []
        self._touched[positions] = True

    def kept(self) -> Oracle:
        """Returns a copy that later calls do not change."""
        kept = copy.copy(self)
        kept._base, kept._base_step, kept.last_step = self._base.copy(), self._base_step.copy(), self.last_step.copy()
        kept._touched = self._touched.copy()
        kept._pushes = [pushes.copy() for pushes in self._pushes]
        return kept

    def at(self, step: int) -> Float64Array:
        """(weight, momentum buffer) of all rows before update `step`: (R, 2, D)."""
        state = MODEL.transfers(step)[self._base_step] @ self._base
        positions, steps, gradients = self._all_pushes()
        np.add.at(state, positions, MODEL.impulses(step)[steps][:, :, None] * gradients[:, None, :])
        return state

    def _all_pushes(self) -> tuple[Int64Array, Int64Array, Float64Array]:
        """Returns the position and step (P,) of every push to a row, and its gradient (P, D)."""
        pushes = [(position, *push) for position, pushes in enumerate(self._pushes) for push in pushes]
        return (
            np.array([position for position, _, _ in pushes], np.int64),
            np.array([push.step for _, push, _ in pushes], np.int64),
            np.array([gradient for _, _, gradient in pushes], np.float64).reshape(-1, SPEC.dim),
        )

    def check(self, actual: Float32Array, last_step: Int64Array, step: int) -> None:
        """Compares (weight, momentum buffer) before update `step`, (R, 2, D), and the last steps as stored, (R,)."""
        expected, impulses = self.at(step), MODEL.impulses(step)
        tolerance = TOLERANCE * (1 + abs(expected).max())
        _, steps, gradients = self._all_pushes()
        effects = abs(impulses).max(axis=1)[steps] * abs(gradients).max(axis=1)
        assert effects.min(initial=np.inf) >= CLEAR * tolerance, "a push is too small to be missed"
        wrong = (abs(actual - expected) > tolerance).any(axis=(1, 2)) | (last_step != self.last_step)
        assert not wrong.any(), f"rows {self.rows[wrong].tolist()} are wrong"


def create(client: WeightClient) -> int:
    """Makes the table and opens the first session."""
    client.create_table(SPEC)
    client.extend_schedule(0, RATES[:FIRST_HORIZON])
    return client.open_session(RUN)


def check_rows(client: WeightClient, oracle: Oracle, horizon: int, checkpoint: str = "") -> None:
    """Compares the rows as they are, or were at a checkpoint."""
    state = client.fetch_state(oracle.rows, step=horizon, checkpoint=checkpoint)
    last_step = client.fetch_state(oracle.rows, checkpoint=checkpoint).last_step
    oracle.check(np.stack([state.weight, state.momentum_buffer], axis=1), last_step, horizon)


# ---- the trial


@dataclass(frozen=True, kw_only=True)
class Round:
    """The work of all threads until they meet at a barrier, and the events there."""

    num_calls: int
    """Number of pushes and writes."""
    num_looks: int
    num_kills: int
    actions: tuple[str, ...]
    """Methods of Trial."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The amount of work and the faults."""

    seed: int
    rounds: tuple[Round, ...]
    faults: Faults


class Progress:
    """Counts finished calls; threads may wait for a number of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done = 0
        self._ended = False

    def add(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Wakes all waiting threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def reached(self, number: int) -> bool:
        """Waits for a number of calls; returns whether they were made before the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._done >= number)
            return self._done >= number


class Trial:
    """A cluster behind faulty proxies, its writers, and the expected rows."""

    def __init__(
        self,
        load: Load,
        cluster: LocalCluster,
        proxies: list[FaultyProxy],
        writers: list[WeightClient],
        observer: WeightClient,
    ) -> None:
        self._load, self._cluster, self._proxies = load, cluster, proxies
        self._writers, self._observer = writers, observer
        self._workload = Workload(load.seed)
        self._oracle, self._horizon = Oracle(self._workload.rows), FIRST_HORIZON
        self._saved: dict[str, Oracle] = {}  # by checkpoint, oldest first
        self._names = (f"checkpoint {number}" for number in itertools.count())
        self._lock = threading.Lock()
        self.num_writes = self.num_repeated = self.num_kills = 0
        self._first = writers[0]
        """Prepares the table for all writers."""
        self._epoch = create(self._first)
        self._join(writers[1:])
        for client in (*writers[1:], observer):
            self._until_done(lambda client=client: client.extend_schedule(0, RATES[:FIRST_HORIZON]))

    def run(self) -> None:
        for number, turn in enumerate(self._load.rounds):
            where = f"seed {self._load.seed}, round {number}"
            self._round(turn)
            self._check(where)
            for action in turn.actions:
                getattr(self, action)()
                self._send_old_requests(f"{where}, after {action}")
                self._check(f"{where}, after {action}")

    def _round(self, turn: Round) -> None:
        """Lets all threads make their calls, each through one of the writers, while shards are killed."""
        calls = self._workload.round(self._oracle, self._horizon, turn.num_calls, turn.num_looks)
        generator, num_calls = self._workload.generator, sum(map(len, calls))
        kills = zip(
            np.sort(generator.choice(num_calls, turn.num_kills, replace=False)).tolist(),
            generator.integers(NUM_SHARDS, size=turn.num_kills).tolist(),
            strict=True,
        )
        progress = Progress()
        with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
            killer = pool.submit(self._kill, kills, progress)
            callers = [
                pool.submit(self._call, self._writers[thread % len(self._writers)], calls[thread], progress)
                for thread in range(NUM_THREADS)
            ]
            try:
                for caller in callers:
                    caller.result()
            finally:
                progress.end()
                killer.result()
        for call in itertools.chain(*calls):
            if not isinstance(call, Look):
                self._oracle.apply(call)
                self.num_writes += 1

    def _call(self, client: WeightClient, calls: list[Call], progress: Progress) -> None:
        for call in calls:
            self._until_done(lambda call=call: call.send(client))
            progress.add()

    def _until_done(self, call: Callable[[], Result]) -> Result:
        """Makes a call, and repeats it if a shard could not be reached in time, or another thread has to repeat its own
        first."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return call()
            except (ShardUnavailableError, OverloadedError, ClusterError):
                if time.monotonic() > deadline:
                    raise
            with self._lock:
                self.num_repeated += 1

    def _kill(self, kills: Iterable[tuple[int, int]], progress: Progress) -> None:
        """Kills shards, each after a number of calls, and restarts them."""
        for number, shard in kills:
            if progress.reached(number):
                self._cluster.processes[shard].kill()
                self._cluster.restart(shard)
                self.num_kills += 1

    # ---- what happens at a barrier

    def checkpoint(self) -> None:
        """Takes a checkpoint and keeps the expected rows; drops the oldest if there are many."""
        name = next(self._names)
        self._first.checkpoint(name, step=self._oracle.clock)
        self._saved[name] = self._oracle.kept()
        if len(self._saved) > MAX_CHECKPOINTS:
            oldest = next(iter(self._saved))
            self._first.release(oldest)
            del self._saved[oldest]

    def rollback(self) -> None:
        """Rolls back to one of the checkpoints; later writes will arrive again."""
        names = list(self._saved)
        chosen = int(self._workload.generator.integers(len(names)))
        for client in self._writers:  # each forgets what failed before
            self._until_done(lambda client=client: client.rollback(names[chosen]))
        self._join(self._writers)  # each learns of the rollbacks of the others
        self._oracle = self._saved[names[chosen]].kept()
        for later in names[chosen + 1 :]:
            del self._saved[later]

    def extend(self) -> None:
        """Extends the schedule, first with other rates, which are replaced before they are used."""
        rates = RATES[self._horizon : self._horizon + EXTENSION]
        for client in (*self._writers, self._observer):
            for some in (2 * rates, rates):  # asks the shards first, after a rollback
                self._until_done(lambda client=client, some=some: client.extend_schedule(self._horizon, some))
        self._horizon += len(rates)

    def replace(self) -> None:
        """Writes new states of all rows that the threads share."""
        rows = self._workload.shared
        write = self._workload.write(rows, self._oracle.last_step[self._oracle.positions(rows)])
        write.send(self._first)
        self._oracle.apply(write)

    def session(self) -> None:
        """Opens a new epoch, which the other writers learn of when a write is refused."""
        self._epoch = self._first.open_session(RUN)
        for client in self._writers[1:]:
            push = self._workload.push(self._workload.rows, self._horizon)
            with pytest.raises(FencedError):
                self._until_done(lambda client=client, push=push: push.send(client))
        self._join(self._writers[1:])

    def _join(self, clients: list[WeightClient]) -> None:
        for client in clients:
            self._until_done(lambda client=client: client.open_session(RUN, join=self._epoch))

    def _send_old_requests(self, where: str) -> None:
        """Checks that the shards recognise writes of this epoch and refuse older ones."""
        for late in itertools.chain(*(proxy.replay(NUM_REPLAYED, NUM_REPLAYED) for proxy in self._proxies)):
            if late.request.method in WRITES and late.answer not in NO_ANSWER:
                epoch = WRITES[late.request.method].FromString(late.request.messages[0]).header.epoch
                wanted = ("duplicate", "fenced") if epoch == self._epoch else ("fenced",)
                assert told(late.answer) in wanted, f"{where}: {late.request} of epoch {epoch} in epoch {self._epoch}"

    def _check(self, where: str) -> None:
        """Returns what the shards hold, without faults."""
        try:
            check_rows(self._observer, self._oracle, self._horizon)
            for name, saved in self._saved.items():
                check_rows(self._observer, saved, self._horizon, name)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
        info = self._observer.describe()
        assert (info.clock, info.rows_stored) == (self._oracle.clock, self._oracle.rows_stored), where
        kept = [Checkpoint(name, saved.clock) for name, saved in self._saved.items()]
        assert self._observer.checkpoints() == sorted(kept, key=lambda known: (known.step, known.name)), where


def told(answer: Answer) -> str:
    """A shard's answer to a write."""
    if isinstance(answer, bytes):
        return "duplicate" if pb.WriteResponse.FromString(answer).duplicate else "applied"
    if answer is grpc.StatusCode.ABORTED:
        return "fenced"
    return "no answer" if answer in NO_ANSWER else answer.name


FEW_FAULTS = Faults(
    refuse=0.02,
    swallow=0.01,
    lose_reply=0.03,
    twin=0.03,
    replay_seconds=0.02,
    delay=0.06,
    delay_seconds=(0.001, 3 * TIMEOUT_SECONDS),
    cut_write=0.02,
    cut_fetch=0.4,
)
MANY_FAULTS = replace(FEW_FAULTS, swallow=0.02, lose_reply=0.05, twin=0.05, delay=0.1, cut_write=0.04)


def quick(seed: int) -> Load:
    rounds = (
        Round(num_calls=80, num_looks=8, num_kills=1, actions=("checkpoint", "extend")),
        Round(num_calls=80, num_looks=8, num_kills=0, actions=("rollback", "session")),
        Round(num_calls=80, num_looks=8, num_kills=1, actions=("replace", "rollback")),
    )
    return Load(seed=seed, rounds=rounds, faults=MANY_FAULTS)


def long(seed: int) -> Load:
    actions = 4 * ("checkpoint", "extend", "rollback", "session", "replace")
    rounds = tuple(Round(num_calls=1_000, num_looks=8, num_kills=2, actions=(one,)) for one in actions)
    return Load(seed=seed, rounds=rounds, faults=FEW_FAULTS)


@pytest.mark.parametrize(
    "load",
    [
        *(pytest.param(quick(seed), id=f"seed {seed}") for seed in range(1, 4)),
        *(pytest.param(quick(seed), id=f"seed {seed}", marks=pytest.mark.slow) for seed in range(4, 8)),
        pytest.param(long(8), id="seed 8, 20,000 writes", marks=[pytest.mark.slow, pytest.mark.timeout(1_200)]),
    ],
)
@pytest.mark.guard
def test_every_call_counts_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weightserver.client.transfer, "CHUNK_BYTES", BYTES_PER_MESSAGE)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(NUM_SHARDS))
        proxies = [
            stack.enter_context(FaultyProxy(address, seed=NUM_SHARDS * load.seed + shard, faults=load.faults))
            for shard, address in enumerate(cluster.addresses)
        ]
        addresses = [proxy.address for proxy in proxies]
        writers = [
            stack.enter_context(WeightClient(addresses, timeout_seconds=TIMEOUT_SECONDS, retry_seconds=seconds))
            for seconds in RETRY_SECONDS
        ]
        observer = stack.enter_context(WeightClient(cluster.addresses))
        trial = Trial(load, cluster, proxies, writers, observer)
        trial.run()
        recognised = sum(
            metric(address, "weightserver_duplicate_writes_total") for address in cluster.metrics_addresses
        )

    counts = sum((proxy.counts for proxy in proxies), Counter())
    late: Counter[Any] = Counter()
    twins: Counter[Any] = Counter()
    for proxy in proxies:
        late += Counter(told(late.answer) for late in proxy.late_answers if late.request.method in WRITES)
        for twin in proxy.twin_answers:
            if twin.request.method in WRITES:
                twins[tuple(sorted(map(told, twin.answers)))] += 1
    print(f"{trial.num_writes} writes, {trial.num_kills} kills, {trial.num_repeated} calls made again")
    print(f"faults {dict(counts)}, old writes again {dict(late)}, twins {dict(twins)}, {recognised:.0f} recognised")
    assert all(counts[fault] for fault in Fault), counts
    assert late.keys() <= {"duplicate", "fenced", "no answer"}, late
    assert late["duplicate"], late
    assert late["fenced"], late
    assert twins["applied", "duplicate"], twins
    assert not twins["applied", "applied"], twins
    assert trial.num_writes == sum(turn.num_calls for turn in load.rounds)
    assert trial.num_kills == sum(turn.num_kills for turn in load.rounds)
    assert trial.num_repeated, "no call had to be made again"
    assert recognised, "no shard met a duplicate since it was last killed"


def test_every_old_request_again_changes_nothing(cluster: LocalCluster, client: WeightClient) -> None:
    """Requests of any kind, the newest first."""
    workload = Workload(seed=0)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultyProxy(address, seed=0, faults=Faults())) for address in cluster.addresses]
        writer = stack.enter_context(WeightClient([proxy.address for proxy in proxies]))

        def push() -> None:
            workload.push(workload.rows, FIRST_HORIZON).send(writer)

        def write() -> None:
            workload.write(workload.rows, np.full(len(workload.rows), FIRST_HORIZON)).send(writer)

        create(writer)
        push()
        writer.extend_table(SPEC.num_rows + 100)  # not of the table that comes next
        writer.drop_table()
        for other in (replace(SPEC, correction="paper"), replace(SPEC, dtype="bfloat16")):
            writer.create_table(other)
            writer.drop_table()
        writer.create_table(SPEC)
        writer.extend_schedule(0, RATES)
        client.extend_schedule(0, RATES)
        writer.open_session(RUN)
        writer.extend_table(SPEC.num_rows + 5)
        push()
        writer.checkpoint("first", step=1)
        write()
        writer.checkpoint("second", step=2)
        writer.open_session(RUN)
        push()
        writer.rollback("first")
        push()
        writer.checkpoint("third", step=3)
        writer.copy_checkpoint("first", "copy")
        writer.release("first")
        write()

        def everything() -> list[object]:
            shards = [replace(shard, disk_bytes=0) for shard in client.describe().shards]
            states = [
                client.fetch_state(workload.rows, step=step, checkpoint=checkpoint)
                for step in (None, len(RATES))
                for checkpoint in ("", "third")
            ]
            return [shards, client.checkpoints(), *map(vars, states)]

        before = everything()
        for proxy in proxies:
            again = proxy.replay(num_newest=sys.maxsize, num_others=0)
            unused = {"Fetch", "ReadBlocks", "ReadSchedule", "SettleWrite"}
            assert {late.request.method for late in again} == set(METHODS) - unused
        np.testing.assert_equal(everything(), before)


@pytest.mark.parametrize("times", [0, 2])
def test_a_push_that_does_not_count_once_is_noticed(client: WeightClient, times: int) -> None:
    workload = Workload(seed=times)
    oracle = Oracle(workload.rows)
    create(client)
    for call in itertools.chain(*workload.round(oracle, FIRST_HORIZON, num_calls=100)):
        assert not isinstance(call, Look)
        call.send(client)
        oracle.apply(call)
    check_rows(client, oracle, FIRST_HORIZON)
    push = workload.push(workload.rows, FIRST_HORIZON)
    for _ in range(times):  # each under a number of its own
        push.send(client)
    oracle.apply(push)
    with pytest.raises(AssertionError, match=re.escape(f"rows {np.sort(push.rows).tolist()} are wrong")):
        check_rows(client, oracle, FIRST_HORIZON)
