"""The promises to clients: real `WeightClient`s call real shards on LMDB, and a sequential model in float64 predicts
the rows and the answers that each caller may receive.

Hypothesis draws the calls, the fate of each attempt (answered, unheard, late, the shard or its disk fails), the
scheduling of threads, interrupts of callers, old requests that arrive again, together with others, and lost pages.
`MemoryCluster` carries them out. The promises, for a push or state write that a caller repeats until it succeeds:

- Each shard applies it at most once, however late a request of it arrives.
- Once it has returned, every shard has applied it, exactly once.
- Every error is justified: a shard refuses exactly what it must, and a client refuses only calls after a write that is
  on some of its shards only. No call waits for ever.
- A write that failed before a rollback of the same client is never applied after it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers.disk_storage import DiskStorage
from tests.helpers.histories import Call
from tests.helpers.memory_cluster import (
    RETRY_SECONDS,
    CallFailed,
    Directory,
    Event,
    Fate,
    Known,
    MemoryCluster,
    Message,
    Run,
    interrupted_at,
)
from tests.helpers.sequential_model import TOLERANCE, Model, State, operations_of
from tests.helpers.stored import decoded
from weightserver import TableSpec, WeightClient
from weightserver.core.errors import (
    ClusterError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    MissingRatesError,
    NoTableError,
    OverloadedError,
    ShardUnavailableError,
    StepError,
    StorageError,
    TableMismatchError,
    WeightServerError,
)
from weightserver.core.rates import HashedRates
from weightserver.core.sharding import Sharding
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.shard.shard import Shard

SPEC = TableSpec(num_rows=8, dim=1, momentum=0.8, weight_decay=0.05, rows_per_block=2, init_std=1.0)
NUM_SHARDS = 2
MAX_ROWS = 13
"""Number of rows after extensions."""
HORIZON = 12
"""Steps of writes and fetches are at most these."""
RATES = np.linspace(0.4, 0.05, 16, dtype=np.float32)
"""Each step has one of two learning rates: this, or half of it."""
NUM_WRITERS = 3
ELSEWHERE = 10**9
"""Number of an event that no shard of the cluster descends from."""
NAMES = "abc"

WRITES = {"PushGradients": "push_gradients", "WriteState": "write_state"}
CHECKPOINT_CHANGES = {"Checkpoint": "checkpoint", "Release": "release", "Rollback": "rollback"}


# ---- what Hypothesis decides


@dataclass(frozen=True)
class Action:
    """A call for a client to make; its arguments are interpreted in the state at that time."""

    kind: str
    rows: tuple[int, ...] = ()
    step: int = 0
    name: str = ""
    number: int = 0


@dataclass(frozen=True)
class Plan:
    """The fate of a call; see `Run`."""

    fates: tuple[Fate, ...]
    patient: bool
    turns: tuple[bool, ...]
    interrupt: int | None


picks = st.integers(0, 2**16)
some_rows = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=4, unique=True).map(tuple)
fates = st.sampled_from([*[Fate.ANSWERED] * 6, *Fate])
plans = st.builds(
    Plan,
    st.lists(fates, max_size=5).map(tuple),
    st.booleans(),
    st.lists(st.booleans(), max_size=4).map(tuple),
    st.one_of(st.none(), st.none(), st.integers(0, 12)),
)
pushes = st.builds(Action, st.just("push"), some_rows, st.integers(0, HORIZON - 1))
writes = st.builds(Action, st.just("write"), some_rows, st.integers(-1, 2))
repetitions = st.builds(Action, st.just("repeat"), number=picks)
checkpoints = st.builds(
    Action, st.just("checkpoint"), step=st.sampled_from([0, 0, 0, 1, -1]), name=st.sampled_from(NAMES)
)
releases = st.builds(Action, st.just("release"), name=st.sampled_from(NAMES))
rollbacks = st.builds(Action, st.just("rollback"), number=picks)
openings = st.builds(Action, st.sampled_from(["open_session", "open_session", "join_session", "force_session"]))
extensions = st.builds(Action, st.just("extend_table"), number=st.integers(SPEC.num_rows, MAX_ROWS))
schedules = st.builds(
    Action, st.just("extend_schedule"), step=st.integers(-1, 2), name=st.sampled_from(["", "half"]), number=picks
)
descriptions = st.just(Action("describe"))
reads = st.builds(Action, st.just("fetch"), some_rows, st.integers(-1, HORIZON), st.sampled_from(["", "", *NAMES]))
actions = st.one_of(
    pushes, pushes, writes, repetitions, checkpoints, releases, rollbacks, openings, extensions, schedules
)


GIVE_ALL = Action("extend_schedule", step=-99, number=len(RATES) - 1)
"""Gives the client the learning rates of all steps."""


# ---- what must be


def num_steps(call: Call) -> int:
    """How many learning rates a call needs."""
    match call.kind:
        case "push_gradients":
            return int(call.arguments["step"]) + 1
        case "write_state":
            return max(call.arguments["last_step"], default=0)
        case _:
            return int(call.arguments.get("step") or 0)


def rates_of(message: Message) -> pb.Rates:
    """The learning rates that a request names."""
    rates: pb.Rates = (message.first.header if hasattr(message.first, "header") else message.first).rates
    return rates


@dataclass
class ShardModel:
    """The expected contents of a shard, and the calls that may still arrive."""

    state: State
    num_rows: int
    session_id: bytes = b""
    applied: frozenset[int] = frozenset()
    """Calls that were applied, including those that a rollback has undone."""
    given_up: frozenset[int] = frozenset()
    """Calls that must no longer be applied."""
    taken: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    """Step and id of its checkpoints."""
    used: tuple[float, ...] = ()
    """The learning rates that its writes have used."""
    used_at: Mapping[str, int] = field(default_factory=dict)
    """How many of them were used at its checkpoints."""
    peers: tuple[Known, ...] = ()
    """The marks of all shards that a client reported last."""
    timeline: Hashable = None
    """Of its last rollback, or of a session that was forced since, which led to none."""
    newest: Mapping[bytes, tuple[int, bool]] = field(default_factory=dict)
    """Each writer's newest number, and whether that write was applied or sealed."""
    returned_to: str = ""
    """The checkpoint of its last rollback."""

    @property
    def session(self) -> tuple[int, bytes]:
        """Epoch and session id."""
        return self.state.epoch, self.session_id

    def may_differ(self, checkpoint: str) -> bool:
        """Whether rows were written since, or may have been: a checkpoint does not say whether rows were written
        between an earlier one and itself."""
        names = list(self.taken)
        return self.is_changed_since(checkpoint) or self.returned_to in names[names.index(checkpoint) + 1 :]

    def has_settled(self, header: pb.WriteHeader) -> bool:
        """Whether that write must no longer be applied."""
        number, applied = self.newest.get(header.writer, (0, True))
        return header.sequence < number or (header.sequence == number and not applied)

    def is_changed_since(self, checkpoint: str) -> bool:
        """Whether rows were written."""
        then, now = self.state.checkpoints[checkpoint], self.state.rows
        return any(then[row][3:] != now[row][3:] for row in now)


