"""Two shards, the clients of several sessions and the network between them, all in memory: no gRPC, disk or threads.

Hypothesis decides which request arrives when, how often and together with which others, which answers are lost, when a
shard dies, and who opens a session, makes the table larger, takes a checkpoint or goes back to one. A sequential model
in float64 says what each arrival must be answered and what the rows are afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
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

from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.schedules import extend_schedule
from weightserver.committer import commit_group
from weightserver.config import TableSpec
from weightserver.errors import FencedError, InvalidRequestError, NoTableError, StepError
from weightserver.initial import initial_rows
from weightserver.session import Numbers, Session
from weightserver.shard import Batch, Shard, WriteHeader
from weightserver.sharding import Sharding

SPEC = TableSpec(num_rows=8, dim=1, momentum=0.8, weight_decay=0.05, rows_per_block=2, init_std=1.0)
NUM_SHARDS = 2
HORIZON = 12
RATES = np.linspace(0.4, 0.05, HORIZON, dtype=np.float32)
TOLERANCE = 1e-4
MAX_MESSAGES = 40
CALLS_PER_SESSION = 6
"""At least; more sessions would fence all that is worth trying."""

MAX_ROWS = 13
"""Of a table that grew."""

some_rows = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=4, unique=True).map(sorted)
steps = st.integers(0, HORIZON - 1)
picks = st.integers(0, 2**16)
values = st.integers(1, 9)
fates = st.sampled_from(["answered", "answered", "unheard", "on one shard", "on its way"])
"""What becomes of a call's first requests; all of them may come again later."""


# ---- the model


@dataclass
class ModelRow:
    weight: float
    momentum: float
    last_step: int

    def advance(self, step: int) -> None:
        for update in range(self.last_step, step):
            self.momentum = SPEC.momentum * self.momentum + SPEC.weight_decay * self.weight
            self.weight -= float(RATES[update]) * self.momentum
        self.last_step = step

    def push(self, step: int, gradient: float) -> None:
        """Update `step`, in time or late: what a gradient does adds to all else."""
        impulse = ModelRow(-float(RATES[step]) * gradient, gradient, step + 1)
        last_step = max(self.last_step, step + 1)
        self.advance(last_step)
        impulse.advance(last_step)
        self.weight += impulse.weight
        self.momentum += impulse.momentum


@dataclass
class ModelCheckpoint:
    step: int
    rows: dict[int, ModelRow]
    applied: Counter[int]
    num_writes: int


@dataclass
class ModelShard:
    """One dictionary of rows, and what was done to them."""

    rows: dict[int, ModelRow]
    epoch: int = 0
    opener: bytes = b""
    seen: dict[bytes, set[int]] = field(default_factory=dict)
    """writer -> its numbers that were applied."""
    settled_before: dict[bytes, int] = field(default_factory=dict)
    checkpoints: dict[str, ModelCheckpoint] = field(default_factory=dict)
    applied: Counter[int] = field(default_factory=Counter)
    """Call -> how often the rows as they are now hold it."""
    num_writes: int = 0
    """That made the rows what they are now."""
    given_up: set[tuple[bytes, int]] = field(default_factory=set)
    """(writer, number) of what must not be applied any more."""

    def extend(self, rows: list[int]) -> None:
        """Rows that nobody wrote: those of its checkpoints too."""
        weights = initial_rows(SPEC, np.array(rows, np.int64))[:, 0].tolist()
        for known in [self.rows, *(checkpoint.rows for checkpoint in self.checkpoints.values())]:
            known |= {row: ModelRow(weight, 0.0, 0) for row, weight in zip(rows, weights, strict=True)}

    def open_session(self, epoch: int, opener: bytes) -> type[Exception] | None:
        if (epoch, opener) == (self.epoch, self.opener):
            return None
        if epoch <= self.epoch:
            return FencedError
        self.epoch, self.opener, self.seen, self.settled_before = epoch, opener, {}, {}
        return None

    def arrive(self, message: Message) -> bool | type[Exception]:
        """Whether the request is applied, or what it is refused with."""
        call, header = message.call, message.header
        if header.epoch != self.epoch:
            return FencedError
        if header.sequence in self.seen.get(header.writer, set()) or header.sequence < max(
            header.settled_before, self.settled_before.get(header.writer, 0)
        ):
            self._note(header)
            return False
        refused = self._apply(call, call.rows[message.shard])
        if refused:
            return refused
        assert (header.writer, header.sequence) not in self.given_up, "it came after the rollback that gave it up"
        self.given_up |= {(header.writer, number) for shard, number in call.gives_up if shard == message.shard}
        self._note(header)
        self.seen.setdefault(header.writer, set()).add(header.sequence)
        self.applied[call.identity] += 1
        return True

    def _note(self, header: WriteHeader) -> None:
        before = self.settled_before.get(header.writer, 0)
        self.settled_before[header.writer] = max(before, header.settled_before)

    def _apply(self, call: Call, rows: list[int]) -> type[Exception] | None:
        if call.kind == "push":
            self.num_writes += 1
            for row in rows:
                self.rows[row].push(call.step, call.value)
        elif call.kind == "write":
            if any(self.rows[row].last_step > call.step for row in rows):
                return StepError
            self.num_writes += 1
            for row in rows:
                self.rows[row] = ModelRow(call.value, -call.value, call.step)
        elif call.kind == "checkpoint":
            known = self.checkpoints.get(call.name)
            if known and (known.step != call.step or known.num_writes != self.num_writes):
                return InvalidRequestError
            if not known:
                kept = copy.deepcopy(self.rows)
                self.checkpoints[call.name] = ModelCheckpoint(call.step, kept, Counter(self.applied), self.num_writes)
        elif call.kind == "rollback":
            if call.name not in self.checkpoints:
                return NoTableError
            kept = self.checkpoints[call.name]
            self.rows, self.applied = copy.deepcopy(kept.rows), Counter(kept.applied)
            self.num_writes = kept.num_writes
            names = list(self.checkpoints)
            for later in names[names.index(call.name) + 1 :]:
                del self.checkpoints[later]
        else:
            self.checkpoints.pop(call.name, None)
        return None


