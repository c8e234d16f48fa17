"""Every acknowledged call counts exactly once, whatever the network does and whatever is killed.

Threads of several writers push gradients and write states through a faulty proxy in front of each shard, while shards
are killed and old requests arrive again. At barriers, where all threads wait, something else happens (a checkpoint, a
rollback, a new session), and all rows must be as if each call had been made once. With SGD of rate 1 without momentum
and decay, a row is what was last written minus the gradients since: sums of whole numbers, in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from google.protobuf.message_factory import GetMessageClass

import weightserver.client.transfer
from tests.helpers.faulty_proxy import Answer, Fault, Faults, FaultyProxy
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
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.protocol._generated import weight_server_pb2 as pb

# More than a MiB of weights on each shard: a fetch of all rows is answered in two messages.
SPEC = TableSpec(num_rows=70_000, dim=8, momentum=0.0, weight_decay=0.0, init_std=0.0, rows_per_block=63)
ROWS = np.arange(SPEC.num_rows)
USED = ROWS[ROWS // SPEC.rows_per_block % 111 == 0]
"""The rows of eleven blocks, on both shards. Each block has rows of every thread."""
RATES = np.ones(64, np.float32)
BYTES_PER_MESSAGE = 2 * SPEC.dim * np.float32().nbytes
"""A push of three rows is two messages."""
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


def rows_of(thread: int) -> Int64Array:
    """The rows whose states this thread alone changes; those of NUM_THREADS are pushed to by all."""
    return USED[thread :: NUM_THREADS + 1]


def values(generator: np.random.Generator, rows: Int64Array) -> Float32Array:
    """Whole numbers other than 0, (n, D)."""
    return generator.choice([-3, -2, -1, 1, 2, 3], (len(rows), SPEC.dim)).astype(np.float32)


class Expected:
    """All rows when each call has counted once."""

    def __init__(self) -> None:
        self.weight = np.zeros((SPEC.num_rows, SPEC.dim), np.float32)
        self.last_step = np.zeros(SPEC.num_rows, np.int64)
        self.written = np.zeros(SPEC.num_rows, bool)

    def copy(self) -> Expected:
        copied = Expected()
        copied.weight, copied.last_step, copied.written = self.weight.copy(), self.last_step.copy(), self.written.copy()
        return copied

    @property
    def clock(self) -> int:
        return int(self.last_step.max())

    def push(self, rows: Int64Array, gradients: Float32Array, step: int) -> None:
        self.weight[rows] -= gradients
        self.last_step[rows] = np.maximum(self.last_step[rows], step + 1)
        self.written[rows] = True

    def write(self, rows: Int64Array, weight: Float32Array, last_step: Int64Array) -> None:
        self.weight[rows], self.last_step[rows], self.written[rows] = weight, last_step, True

    def check(self, client: WeightClient, checkpoint: str = "", among: Int64Array = ROWS) -> None:
        """Fetches all rows as they are, or were at a checkpoint, and compares some."""
        found = client.fetch_state(ROWS, checkpoint=checkpoint)
        wrong = (found.weight != self.weight).any(axis=1) | (found.last_step != self.last_step)
        assert not wrong[among].any(), f"rows {among[wrong[among]].tolist()} are wrong"


@dataclass(frozen=True, kw_only=True)
class Round:
    """The work of all threads until they meet at a barrier, and the events there."""

    num_calls: int
    """Number of pushes and writes of each thread."""
    num_kills: int
    actions: tuple[str, ...]
    """Methods of Trial."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The amount of work and the faults."""

    seed: int
    rounds: tuple[Round, ...]
    faults: Faults


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
        self._generator = np.random.default_rng(load.seed)
        self._expected = Expected()
        self._saved: dict[str, Expected] = {}  # by checkpoint, oldest first
        self._names = (f"checkpoint {number}" for number in itertools.count())
        self._lock = threading.Lock()
        self._kills: set[int] = set()
        """After how many of the calls a shard is killed."""
        self.num_writes = self.num_repeated = self.num_kills = 0
        self._first = writers[0]
        """Prepares the table for all writers."""
        self._first.create_table(SPEC)
        for client in (*writers, observer):
            self._until_done(lambda client=client: client.extend_schedule(0, RATES))
        self._epoch = self._first.open_session(RUN)
        self._join(writers[1:])

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
        total = NUM_THREADS * turn.num_calls
        self._kills = set((self.num_writes + self._generator.choice(total, turn.num_kills, replace=False)).tolist())
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            work = [pool.submit(self._calls, thread, turn.num_calls) for thread in range(NUM_THREADS)]
            for thread in work:
                thread.result()

    def _calls(self, thread: int, num_calls: int) -> None:
        client, mine, shared = self._writers[thread % len(self._writers)], rows_of(thread), rows_of(NUM_THREADS)
        generator = np.random.default_rng([self._load.seed, thread, self.num_writes])
        for number in range(num_calls):
            if generator.random() < 0.8:
                self._push(client, generator, np.concatenate([shared, mine]))
            else:
                self._write(client, generator, generator.choice(mine, 3, replace=False))
            if number == num_calls // 2:  # a thread sees its own calls
                self._until_done(lambda: self._expected.check(client, among=mine))

    def _push(self, client: WeightClient, generator: np.random.Generator, some: Int64Array) -> None:
        rows = generator.choice(some, generator.integers(1, 5), replace=False)
        gradients, step = values(generator, rows), int(generator.integers(len(RATES)))
        self._until_done(lambda: client.push_gradients(rows, gradients, step=step))
        with self._lock:
            self._expected.push(rows, gradients, step)
            self._count()

    def _write(self, client: WeightClient, generator: np.random.Generator, rows: Int64Array) -> None:
        weight = values(generator, rows)
        last_step = np.minimum(self._expected.last_step[rows] + generator.integers(0, 3, len(rows)), len(RATES))
        self._until_done(lambda: client.write_state(rows, weight, np.zeros_like(weight), last_step))
        with self._lock:
            self._expected.write(rows, weight, last_step)
            self._count()

    def _count(self) -> None:
        """Counts a write, and kills and restarts a shard if it is time; others wait for its answers."""
        if self.num_writes in self._kills:
            shard = self.num_kills % NUM_SHARDS
            self._cluster.processes[shard].kill()
            self._cluster.restart(shard)
            self.num_kills += 1
        self.num_writes += 1

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

    # ---- what happens at a barrier

    def checkpoint(self) -> None:
        """Takes a checkpoint and keeps the expected rows; drops the oldest if there are many."""
        name = next(self._names)
        self._first.checkpoint(name, step=self._expected.clock)
        self._saved[name] = self._expected.copy()
        if len(self._saved) > MAX_CHECKPOINTS:
            oldest = next(iter(self._saved))
            self._first.release(oldest)
            del self._saved[oldest]

    def rollback(self) -> None:
        """Rolls back to one of the checkpoints; later writes will arrive again."""
        names = list(self._saved)
        chosen = int(self._generator.integers(len(names)))
        for client in self._writers:  # each forgets what failed before
            self._until_done(lambda client=client: client.rollback(names[chosen]))
        self._join(self._writers)  # each learns of the rollbacks of the others
        self._expected = self._saved[names[chosen]].copy()
        for later in names[chosen + 1 :]:
            del self._saved[later]

    def replace(self) -> None:
        """Writes new states of rows that the threads share."""
        self._write(self._first, self._generator, rows_of(NUM_THREADS))

    def session(self) -> None:
        """Opens a new epoch, which the other writers learn of when a write is refused."""
        self._epoch = self._first.open_session(RUN)
        for client in self._writers[1:]:
            with pytest.raises(FencedError):
                self._push(client, self._generator, USED)
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
        """Compares what the shards hold, without faults."""
        try:
            for name, expected in {"": self._expected, **self._saved}.items():
                expected.check(self._observer, name)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
        info = self._observer.describe()
        assert (info.clock, info.rows_stored) == (self._expected.clock, self._expected.written.sum()), where
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
        Round(num_calls=10, num_kills=1, actions=("checkpoint",)),
        Round(num_calls=10, num_kills=0, actions=("rollback", "session")),
        Round(num_calls=10, num_kills=1, actions=("replace", "rollback")),
    )
    return Load(seed=seed, rounds=rounds, faults=MANY_FAULTS)