def new_root() -> Path:
    """A folder for shards, in memory if possible: a disk would take most of the time."""
    return Path(tempfile.mkdtemp(prefix="weightserver-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


@functools.cache
def another_cluster() -> list[Directory]:
    """Directories of another cluster: the same spec, and a session of the same number."""
    cluster = MemoryCluster(NUM_SHARDS, new_root())
    atexit.register(shutil.rmtree, cluster.root)
    cluster.take_over()
    client = WeightClient(cluster.addresses)
    with cluster.running(Run()):
        client.create_table(SPEC)
        client.extend_schedule(0, RATES)
        client.open_session("run", hold=False)
        client.push_gradients([0, 2], np.ones((2, SPEC.dim), np.float32), step=0)
    cluster.let_go()
    return cluster.directories


@functools.cache
def model_of(rates: tuple[float, ...]) -> Model:
    return Model(SPEC, rates)


@dataclass
class Writer:
    """A client, and its caller's record of its calls."""

    name: str
    """One for each client."""
    client: WeightClient
    epoch: int = 0
    """Of its session; 0 without one."""
    failed: list[Made] = field(default_factory=list)
    """Pushes and state writes whose last run failed, oldest first; the caller may repeat them."""
    repeated: list[Made] = field(default_factory=list)
    """Those that are being repeated."""
    rolling_back: bool = False
    """Whether its last rollback failed."""
    most_carried: int = 0
    """The most learning rates that one of its writes needed."""
    most_used: int = 0
    """The most that a shard had used at one of its calls, since its client last asked."""
    timelines: int = 0
    """The number of rollbacks, and of directories put back, as its client knows it."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that its client knows."""
        return tuple(self.client._schedule._known.values.tolist())


@dataclass(eq=False)
class Made:
    """A call that was made, perhaps several times."""

    call: Call
    writer: Writer
    gives_up: frozenset[int] = frozenset()
    """In a rollback: calls that must not be applied after it."""
    beside: list[Made] = field(default_factory=list)
    """In a rollback: repetitions under way when it was called. If it is not refused, none of them had taken up its
    numbers yet, and each is a new write after it."""
    failed_at: int | None = None
    """The number of rollbacks, and of directories put back, that its client knew of when it first failed."""


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        another_cluster()
        self.cluster = MemoryCluster(NUM_SHARDS, new_root())
        self.cluster.take_over()
        self.shards = [self.new_shard(shard) for shard in range(NUM_SHARDS)]
        self.num_calls = self.num_writers = self.num_timelines = 0
        self.schedules: set[tuple[float, ...]] = set()
        """Every sequence of learning rates that a client knew."""
        self.writers: list[Writer] = []
        self.numbers: dict[int, int] = {}
        """The writer's number under which each call was applied last."""
        self.changed = set(range(NUM_SHARDS))
        self.is_anything_lost = False
        self.wrong: int | None = None
        self.told: BaseException | None = None
        """The last error, with everything that it keeps alive: the caller may make its next call while handling it."""
        self.copies: list[tuple[int, Directory, ShardModel]] = []
        writer = self.new_writer()
        with self.cluster.running(Run()):
            writer.client.create_table(SPEC)
        self.cluster.log.clear()
        self.perform(writer, Action("open_session"))
        self.perform(writer, GIVE_ALL)

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.let_go()
            shutil.rmtree(self.cluster.root)

    def new_shard(self, shard: int) -> ShardModel:
        rows = self.rows_of(shard, 0, SPEC.num_rows)
        return ShardModel(model_of(()).initial(rows), SPEC.num_rows)

    def new_writer(self) -> Writer:
        client = WeightClient(self.cluster.addresses, timeout_seconds=1, retry_seconds=RETRY_SECONDS)
        self.num_writers += 1
        self.writers.append(Writer(f"writer {self.num_writers}", client))
        return self.writers[-1]

    def rows_of(self, shard: int, first: int, last: int) -> list[int]:
        mine = Sharding(SPEC.rows_per_block, NUM_SHARDS).rows_of_shard(shard, last)
        return [row for row in mine.tolist() if row >= first]

    # ---- callers

    def writer(self, which: int) -> Writer:
        """Draws one of the newest items."""
        return self.writers[-1 - which % min(NUM_WRITERS, len(self.writers))]

    @precondition(lambda self: len(self.writers) < 6)
    @rule(opens=st.booleans(), plan=plans)
    def another_client(self, opens: bool, plan: Plan) -> None:
        writer = self.new_writer()
        self.perform(writer, Action("open_session" if opens else "join_session"), plan)
        self.perform(writer, GIVE_ALL)

    @rule(which=picks, action=st.one_of(pushes, pushes, pushes, writes), plan=plans)
    def write(self, which: int, action: Action, plan: Plan) -> None:
        self.perform(self.writer(which), action, plan)

    @precondition(lambda self: any(writer.failed for writer in self.writers))
    @rule(which=picks, action=repetitions, plan=plans)
    def repeat(self, which: int, action: Action, plan: Plan) -> None:
        some = [writer for writer in self.writers if writer.failed]
        self.perform(some[which % len(some)], action, plan)

    @rule(which=picks, action=st.one_of(checkpoints, releases, rollbacks), plan=plans)
    def change_checkpoints(self, which: int, action: Action, plan: Plan) -> None:
        self.perform(self.writer(which), action, plan)

    @rule(which=picks, action=st.one_of(openings, extensions, schedules, schedules, descriptions), plan=plans)
    def change_the_table(self, which: int, action: Action, plan: Plan) -> None:
        self.perform(self.writer(which), action, plan)

    @rule(which=picks, action=reads, plan=plans)
    def read(self, which: int, action: Action, plan: Plan) -> None:
        self.perform(self.writer(which), action, plan)

    @rule(
        which=picks,
        other=picks,
        first=actions,
        second=actions,
        plan=plans,
        its_plan=plans,
        turns=st.lists(st.booleans(), min_size=1, max_size=8),
    )
    def two_threads(
        self, which: int, other: int, first: Action, second: Action, plan: Plan, its_plan: Plan, turns: list[bool]
    ) -> None:
        """The second call, of the same client or another, runs while the first one waits."""
        writer, beside = self.writer(which), self.writer(other)
        self.cluster.threads.start(lambda: self.perform(beside, second, its_plan, beside=True))
        self.perform(writer, first, replace(plan, turns=tuple(turns), interrupt=None), beside=True)
        self.threads_go_on()

    # ---- the network, the shards and the clients' threads

    @precondition(lambda self: self.cluster.messages)
    @rule(which=st.lists(picks, min_size=1, max_size=4), fate=st.sampled_from([*[Fate.ANSWERED] * 3, *Fate]))
    def arrive(self, which: list[int], fate: Fate) -> None:
        """Old or new requests reach a shard and share a commit, in which the shard may die."""
        messages = self.cluster.messages
        shard = messages[which[0] % len(messages)].shard
        there = [message for message in messages if message.shard == shard]
        first, *others = [there[number % len(there)] for number in which]
        with contextlib.suppress(Exception), self.cluster.running(Run()):
            self.cluster.arrive(first, fate, others)
        self.catch_up()

    @rule(shard=st.integers(0, NUM_SHARDS - 1))
    def restart(self, shard: int) -> None:
        self.cluster.restart(shard)
        self.changed.add(shard)

    @precondition(lambda self: len(self.copies) < 3)
    @rule(shard=st.integers(0, NUM_SHARDS - 1))
    def copy_a_directory(self, shard: int) -> None:
        self.copies.append(
            (shard, self.cluster.directories[shard].copy(self.cluster.root), replace(self.shards[shard]))
        )

    @precondition(lambda self: self.copies)
    @rule(which=picks)
    def put_a_copy_back(self, which: int) -> None:
        """Later writes are lost, and clients that know of them must notice."""
        shard, directory, model = self.copies[which % len(self.copies)]
        self.is_anything_lost |= directory.history != self.cluster.directories[shard].history
        self.cluster.replace(shard, directory.copy(self.cluster.root))
        self.shards[shard] = replace(model)
        self.changed.add(shard)
        self.num_timelines += 1

    @rule(shard=st.integers(0, NUM_SHARDS - 1), seed=picks)
    def lose_pages(self, shard: int, seed: int) -> None:
        """The disk has lost pages of the last commit: the shard does not start, or is as it was, or answers nothing."""
        damaged = self.cluster.directories[shard].storage.copy(self.cluster.root)
        damaged.lose_pages(Random(seed))
        with contextlib.suppress(StorageError):
            damaged.restart()
            self.compare(self.shards[shard], Shard(damaged, shard=shard, num_shards=NUM_SHARDS))
        damaged.remove()

    @rule(
        shard=st.integers(0, NUM_SHARDS - 1),
        kind=st.sampled_from(["empty", "another cluster's"]),
        calls=st.lists(st.tuples(picks, actions, plans), min_size=1, max_size=4),
    )
    def serve_a_wrong_directory(self, shard: int, kind: str, calls: list[tuple[int, Action, Plan]]) -> None:
        """A foreign directory is served for a while: no client changes it, or receives a wrong answer from it."""
        self.threads_go_on()
        root = self.cluster.root
        wrong = Directory(DiskStorage(root)) if kind == "empty" else another_cluster()[shard].copy(root)
        wrong.history = [ELSEWHERE]
        right, self.wrong = self.cluster.replace(shard, wrong), shard
        before = wrong.storage.contents
        self.new_writer()
        for which, action, plan in calls:
            self.perform(self.writer(which), action, plan)
        self.threads_go_on()
        for message in self.cluster.messages:
            with contextlib.suppress(CallFailed), self.cluster.running(Run()):
                if message.shard == shard:
                    self.cluster.arrive(message)
        self.catch_up()
        assert wrong.storage.contents == before
        self.cluster.replace(shard, right)
        self.writers.pop()
        self.wrong = None

    @precondition(lambda self: self.cluster.threads.ready)
    @rule()
    def threads_go_on(self) -> None:
        """Threads that an interrupted caller has left continue."""
        self.cluster.threads.shutdown()
        self.catch_up()

    # ---- one call

    def perform(self, writer: Writer, action: Action, plan: Plan | None = None, *, beside: bool = False) -> None:
        """Makes the call and checks its answer."""
        made, method = self.prepare(writer, action)
        if made is None:
            return
        run = Run(made, writer.name, *(plan.fates, plan.patient, plan.turns, plan.interrupt) if plan else ())
        run.knew = self.cluster.known_to(writer.name)
        if action.kind == "repeat":
            writer.repeated.append(made)
        told: BaseException | None = None
        try:
            with self.cluster.running(run):
                answer = method()
        except (WeightServerError, ValueError, KeyboardInterrupt) as error:
            told = error
        finally:
            writer.repeated = [other for other in writer.repeated if other is not made]
        self.schedules.add(writer.rates)
        if writer.client._shards._connections is None:  # one that could not connect to all shards has met none
            self.cluster.forget(writer.name)
        self.catch_up()
        assert not run.unnoticed, "a shard answered a client that knows of more than it holds"
        if told is None:
            self.check_done(made, answer, beside=beside)
        else:
            assert self.can_be_told(made, run, told, beside=beside), (made.call, run, told)
        self.told = told
        self.remember(made, told)

    def prepare(self, writer: Writer, action: Action) -> tuple[Made | None, Callable[[], Any]]:
        """The call to make, or None."""
        client, rows = writer.client, sorted({row % self.num_rows for row in action.rows})
        match action.kind:
            case "repeat":
                if not writer.failed:
                    return None, lambda: None
                made = replace(writer.failed.pop(action.number % len(writer.failed)))
                return made, functools.partial(getattr(client, made.call.kind), **made.call.arguments)
            case "push":
                gradients = np.full((len(rows), SPEC.dim), 1 + self.num_calls / 16, np.float32)
                return self.make(writer, client.push_gradients, rows=rows, gradients=gradients, step=action.step)
            case "write":
                newest = max(self.shards[self.shard_of(row)].state.rows[row].last_step for row in rows)
                weight = np.full((len(rows), SPEC.dim), 1 + self.num_calls / 16, np.float32)
                last_step = [min(max(newest + action.step, 0), HORIZON)] * len(rows)
                state = {"weight": weight, "momentum_buffer": -weight, "last_step": last_step}
                return self.make(writer, client.write_state, rows=rows, **state)
            case "checkpoint":
                at = min(max(self.most_used + action.step, 0), HORIZON)
                return self.make(writer, client.checkpoint, name=action.name, step=at)
            case "release":
                return self.make(writer, client.release, name=action.name)
            case "rollback":
                common = [
                    name
                    for name in self.shards[0].state.checkpoints
                    if all(name in shard.state.checkpoints for shard in self.shards)
                ]
                if not common:
                    return None, lambda: None
                made, method = self.make(writer, client.rollback, name=common[action.number % len(common)])
                made.gives_up = frozenset(failed.call.number for failed in writer.failed)
                made.beside = writer.repeated[:]
                return made, method
            case "join_session":
                return self.make(writer, client.open_session, name="run", join=self.newest_epoch, hold=False)
            case "open_session":
                return self.make(writer, client.open_session, name="run", hold=False)
            case "force_session":
                return self.make(writer, client.open_session, name="run", force=True, hold=False)
            case "extend_schedule":
                start = max(0, min(self.most_used + action.step, len(writer.rates)))
                rates = RATES[start : start + 1 + action.number % len(RATES)] / (2 if action.name else 1)
                return self.make(writer, client.extend_schedule, start_step=start, learning_rates=rates)
            case "describe":
                return self.make(writer, client.describe)
            case "extend_table":
                most = max(self.num_rows, action.number)
                return self.make(writer, client.extend_table, num_rows=most)
            case "fetch":
                step = None if action.step < 0 else action.step
                where = {"checkpoint": action.name} if action.name else {}
                return self.make(writer, client.fetch_state, rows=rows, step=step, **where)
        raise ValueError(action)

    def make(self, writer: Writer, method: Callable[..., Any], **arguments: Any) -> tuple[Made, Callable[[], Any]]:
        """A new call."""
        call = Call(self.next_number(), writer.name, method.__name__, writer.epoch, arguments)
        if method.__name__ not in (*WRITES.values(), "checkpoint"):
            return Made(call, writer), functools.partial(method, **arguments)
        writer.most_carried = max(writer.most_carried, num_steps(call))
        return Made(call, writer), functools.partial(method, **arguments)

    def next_number(self) -> int:
        self.num_calls += 1
        return self.num_calls - 1

    def make_anew(self, repeated: Made) -> None:
        """A rollback came before the repetition had taken up its numbers."""
        repeated.call, repeated.failed_at = replace(repeated.call, number=self.next_number()), None

    def remember(self, made: Made, told: BaseException | None) -> None:
        """Records the outcome of a call."""
        writer, kind = made.writer, made.call.kind
        if kind in WRITES.values():
            if told:
                writer.failed.append(made)
                if made.failed_at is None:
                    made.failed_at = writer.timelines
        elif kind == "rollback":
            writer.rolling_back = told is not None
            if not told:
                writer.failed.clear()
        if kind in ("rollback", "open_session") and not told:
            writer.timelines = self.num_timelines
        if kind in ("rollback", "describe") and not told:
            writer.most_used = 0
        writer.most_used = max(writer.most_used, self.most_used)

    @property
    def newest_epoch(self) -> int:
        return max(shard.state.epoch for shard in self.shards)

    @property
    def most_used(self) -> int:
        """The most learning rates that a shard has used."""
        return max(len(shard.used) for shard in self.shards)

    @property
    def num_rows(self) -> int:
        """Those of the smallest table of a shard."""
        return min(shard.num_rows for shard in self.shards)

    def shard_of(self, row: int) -> int:
        return row // SPEC.rows_per_block % NUM_SHARDS

    # ---- errors that a caller may get

    def check_done(self, made: Made, answer: Any, *, beside: bool) -> None:
        """Checks a call that has returned."""
        call = made.call
        if not {"force", "join"} & call.arguments.keys() and call.kind in ("open_session", "checkpoint") and not beside:
            assert self.are_of_one_time, (call, self.shards)
        if self.wrong is not None and call.kind != "extend_schedule":  # which asks no shard
            needed = map(self.shard_of, call.arguments["rows"]) if "rows" in call.arguments else range(NUM_SHARDS)
            is_known = call.number in self.shards[self.wrong].applied  # a repetition of what the right one has done
            assert is_known or self.wrong not in needed, (call, "did without the directory that it needed")
        if call.kind == "open_session":
            made.writer.epoch = answer
            if "join" not in call.arguments:
                self.cluster.told_of_loss.discard(made.writer.name)
                if "force" not in call.arguments:
                    for shard, known in enumerate(itertools.chain(*(model.peers for model in self.shards))):
                        assert not self.cluster.lacks(shard % NUM_SHARDS, known.change), (call, self.shards)
        elif call.kind == "fetch_state":
            if not beside:
                call.result, rates = vars(answer), made.writer.rates
                for shard in range(NUM_SHARDS):
                    assert self.explained(shard, call, "done", rates) is not None, (call, answer, self.shards[shard])
        elif call.kind == "extend_schedule":
            start, rates = call.arguments["start_step"], call.arguments["learning_rates"]
            assert beside or made.writer.rates[start : start + len(rates)] == tuple(rates.tolist()), call
        elif call.kind == "describe":
            assert beside or self.used_agree, (call, self.shards)
        elif call.kind == "extend_table":
            assert self.num_rows >= call.arguments["num_rows"]
        else:
            for shard in range(NUM_SHARDS):
                if "rows" not in call.arguments or any(self.shard_of(row) == shard for row in call.arguments["rows"]):
                    assert call.number in self.shards[shard].applied, (call, f"is not there on shard {shard}")
            assert call.kind != "checkpoint" or beside or self.used_agree, (call, self.shards)

    def can_be_told(self, made: Made, run: Run, error: BaseException, *, beside: bool) -> bool:
        call, writer = made.call, made.writer
        if isinstance(error, KeyboardInterrupt):
            return run.interrupt is not None
        if self.wrong is not None and isinstance(error, (ClusterError, DataLossError, NoTableError, StepError)):
            return True
        if type(error) in run.refusals:  # `check_refusal` says whether the shard should have
            return True
        match error:
            case ValueError():
                return call.arguments.get("num_rows", MAX_ROWS) < max(shard.num_rows for shard in self.shards)
            case OverloadedError():
                return beside
            case StepError():  # which the client knows by itself, or from all shards' clocks before a new checkpoint
                is_late = call.kind == "checkpoint" and num_steps(call) < self.most_used
                return is_late or num_steps(call) > len(writer.rates)
            case TableMismatchError():
                fixed = max(writer.most_carried, writer.most_used, self.most_used)
                return call.kind == "extend_schedule" and (call.arguments["start_step"] < fixed or beside)
            case ShardUnavailableError():
                # The time of another call passes for this one too, also of one whose caller has left, and that of
                # attempts on an overloaded shard, or a wrong one.
                others_ran = any(run.turns[: run.num_waits])
                return others_ran or (run.silent and (not run.patient or beside or self.wrong is not None))
            case DataLossError():
                return self.knows_of_loss(writer) or (
                    call.kind == "open_session" and any(map(self.knows_of_loss, self.writers))
                )
            case FencedError():
                return not writer.epoch
            case NoTableError():
                name = str(call.arguments.get("name", call.arguments.get("checkpoint")))
                kept = {shard.taken.get(name) for shard in self.shards}
                return None in kept or len(kept) > 1 or beside
            case ClusterError():
                differ = len({shard.num_rows for shard in self.shards}) > 1 or not self.used_agree
                differ |= self.are_of_two_sessions
                compares = call.kind in ("open_session", "checkpoint") and not self.are_of_one_time
                return writer.rolling_back or beside or differ or compares or self.must_repeat(made)
        return False

    @property
    def are_of_two_sessions(self) -> bool:
        """Whether two shards are in different sessions of one epoch, as after copies of both were served."""
        return len({shard.state.epoch for shard in self.shards}) < len({shard.session for shard in self.shards})

    @property
    def are_of_one_time(self) -> bool:
        """Whether every rollback and every forced session has led to a rollback of all shards."""
        return len({shard.timeline for shard in self.shards}) == 1

    def knows_of_loss(self, writer: Writer) -> bool:
        """Whether a shard lacks something that its client knows of, or its client has learnt of a loss."""
        return writer.name in self.cluster.told_of_loss or any(
            self.cluster.lacks(shard, known.event) for shard, known in enumerate(self.cluster.known_to(writer.name))
        )

    @property
    def used_agree(self) -> bool:
        """Whether no two shards have used different learning rates for a step, as when two writers gave them."""
        longest = max((shard.used for shard in self.shards), key=len)
        return all(longest[: len(shard.used)] == shard.used for shard in self.shards)

    def was_replaced(self, made: Made) -> bool:
        """Whether the shards' rows were replaced since the call failed."""
        return made.failed_at is not None and made.failed_at < self.num_timelines

    def must_repeat(self, made: Made) -> bool:
        """Whether an earlier write is on some of its shards only, or the shards' rows were replaced since it failed."""
        if self.was_replaced(made):
            return True
        for failed in made.writer.failed:
            shards = set(map(self.shard_of, failed.call.arguments["rows"]))
            applied = {failed.call.number in self.shards[shard].applied for shard in shards}
            if len(applied) > 1 or self.was_replaced(failed):
                return True
        return False

    # ---- what shards may do

    def catch_up(self) -> None:
        """Applies the shards' events to the model."""
        log = self.cluster.log
        while log:
            event = log.pop(0)
            self.changed.add(event.message.shard)
            if event.message.run.call is None:
                continue
            if event.message.shard == self.wrong:
                assert event.refused, (event.message, "changed a wrong directory")
            elif event.refused:
                if event.alone:
                    self.check_refusal(event)
            else:
                self.check_commit(event)

    def check_commit(self, event: Event) -> None:
        message, number = event.message, event.message.shard
        shard, made = self.shards[number], message.run.call
        if message.method == "OpenSession":
            if message.session != shard.session:
                epoch, shard.session_id = message.session
                assert epoch > shard.state.epoch, (message, "goes back to an older session")
                shard.state = replace(shard.state, epoch=epoch)
                if "force" in made.call.arguments:
                    self.num_timelines += 1
                    shard.timeline = number, shard.session_id
                else:
                    shard.peers = message.run.knew
        elif message.method == "ExtendTable":
            if event.result:
                more = self.rows_of(number, shard.num_rows, message.first.num_rows)
                shard.state, shard.num_rows = model_of(()).extended(shard.state, more), message.first.num_rows
        elif message.method == "SettleWrite":
            if not event.result:
                shard.newest = {**shard.newest, message.first.header.writer: (message.first.header.sequence, False)}
        elif event.result:  # else the shard says that it has done this before
            header = message.first.header
            if self.is_a_new_write(made, header):
                self.make_anew(made)
            call = made.call
            assert call.number not in shard.applied, (call, f"counts twice on shard {number}")
            assert call.number not in shard.given_up, (call, f"comes to shard {number} after a rollback")
            assert not event.behind, (message, "was applied by a shard that lacks what its client knows of it")
            assert message.session == shard.session, (message, "is not of this session")
            assert not shard.has_settled(header), (message, "was abandoned")
            shard.newest = {**shard.newest, header.writer: (header.sequence, True)}
            rates = shard.used
            if message.method in (*WRITES, "Checkpoint"):
                named = self.named(shard, message.first.header.rates)
                assert named is not None, (message, "names learning rates that no client knows")
                rates = named[: num_steps(call)]
                assert rates[: len(shard.used)] == shard.used[: len(rates)], (message, "uses others than were used")
                assert len(rates) == num_steps(call), message
                late = call.kind == "checkpoint" and len(rates) < len(shard.used)
                assert not late or call.arguments["name"] in shard.taken, (call, "cannot be read at its step")
                rates = shard.used = max(shard.used, rates, key=len)  # a late push follows the row to its last step
            done = self.explained(number, call, "done", rates)
            assert done is not None, (call, f"was taken by shard {number}")
            shard.state = done
            shard.applied |= {call.number}
            self.numbers[call.number] = header.sequence
            while made.beside:
                made.gives_up |= {made.beside[-1].call.number}
                self.make_anew(made.beside.pop())
            shard.given_up |= made.gives_up
            if call.kind in ("checkpoint", "rollback"):
                shard.peers = message.run.knew
            if call.kind == "rollback":
                shard.timeline = message.first.timeline
                self.num_timelines += 1
            if call.kind == "checkpoint":
                name, identity = call.arguments["name"], message.first.identity
                if number == 0 and name in shard.taken:
                    identity = shard.taken[name][1]
                shard.taken = {**shard.taken, name: (call.arguments["step"], identity)}
                shard.used_at = {name: len(shard.used), **shard.used_at}
            if call.kind == "rollback":
                shard.returned_to = call.arguments["name"]
                shard.used = shard.used[: shard.used_at[shard.returned_to]]
            shard.taken = {name: shard.taken[name] for name in done.checkpoints}
            shard.used_at = {name: shard.used_at[name] for name in done.checkpoints}
            self.no_version_is_kept_in_vain(message)

    def is_a_new_write(self, made: Made, header: pb.WriteHeader) -> bool:
        """Whether a state write that all its shards have applied is repeated after another write of its client."""
        call = made.call
        if call.kind != "write_state":
            return False
        shards = {self.shard_of(row) for row in call.arguments["rows"]}
        is_applied = all(call.number in self.shards[shard].applied for shard in shards)
        return is_applied and header.sequence > self.numbers[call.number] + 1

    def check_refusal(self, event: Event) -> None:
        """Whether the refusal was required."""
        message, error = event.message, event.result
        shard, call = self.shards[message.shard], message.run.call.call
        if error is DataLossError:
            had_to = event.behind or message.method == "Describe"  # which may carry a mark that another shard sent
        elif error is StorageError:
            had_to = event.disk_fails
        elif error is FencedError:
            if message.method == "OpenSession" and not message.first.join:
                had_to = message.session[0] <= shard.state.epoch
            elif message.method == "ExtendTable":
                had_to = message.session[0] != shard.state.epoch
            else:
                header = getattr(message.first, "header", None)
                fenced = message.session != shard.session and message.method != "SettleWrite"
                had_to = fenced or (header is not None and shard.has_settled(header))
        elif error is InvalidRequestError and message.method == "Checkpoint":
            name = call.arguments["name"]
            if name in shard.taken:
                had_to = shard.taken[name][0] != call.arguments["step"] or shard.may_differ(name)
            else:  # something was written since the client described the shards
                newest = max(self.cluster.directories[message.shard].history)
                had_to = newest > message.run.knew[message.shard].event
        elif error is InvalidRequestError and message.method == "ExtendTable":
            had_to = message.first.num_rows < shard.num_rows
        elif error is NoTableError:
            had_to = (
                message.first.name not in shard.taken or shard.taken[message.first.name][1] != message.first.identity
            )
        elif error is MissingRatesError:
            had_to = rates_of(message).start > len(shard.used)
        elif error is TableMismatchError:
            named = self.named(shard, rates_of(message))
            had_to = named is None or named[: len(shard.used)] != shard.used[: len(named)]
        elif error is StepError and message.method == "Checkpoint":
            had_to = call.arguments["step"] < len(shard.used)
        elif error is StepError:
            had_to = self.explained(message.shard, call, error.__name__, shard.used) is not None
        else:
            had_to = False
        assert had_to, (message, error, shard)

    def named(self, shard: ShardModel, rates: pb.Rates) -> tuple[float, ...] | None:
        """The learning rates that a request names; None if nobody knows those of its digest."""
        for known in (shard.used, *(writer.rates for writer in self.writers), *self.schedules):
            hashed = HashedRates(np.array(known, np.float32))
            if len(known) >= rates.start and hashed.digest(rates.start) == rates.digest:
                return (*known[: rates.start], *np.frombuffer(rates.learning_rates, "<f4").tolist())
        return None

    def explained(self, shard: int, call: Call, outcome: str, rates: tuple[float, ...]) -> State | None:
        """The shard's state after a call of its session by these learning rates; None if this outcome is
        impossible."""
        model = self.shards[shard]
        told = replace(call, epoch=model.state.epoch, outcome=outcome, message=f"shard {shard} at")
        state: State | None = model.state
        for operation in operations_of(told, shard, frozenset(model.state.rows)):
            state = model_of(rates).apply(model.state, operation)
        return state

    def no_version_is_kept_in_vain(self, message: Message) -> None:
        """Checks the versions of a block after a write: at most one for each checkpoint, and the newest."""
        if message.method in WRITES:
            with self.cluster.directories[message.shard].storage.read() as txn:
                for row in message.run.call.call.arguments["rows"]:
                    block = row // SPEC.rows_per_block
                    versions = [version for version in txn.versions(block) if version.block == block]
                    assert len(versions) <= 1 + len(NAMES), (row, versions)

    @invariant()
    def same(self) -> None:
        """Compares the shards with the model."""
        while changed := getattr(self, "changed", None):
            number = changed.pop()
            self.compare(self.shards[number], self.cluster.processes[number].shard)

    def compare(self, model: ShardModel, shard: Shard) -> None:
        """Compares everything that can be read from a shard."""
        assert shard.state.epoch == model.state.epoch
        assert tuple(shard.used_rates.values.tolist()) == model.used
        assert shard.state.clock == len(model.used)
        assert shard.state.rows_stored == sum(
            bool(row.written_by >= 0 or row.pushed_by) for row in model.state.rows.values()
        )
        assert [kept.name for kept in shard.state.checkpoints] == list(model.state.checkpoints)
        for checkpoint, rows in [(None, model.state.rows), *model.state.checkpoints.items()]:
            chunks = shard.fetch(np.array(list(rows)), step=None, state=True, checkpoint=checkpoint)
            found = decoded(chunks, shard.require_table().spec)
            assert found.last_step.tolist() == [row.last_step for row in rows.values()]
            for name in ("weight", "momentum_buffer"):
                expected = np.array([getattr(row, name) for row in rows.values()])
                allowed = 10 * TOLERANCE * (1 + np.abs(expected).max())
                assert np.abs(getattr(found, name) - expected).max() <= allowed, (checkpoint, name)


@pytest.mark.parametrize(
    "num_schedules",
    [
        15,
        pytest.param(120, marks=[pytest.mark.guard, pytest.mark.timeout(900)]),
        pytest.param(3_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_any_schedule(num_schedules: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=num_schedules,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# ---- schedules that were wrong once


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with one client, whose session is open."""
    machine = Machine()
    machine.start()
    yield machine
    machine.teardown()


PUSH = Action("push", (0, 2), 0)
"""To both shards."""


def interrupted(wait: int) -> Plan:
    """A plan with a KeyboardInterrupt where the caller waits."""
    return Plan((), True, (), wait)


@pytest.mark.parametrize("wait", range(8))
@pytest.mark.parametrize("next_call", [Action("repeat"), Action("rollback")])
def test_an_interrupted_push_counts_once_or_is_rolled_back(machine: Machine, next_call: Action, wait: int) -> None:
    (writer,) = machine.writers
    machine.perform(writer, Action("checkpoint", name="a"))
    machine.perform(writer, PUSH, interrupted(wait))
    machine.threads_go_on()
    machine.perform(writer, next_call)
    assert not writer.failed
    machine.same()


UNHEARD = Plan((Fate.UNHEARD, Fate.UNHEARD), False, (), None)
LOST = Plan((Fate.LOST, Fate.LOST), False, (), None)
HALF_LOST = Plan((Fate.UNHEARD, Fate.LOST), False, (), None)


@pytest.mark.parametrize("fates", [UNHEARD, LOST])
def test_another_write_settles_one_of_unknown_outcome(machine: Machine, fates: Plan) -> None:
    """It was applied on all of its shards or on none: either way the next is made, and its repetition counts once."""
    (writer,) = machine.writers
    machine.perform(writer, PUSH, fates)
    machine.perform(writer, PUSH)
    assert len(writer.failed) == 1
    machine.perform(writer, Action("repeat"))
    assert not writer.failed
    for message in range(len(machine.cluster.messages)):
        machine.arrive([message], Fate.ANSWERED)
    machine.same()


def test_a_write_on_some_of_its_shards_is_repeated_or_undone_before_any_other(machine: Machine) -> None:
    (writer,) = machine.writers
    machine.perform(writer, Action("checkpoint", name="a"))
    for way_out in ("repeat", "rollback"):
        machine.perform(writer, PUSH, HALF_LOST)
        for refused in (PUSH, Action("write", (0,)), Action("checkpoint", name="b"), Action("release", name="a")):
            machine.perform(writer, refused)
            assert "failed on shard 1 and was applied on others: repeat it, or roll back" in str(machine.told)
        writer.failed = writer.failed[:1]
        machine.perform(writer, Action(way_out))
        machine.perform(writer, PUSH)
        assert not writer.failed
    machine.same()


def arrives_again(machine: Machine, message: Message) -> None:
    with contextlib.suppress(CallFailed), machine.cluster.running(Run()):
        machine.cluster.arrive(message)
    machine.catch_up()


def assert_only_a_rollback_helps(machine: Machine, writer: Writer) -> None:
    for refused in (Action("repeat"), PUSH):
        machine.perform(writer, refused)
        assert "another client has rolled back, restored or resharded the rows since" in str(machine.told)
    machine.perform(writer, Action("rollback"))
    machine.perform(writer, PUSH)
    assert not writer.failed
    machine.same()


def test_rows_that_another_client_rolled_back_are_not_those_of_a_failed_write(machine: Machine) -> None:
    """The checkpoint may hold the write or not: neither repeating it nor going on would be right."""
    (writer,) = machine.writers
    machine.perform(writer, PUSH, UNHEARD)
    other = machine.new_writer()
    machine.perform(other, Action("open_session"))
    machine.perform(other, Action("checkpoint", name="a"))
    machine.perform(other, Action("rollback"))
    machine.perform(writer, Action("join_session"))
    assert_only_a_rollback_helps(machine, writer)


def test_a_write_on_some_of_its_shards_is_not_repeated_after_another_writers_rollback(machine: Machine) -> None:
    """Of the same session: the client learns of it when it asks the shards what became of the write."""
    (writer,) = machine.writers
    machine.perform(writer, Action("checkpoint", name="a"))
    machine.perform(writer, PUSH, HALF_LOST)
    other = machine.new_writer()
    machine.perform(other, Action("join_session"))
    machine.perform(other, Action("rollback"))
    assert_only_a_rollback_helps(machine, writer)


def test_a_client_that_opens_a_session_remembers_a_push_beside_it(machine: Machine) -> None:
    """It asks whether a shard holds a state that another shard has seen; the answer may be of a newer process."""
    once = Plan((), False, (), None)
    machine.another_client(opens=False, plan=once)
    machine.restart(shard=0)
    machine.change_the_table(action=Action("force_session"), plan=once, which=0)
    machine.copy_a_directory(shard=0)
    machine.put_a_copy_back(which=0)
    turns = [False, False, False, False, False, True, False]
    push = Action("push", (0,), 0)
    machine.two_threads(
        first=Action("open_session"), its_plan=once, other=0, plan=once, second=push, turns=turns, which=1
    )
    machine.put_a_copy_back(which=0)
    machine.change_checkpoints(action=Action("release", name="a"), plan=once, which=1)
    machine.same()


def test_failed_writes_are_repeated_after_another_clients_session(machine: Machine) -> None:
    """One of two shards has applied it, the other one refuses it until there is a session again."""
    (writer,) = machine.writers
    machine.perform(writer, PUSH, Plan((Fate.ANSWERED, Fate.LOST), False, (), None))
    machine.perform(machine.new_writer(), Action("open_session"))
    machine.perform(writer, Action("repeat"))
    assert isinstance(machine.told, FencedError)
    machine.perform(writer, Action("open_session"))
    machine.perform(writer, Action("repeat"))
    assert not writer.failed
    machine.same()


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="reads the instructions of CPython 3.11 at which it handles signals"
)
def test_a_push_interrupted_anywhere() -> None:
    """Wherever a signal arrives, a repeated push counts once, a rollback is possible, and no lock stays taken."""
    for place in itertools.count():
        machine = Machine()
        machine.start()
        (writer,) = machine.writers
        machine.perform(writer, Action("checkpoint", name="a"))
        with interrupted_at(place, machine.cluster.threads) as interrupt:
            machine.perform(writer, PUSH, interrupted(-1))
        turn = writer.client._writer._turn
        another = threading.Thread(target=lambda turn=turn: (turn.acquire(), turn.release()), daemon=True)
        another.start()
        another.join(10)
        assert not another.is_alive(), "the interrupt left a lock taken"
        machine.threads_go_on()
        machine.perform(writer, Action("repeat"))
        machine.same()
        machine.perform(writer, Action("rollback"))
        machine.same()
        machine.teardown()
        if not interrupt.happened:
            assert place > 80
            break


def test_marks_seen_by_two_threads_in_reverse_order(machine: Machine) -> None:
    """A push whose attempt was sent before the shard died, and arrives after another thread has heard of the new
    process, is not forgotten when the state before it is put back."""
    (writer,) = machine.writers
    push = Action("push", (0,))

    def meanwhile() -> None:
        machine.perform(writer, push, Plan((Fate.DIES_AFTER,), True, (), None), beside=True)
        machine.copy_a_directory(0)

    machine.cluster.threads.start(meanwhile)
    machine.perform(writer, push, Plan((), True, (True,), None), beside=True)
    machine.put_a_copy_back(0)
    machine.perform(writer, Action("fetch", (0,), 1))
    machine.same()
    assert writer.name in machine.cluster.told_of_loss


def test_a_refused_fetch_remembers_what_the_other_shards_have_shown(machine: Machine) -> None:
    """Its caller sees no row of theirs; still a shard that loses this state later is not believed."""
    (writer,) = machine.writers
    other = machine.new_writer()
    machine.perform(other, GIVE_ALL)
    machine.copy_a_directory(1)
    machine.perform(writer, Action("push", (0,), 1))
    machine.perform(writer, Action("push", (2,), 0))
    machine.perform(other, Action("fetch", (0, 2), 1))  # shard 0 refuses it
    assert isinstance(machine.told, StepError)
    machine.put_a_copy_back(0)
    machine.perform(other, Action("describe"))
    assert isinstance(machine.told, DataLossError)


def test_a_refused_write_is_not_made_again_once_a_shard_has_lost_what_refused_it(machine: Machine) -> None:
    """A copy from before the session that fenced it applies its old request: its repetition would count twice."""
    (writer,) = machine.writers
    machine.copy_a_directory(0)
    machine.perform(machine.new_writer(), Action("open_session"))
    machine.perform(writer, Action("push", (0,), 0))
    assert isinstance(machine.told, FencedError)
    machine.put_a_copy_back(0)
    arrives_again(machine, machine.cluster.messages[-1])
    assert machine.shards[0].applied
    machine.perform(writer, Action("repeat"))
    assert isinstance(machine.told, DataLossError)
    machine.same()


def test_copies_served_in_turn_may_leave_two_sessions_of_one_epoch(machine: Machine) -> None:
    machine.copy_a_directory(0)
    machine.copy_a_directory(1)
    machine.perform(machine.new_writer(), Action("open_session"))
    late = machine.cluster.messages[-1]
    machine.put_a_copy_back(0)
    machine.put_a_copy_back(1)
    machine.perform(machine.new_writer(), Action("open_session"))
    machine.put_a_copy_back(1)
    arrives_again(machine, late)
    machine.perform(machine.new_writer(), GIVE_ALL)
    assert "is in another session 2" in str(machine.told)
    assert "newest directory" in str(machine.told)
    machine.same()


def test_a_write_that_another_has_settled_is_not_done_once_a_shard_has_lost_it(machine: Machine) -> None:
    (writer,) = machine.writers
    machine.copy_a_directory(0)
    machine.perform(writer, PUSH, UNHEARD)
    machine.perform(writer, Action("push", (4,), 0))  # settles it
    machine.put_a_copy_back(0)
    machine.perform(writer, Action("repeat"))
    assert isinstance(machine.told, DataLossError)


def test_a_write_settled_by_another_is_not_done_after_another_writers_rollback(machine: Machine) -> None:
    (writer,) = machine.writers
    machine.perform(writer, Action("checkpoint", name="a"))
    machine.perform(writer, PUSH, UNHEARD)
    machine.perform(writer, Action("push", (4,), 0))  # settles it
    other = machine.new_writer()
    machine.perform(other, Action("join_session"))
    machine.perform(other, Action("rollback"))
    machine.perform(writer, Action("repeat"))
    assert "another client has rolled back, restored or resharded the rows since" in str(machine.told)


def test_a_write_given_up_by_a_rollback_has_no_late_effect(machine: Machine) -> None:
    (writer,) = machine.writers
    machine.perform(writer, Action("checkpoint", name="a"))
    machine.perform(writer, PUSH, Plan((Fate.LATE, Fate.LATE), False, (), None))
    machine.perform(writer, Action("rollback"))
    for which in range(len(machine.cluster.messages)):
        machine.arrive([which], Fate.ANSWERED)
    machine.same()


@pytest.mark.parametrize("fate", [Fate.UNHEARD, Fate.LATE])
def test_learning_rates_of_a_write_in_doubt_stay(machine: Machine, fate: Fate) -> None:
    """Otherwise its repetition could move the rows of one shard by others."""
    (writer,) = machine.writers
    machine.perform(writer, PUSH, Plan((fate, fate), False, (), None))
    machine.perform(writer, Action("extend_schedule", step=-99, name="half"))
    assert "the learning rate of step 0 is 0.4 and may have been used" in str(machine.told)
    machine.perform(writer, Action("repeat"))
    assert machine.told is None
    machine.same()


def test_learning_rates_of_a_checkpoint_in_doubt_stay(machine: Machine) -> None:
    (writer,) = machine.writers
    asked, half = (Fate.ANSWERED, Fate.ANSWERED), Action("extend_schedule", step=-99, name="half")
    machine.perform(writer, Action("checkpoint", step=1, name="a"), Plan((*asked, Fate.LATE), False, (), None))
    machine.perform(writer, half)
    assert "the learning rate of step 0 is 0.4 and may have been used" in str(machine.told)
    machine.perform(writer, Action("checkpoint", step=1, name="a"))
    machine.perform(writer, half)
    assert "the learning rate of step 0 is 0.4 and was used" in str(machine.told)
    machine.same()


@pytest.mark.parametrize(("fates", "is_used"), [(LOST, False), (UNHEARD, True)])
def test_learning_rates_of_a_settled_write(machine: Machine, fates: Plan, is_used: bool) -> None:
    """They stay if shards have used them, and may be others if none has."""
    (writer,) = machine.writers
    machine.perform(writer, Action("push", (0, 2), 5), fates)
    machine.perform(writer, Action("push", (4, 6), 4))  # settles it
    machine.perform(writer, Action("extend_schedule", step=5 - machine.most_used, name="half"))
    assert ("the learning rate of step 5 is 0.283333 and was used" in str(machine.told)) == is_used
    assert (machine.told is None) != is_used
    machine.same()


@pytest.mark.parametrize("arrives", [False, True])
def test_a_write_repeated_beside_a_rollback(machine: Machine, arrives: bool) -> None:
    """Its repetition first waits for the table, and the rollback is over when it goes on: it is a new write, and no
    request of its first run is applied, although the checkpoint has the row as that wrote it."""
    (writer,) = machine.writers
    machine.perform(writer, Action("write", (0, 2)), Plan((Fate.UNHEARD, Fate.LATE), False, (), None))
    (late,) = [message for message in machine.cluster.messages if message.method == "WriteState" and message.shard]
    other = machine.new_writer()
    machine.perform(other, Action("join_session"))
    machine.perform(other, Action("checkpoint", name="a"))
    writer.client._known_spec = None  # it reads the table anew
    machine.cluster.threads.start(lambda: machine.perform(writer, Action("rollback"), beside=True))
    machine.perform(writer, Action("repeat"), Plan((), True, (True,), None), beside=True)
    machine.threads_go_on()
    if arrives:
        arrives_again(machine, late)
    assert not writer.failed
    assert [len(shard.given_up) for shard in machine.shards] == [1, 1]
    machine.same()