# ---- clients and the network


class Crash(BaseException):
    """The shard dies; nobody catches it."""


@dataclass
class Call:
    """One call of a client: the same when it is repeated after a failure."""

    identity: int
    session: Session
    kind: str
    rows: dict[int, list[int]]
    """shard -> rows; of checkpoints none."""
    step: int = 0
    value: float = 0.0
    name: str = ""
    numbers: Numbers = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    state: str = "open"  # or failed, done
    disturbed: bool = False
    """Somebody took a checkpoint or went back while its outcome was unknown."""
    gives_up: set[tuple[int, int]] = field(default_factory=set)
    """Of a rollback: (shard, number) of the writes that must not come after it."""

    @property
    def digest(self) -> bytes:
        return str(self.identity).encode()


@dataclass(frozen=True)
class Message:
    call: Call
    shard: int
    header: WriteHeader


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.storages = [MemoryStorage() for _ in range(NUM_SHARDS)]
        self.shards = [self.open_shard(shard) for shard in range(NUM_SHARDS)]
        self.num_rows = [0] * NUM_SHARDS
        self.models = [ModelShard({}) for _ in range(NUM_SHARDS)]
        for shard in range(NUM_SHARDS):
            self.extend_model(shard, SPEC.num_rows)
        for shard in self.shards:
            with shard.batch() as batch:
                shard.create_table(batch, SPEC)
            with shard.batch() as batch:
                extend_schedule(shard, batch, 0, RATES)
        self.sessions: list[Session] = []
        self.calls: list[Call] = []
        self.messages: list[Message] = []
        self.openings: list[tuple[int, bytes]] = []
        self.changed = set(range(NUM_SHARDS))
        self.open_session(NUM_SHARDS)

    def extend_model(self, shard: int, num_rows: int) -> None:
        mine = Sharding(SPEC.rows_per_block, NUM_SHARDS).rows_of_shard(shard, num_rows)
        self.models[shard].extend(mine[mine >= self.num_rows[shard]].tolist())
        self.num_rows[shard] = num_rows

    def there(self, rows: list[int]) -> list[int]:
        """As many rows that all shards have by now."""
        return sorted({row % min(self.num_rows) for row in rows})

    def open_shard(self, shard: int) -> Shard:
        return Shard(self.storages[shard], shard=shard, num_shards=NUM_SHARDS)

    # ---- sessions

    @precondition(lambda self: len(self.calls) >= CALLS_PER_SESSION * len(self.openings))
    @rule(reached=st.integers(1, NUM_SHARDS))
    def open_session(self, reached: int) -> None:
        """On the first shards only, where its opener dies halfway."""
        epoch = max(model.epoch for model in self.models) + 1
        opener = f"opener {epoch}".encode()
        self.openings.append((epoch, opener))
        for shard in range(reached):
            self.open_on(shard, epoch, opener)
        if reached == NUM_SHARDS:
            self.sessions.append(Session(epoch, NUM_SHARDS, writer=f"writer {len(self.sessions):9}".encode()))

    @rule(which=picks, shard=st.integers(0, NUM_SHARDS - 1))
    def an_opening_comes_late(self, which: int, shard: int) -> None:
        self.open_on(shard, *self.openings[which % len(self.openings)])

    def open_on(self, shard: int, epoch: int, opener: bytes) -> None:
        future: Future[Any] = Future()
        commit_group(
            self.shards[shard].batch,
            [(lambda batch: self.shards[shard].open_session(batch, "run", epoch, opener), future)],
        )
        assert type(future.exception()) is (self.models[shard].open_session(epoch, opener) or type(None))

    @rule(which=picks)
    def join_a_session(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        for shard, model in zip(self.shards, self.models, strict=True):
            if session.epoch != model.epoch:
                with pytest.raises(FencedError):
                    shard.join_session(session.epoch)
                return
            shard.join_session(session.epoch)
        self.sessions.append(Session(session.epoch, NUM_SHARDS, writer=f"writer {len(self.sessions):9}".encode()))

    @precondition(lambda self: min(self.num_rows) < MAX_ROWS)
    @rule(num_rows=st.integers(SPEC.num_rows, MAX_ROWS), reached=st.integers(1, NUM_SHARDS))
    def extend_table(self, num_rows: int, reached: int) -> None:
        """On the first shards only, where its caller dies halfway; what is less than before is refused."""
        for shard in range(reached):
            future: Future[Any] = Future()
            extend = functools.partial(self.shards[shard].extend_table, num_rows=num_rows)
            commit_group(self.shards[shard].batch, [(extend, future)])
            if num_rows < self.num_rows[shard]:
                assert type(future.exception()) is InvalidRequestError
            else:
                assert future.result() is (num_rows > self.num_rows[shard])
                self.extend_model(shard, num_rows)
                self.changed.add(shard)

    # ---- calls

    def begin(self, session: Session, kind: str, fate: str, rows: list[int] | None = None, **arguments: Any) -> None:
        by_shard = {
            shard: [row for row in model.rows if rows is None or row in rows] for shard, model in enumerate(self.models)
        }
        by_shard = {shard: mine for shard, mine in by_shard.items() if mine}
        call = Call(len(self.calls), session, kind, by_shard, **arguments)
        if kind in ("push", "write"):
            call.numbers = session.begin(by_shard, lambda: call.digest)
        elif kind == "rollback":
            call.numbers = session.begin_rollback(call.name)
        else:
            call.numbers = session.begin()
        self.calls.append(call)
        self.send(call, fate)

    def send(self, call: Call, fate: str) -> None:
        """Sends what is not answered yet; requests that arrived stay about, to come once more."""
        unanswered = sorted(call.rows.keys() - call.answered)
        for shard in unanswered:
            header = WriteHeader(
                call.session.epoch,
                call.session.writer,
                call.numbers[shard],
                call.session.settled_before(shard),
                call.step,
            )
            self.messages.append(Message(call, shard, header))
        if fate != "on its way":
            for message in self.messages[-len(unanswered) :][: 1 if fate == "on one shard" else None]:
                self.deliver([message], heard=fate != "unheard", crash=None)
        self.messages = self.messages[-MAX_MESSAGES:]

    def writer(self, which: int) -> Session | None:
        """One of the last few sessions that may write: none that has a rollback to repeat."""
        session = self.sessions[-1 - which % min(3, len(self.sessions))]
        return None if self.rolling_back(session) else session

    def rolling_back(self, session: Session) -> bool:
        """Whether its last rollback has neither succeeded nor been repeated with success."""
        rollbacks = [call for call in self.calls if call.session is session and call.kind == "rollback"]
        return bool(rollbacks) and rollbacks[-1].state != "done"

    @rule(which=picks, fate=fates, rows=some_rows, step=steps, value=values)
    def push(self, which: int, fate: str, rows: list[int], step: int, value: int) -> None:
        if session := self.writer(which):
            self.begin(session, "push", fate, self.there(rows), step=step, value=float(value))

    @rule(which=picks, fate=fates, rows=some_rows, ahead=st.integers(-1, 2), value=values)
    def write(self, which: int, fate: str, rows: list[int], ahead: int, value: int) -> None:
        rows = self.there(rows)
        seen = max(model.rows[row].last_step for model in self.models for row in rows if row in model.rows)
        if session := self.writer(which):
            self.begin(session, "write", fate, rows, step=min(max(seen + ahead, 0), HORIZON), value=float(value))

    @rule(which=picks, fate=fates, name=st.sampled_from("abc"), step=st.sampled_from([1, 1, 1, 2]))
    def take_a_checkpoint(self, which: int, fate: str, name: str, step: int) -> None:
        if session := self.writer(which):
            self.disturb(session)
            self.begin(session, "checkpoint", fate, name=name, step=step)

    @rule(which=picks, fate=fates, name=st.sampled_from("abc"))
    def release(self, which: int, fate: str, name: str) -> None:
        if session := self.writer(which):
            self.begin(session, "release", fate, name=name)

    @precondition(lambda self: all(model.checkpoints for model in self.models))
    @rule(which=picks, fate=fates, name=picks)
    def roll_back(self, which: int, fate: str, name: int) -> None:
        """As the client does: where all shards have the checkpoint, and nothing else before it succeeded."""
        session = self.sessions[-1 - which % min(3, len(self.sessions))]
        common = [known for known in self.models[0].checkpoints if known in self.models[1].checkpoints]
        mine = [call for call in self.calls if call.session is session]
        if any(call.state == "open" for call in mine):
            with pytest.raises(InvalidRequestError):
                session.begin_rollback("too early")
        elif common:
            self.disturb(session)
            gives_up = {number for call in mine if call.state == "failed" for number in call.numbers.items()}
            self.begin(session, "rollback", fate, name=common[name % len(common)], gives_up=gives_up)

    def disturb(self, session: Session) -> None:
        for call in self.calls:
            call.disturbed |= call.state != "done" and call.session.epoch == session.epoch

    def pick(self, which: int, *states: str) -> Call | None:
        calls = [call for call in self.calls if call.state in states]
        return calls[which % len(calls)] if calls else None

    @precondition(lambda self: any(call.state == "open" for call in self.calls))
    @rule(which=picks, fate=fates)
    def try_again(self, which: int, fate: str) -> None:
        if call := self.pick(which, "open"):
            self.send(call, fate)

    @precondition(lambda self: any(call.state == "open" for call in self.calls))
    @rule(which=picks)
    def fail(self, which: int) -> None:
        """The client has waited long enough."""
        if call := self.pick(which, "open"):
            self.end(call, failed=True)

    def end(self, call: Call, *, failed: bool) -> None:
        call.state = "failed" if failed else "done"
        if failed and call.kind in ("push", "write"):
            call.session.fail(call.numbers, call.digest)
        else:
            call.session.settle(call.numbers)
            if call.kind == "rollback" and not failed:
                call.session.end_rollback(done=True)

    @precondition(lambda self: any(call.state == "failed" for call in self.calls))
    @rule(which=picks, fate=fates)
    def repeat(self, which: int, fate: str) -> None:
        call = self.pick(which, "failed")
        if call is None or call.kind not in ("push", "write") or self.rolling_back(call.session):
            return
        call.numbers = call.session.begin(call.rows, lambda: call.digest)
        call.state, call.answered = "open", set()
        self.send(call, fate)

    # ---- the network and the shards

    @precondition(lambda self: self.messages)
    @rule(
        which=st.lists(picks, min_size=1, max_size=4),
        heard=st.booleans(),
        crash=st.sampled_from([None, None, None, "before", "after"]),
    )
    def arrive(self, which: list[int], heard: bool, crash: str | None) -> None:
        """Some messages, old or new, reach a shard and share a commit, which it may not survive."""
        shard = self.messages[which[0] % len(self.messages)].shard
        there = [message for message in self.messages if message.shard == shard]
        self.deliver([there[number % len(there)] for number in which], heard=heard, crash=crash)

    def deliver(self, arriving: list[Message], *, heard: bool, crash: str | None) -> None:
        shard = arriving[0].shard
        futures: list[Future[bool]] = [Future() for _ in arriving]
        operations = [self.operation(message) for message in arriving]
        transaction = self.dying_transaction if crash == "before" else Shard.batch
        self.changed.add(shard)
        with contextlib.suppress(Crash):
            commit_group(lambda: transaction(self.shards[shard]), list(zip(operations, futures, strict=True)))
        if crash:
            self.shards[shard] = self.open_shard(shard)
        if crash == "before":
            return
        for message, future in zip(arriving, futures, strict=True):
            expected = self.models[shard].arrive(message)
            error = future.exception()
            assert (type(error) if error else future.result()) == expected, message
            if heard and not crash:
                self.answer(message, error)
        if not any(message.call.kind in ("release", "rollback") for message in arriving):
            self.no_version_is_kept_in_vain(
                shard, [m for m, f in zip(arriving, futures, strict=True) if not f.exception() and f.result()]
            )

    def no_version_is_kept_in_vain(self, shard: int, applied: list[Message]) -> None:
        """Of a block that was just written: one for each checkpoint at most, and the newest."""
        with self.storages[shard].read() as txn:
            for message in applied:
                if message.call.kind in ("push", "write"):
                    for row in message.call.rows[shard]:
                        versions = txn.generations(row // SPEC.rows_per_block)
                        assert len(versions) <= 1 + len(self.models[shard].checkpoints), (row, versions)

    def dying_transaction(self, shard: Shard) -> contextlib.AbstractContextManager[Batch]:
        @contextlib.contextmanager
        def dying() -> Iterator[Batch]:
            with shard.batch() as batch:
                yield batch
                raise Crash

        return dying()

    def operation(self, message: Message) -> Any:
        shard, call = self.shards[message.shard], message.call
        rows = np.array(call.rows[message.shard])
        value = np.full((len(rows), SPEC.dim), call.value, np.float32)
        if call.kind == "push":
            return lambda batch: shard.push_gradients(batch, message.header, rows, value)
        if call.kind == "write":
            last_step = np.full(len(rows), call.step)
            return lambda batch: shard.write_state(batch, message.header, rows, value, -value, last_step)
        return lambda batch: getattr(shard, call.kind)(batch, message.header, call.name)

    def answer(self, message: Message, error: BaseException | None) -> None:
        call = message.call
        if call.state != "open" or message.header.sequence != call.numbers[message.shard]:
            return
        if error:
            self.end(call, failed=True)
            return
        call.answered.add(message.shard)
        if call.answered == call.rows.keys():
            self.end(call, failed=False)
            if call.kind in ("push", "write") and not call.disturbed:
                for shard in call.rows:
                    assert self.models[shard].applied[call.identity] == 1, (call, "was answered")

    @rule(shard=st.integers(0, NUM_SHARDS - 1))
    def restart(self, shard: int) -> None:
        self.shards[shard] = self.open_shard(shard)
        self.changed.add(shard)

    # ---- what must hold

    @invariant()
    def same(self) -> None:
        for shard in self.changed if hasattr(self, "changed") else ():
            model, state = self.models[shard], self.shards[shard].state
            assert state.epoch == model.epoch
            self.compare(shard, model.rows, None)
            assert [(kept.name, kept.step) for kept in state.checkpoints] == [
                (name, kept.step) for name, kept in model.checkpoints.items()
            ]
            for name, kept in model.checkpoints.items():
                self.compare(shard, kept.rows, name)
            for call in self.calls:
                assert model.applied[call.identity] <= 1 or call.disturbed or call.kind not in ("push", "write"), call
        if hasattr(self, "changed"):
            self.changed.clear()

    def compare(self, shard: int, rows: dict[int, ModelRow], checkpoint: str | None) -> None:
        (chunk,) = self.shards[shard].fetch(np.array(list(rows)), step=None, state=True, checkpoint=checkpoint)
        assert chunk.last_step is not None
        assert chunk.momentum_buffer is not None
        assert chunk.last_step.tolist() == [row.last_step for row in rows.values()]
        expected = np.array([(row.weight, row.momentum) for row in rows.values()])
        found = np.concatenate([chunk.weight, chunk.momentum_buffer], axis=1)
        assert np.abs(found - expected).max() <= TOLERANCE * (1 + np.abs(expected).max())


@pytest.mark.parametrize(
    "num_schedules",
    [
        100,
        pytest.param(1_000, marks=pytest.mark.guard),
        pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
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