def long(seed: int) -> Load:
    actions = 5 * ("checkpoint", "rollback", "session", "replace")
    rounds = tuple(Round(num_calls=125, num_kills=2, actions=(one,)) for one in actions)
    return Load(seed=seed, rounds=rounds, faults=FEW_FAULTS)


@pytest.mark.parametrize(
    "load",
    [
        *(pytest.param(quick(seed), id=f"seed {seed}") for seed in range(1, 3)),
        *(pytest.param(quick(seed), id=f"seed {seed}", marks=pytest.mark.slow) for seed in range(3, 8)),
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
    assert trial.num_kills == sum(turn.num_kills for turn in load.rounds)
    assert trial.num_repeated, "no call had to be made again"
    assert recognised, "no shard met a duplicate since it was last killed"


def test_every_old_request_again_changes_nothing(cluster: LocalCluster, client: WeightClient) -> None:
    """Requests of any kind, the newest first."""
    generator = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultyProxy(address, seed=0, faults=Faults())) for address in cluster.addresses]
        writer = stack.enter_context(WeightClient([proxy.address for proxy in proxies]))

        def push() -> None:
            writer.push_gradients(USED, values(generator, USED), step=7)

        def write() -> None:
            writer.write_state(USED, values(generator, USED), values(generator, USED), 8)

        def begin() -> None:
            writer.create_table(SPEC)
            writer.extend_schedule(0, RATES)
            writer.open_session(RUN)

        begin()
        push()
        writer.extend_table(SPEC.num_rows + 100)  # not of the table that comes next
        writer.drop_table()
        for other in (replace(SPEC, correction="paper"), replace(SPEC, dtype="bfloat16")):
            writer.create_table(other)
            writer.drop_table()
        begin()
        client.extend_schedule(0, RATES)
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
                client.fetch_state(USED, step=step, checkpoint=checkpoint)
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
