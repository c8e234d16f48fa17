"""Changes of the learning rates of one shard, on a real LMDB directory, without gRPC."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.schedules import extend_schedule
from weightserver.core.arrays import Float32Array
from weightserver.core.correction import Schedule
from weightserver.core.errors import (
    FencedError,
    InvalidRequestError,
    OverloadedError,
    StepError,
    TableMismatchError,
    WeightServerError,
)
from weightserver.core.spec import TableSpec
from weightserver.operations.verify import verify_directory
from weightserver.protocol.codec import ScheduleHash
from weightserver.shard.group_commit import Committer
from weightserver.shard.schedule_change import MAX_EARLIER, Part
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader, WriteTransaction
from weightserver.storage import records
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=20, dim=4, rows_per_block=6)
ROWS = np.array([1, 8], np.int64)
OLD = np.linspace(0.5, 0.1, 30, dtype=np.float32)
CLOCK, CHANGED_AT = 10, 12
NEW = np.append(OLD[:CHANGED_AT], np.linspace(0.9, 0.3, 28, dtype=np.float32))
"""Different learning rates from CHANGED_AT on, and further steps."""
CHANGE, OTHER, OPENER = "11" * 16, "22" * 16, b"o" * 16


def digest(rates: Float32Array) -> int:
    return ScheduleHash(rates).digest


class Served:
    """A shard, its storage and its committer; `do` runs one operation."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.sequence = directory, 0
        self.open()

    def open(self) -> None:
        self.storage = LmdbStorage(self.directory)
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.committer = Committer(self.shard.batch)

    def do(self, operation: Callable[[WriteTransaction], object]) -> object:
        return self.committer.submit(operation).result(60)

    def close(self) -> None:
        self.committer.close()
        self.storage.close()

    def restart(self) -> None:
        self.close()
        self.open()

    @property
    def version(self) -> int:
        return self.shard.state.schedule_version

    def extend(self, start: int, rates: Float32Array) -> None:
        self.do(lambda batch: extend_schedule(self.shard, batch, start, rates))

    def prepare(
        self,
        start: int = 0,
        rates: Float32Array = NEW,
        *,
        change: str = CHANGE,
        version: int | None = None,
        last: bool = True,
    ) -> None:
        version, part = self.version if version is None else version, Part(change, start, rates, last)
        self.do(lambda batch: self.shard.prepare_schedule(batch, part, version=version))

    def commit(self, change: str = CHANGE, schedule: int = digest(NEW)) -> object:
        return self.do(lambda batch: self.shard.commit_schedule(batch, change, digest=schedule))

    def give_up(self, change: str = CHANGE) -> object:
        return self.do(lambda batch: self.shard.give_up_schedule(batch, change))

    def header(self, step: int, schedule: int) -> WriteHeader:
        self.sequence += 1
        return WriteHeader(1, OPENER, b"w" * 16, self.sequence, step, schedule)

    def push(self, step: int, schedule: int = 0) -> object:
        header = self.header(step, schedule)
        return self.do(lambda batch: self.shard.push_gradients(batch, header, ROWS, np.ones((2, 4), np.float32)))

    def write(self, last_step: int, schedule: int = 0) -> object:
        header, values = self.header(last_step, schedule), np.ones((2, 4), np.float32)
        steps = np.full(2, last_step)
        return self.do(lambda batch: self.shard.write_state(batch, header, ROWS, values, values, steps))

    def checkpoint(self, step: int, schedule: int = 0) -> object:
        header = self.header(step, schedule)
        return self.do(lambda batch: self.shard.checkpoint(batch, header, f"{self.sequence}"))

    def fetch(self, step: int | None, schedule: int = 0) -> Float32Array:
        (rows,) = self.shard.fetch(np.arange(20), step=step, state=False, schedule=schedule)
        return np.asarray(rows.weight, np.float32)

    def rates(self) -> Float32Array:
        return self.shard.learning_rates(0)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A shard with clock 10, whose learning rates are stored in chunks of 8."""
    monkeypatch.setattr(records, "_SCHEDULE_CHUNK", 8)
    served = Served(tmp_path)
    served.do(lambda batch: served.shard.create_table(batch, SPEC))
    served.do(lambda batch: served.shard.open_session(batch, "run", 1, OPENER))
    try:
        served.extend(0, OLD)
        served.push(CLOCK - 1)
        yield served
    finally:
        served.close()


def test_a_digest_depends_only_on_the_learning_rates(served: Served, tmp_path: Path) -> None:
    """It does not depend on how the schedule grew, and survives a restart."""
    assert served.shard.schedule.digest == digest(OLD)
    for step in range(20, 40):
        served.extend(step, NEW[step : step + 1])
    served.extend(CHANGED_AT, NEW[CHANGED_AT:25])
    assert served.shard.schedule.digest == digest(NEW)
    served.restart()
    assert served.shard.schedule.digest == digest(NEW)
    assert np.array_equal(served.rates(), NEW)
    assert digest(np.zeros(3, np.float32)) == digest(np.full(3, -0.0, np.float32))
    assert digest(np.zeros(3, np.float32)) != digest(np.zeros(4, np.float32))
    assert digest(NEW[:0]) == 0
    assert Part(CHANGE, 5, np.full(5, -0.0, np.float32)).first_change(np.zeros(20, np.float32)) is None


@pytest.mark.parametrize("restarted", [False, True])
def test_a_pending_change_blocks_only_requests_that_use_its_steps(served: Served, restarted: bool) -> None:
    before = served.fetch(CHANGED_AT)
    served.prepare()
    if restarted:
        served.restart()
    assert np.array_equal(served.rates(), OLD)
    assert served.shard.schedule.digest == digest(OLD)
    assert np.array_equal(served.fetch(CHANGED_AT), before)
    assert np.isfinite(served.fetch(None)).all()
    for known in (0, digest(OLD), digest(NEW)):
        refused: list[Callable[[], object]] = [
            lambda known=known: served.fetch(CHANGED_AT + 1, known),
            lambda known=known: served.push(CHANGED_AT, known),
            lambda known=known: served.push(len(NEW) - 1, known),
            lambda known=known: served.write(CHANGED_AT + 1, known),
            lambda known=known: served.checkpoint(CHANGED_AT + 1, known),
        ]
        for call in refused:
            with pytest.raises(
                OverloadedError, match="learning rates from step 12 on is neither finished nor given up"
            ):
                call()
        assert served.push(CHANGED_AT - 2, known) is True
        assert served.write(CHANGED_AT, known) is True
        assert served.checkpoint(CHANGED_AT, known) is True
    assert served.shard.state.clock == CHANGED_AT
    assert served.commit() is True
    assert np.array_equal(served.rates(), NEW)
    assert served.push(CHANGED_AT, digest(NEW)) is True
    assert verify_after(served) == []


def verify_after(served: Served) -> list[str]:
    served.close()
    try:
        return verify_directory(served.directory).problems
    finally:
        served.open()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_committed_change_moves_rows_by_the_new_learning_rates(served: Served, restarted: bool) -> None:
    state = next(served.shard.fetch(np.arange(20), step=None, state=True))
    served.prepare()
    served.commit()
    if restarted:
        served.restart()
    assert served.commit() is False, "again"
    assert served.shard.schedule.pending is None
    assert state.momentum_buffer is not None
    assert state.last_step is not None
    table = Schedule.of_table(SPEC, NEW).transfer(state.last_step, 40)
    wanted = table[:, 0, :1] * state.weight + table[:, 0, 1:] * state.momentum_buffer
    np.testing.assert_allclose(served.fetch(40), wanted, rtol=1e-5)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_change_that_is_given_up_leaves_no_trace(served: Served, restarted: bool) -> None:
    version, before = served.version, served.fetch(30)
    served.prepare()
    if restarted:
        served.restart()
    assert served.give_up(OTHER) is False, "another change"
    assert served.shard.schedule.pending is not None
    assert served.give_up() is True
    assert served.give_up() is False, "again"
    for late in (lambda: served.prepare(version=version), served.commit):
        with pytest.raises(FencedError, match=r"call extend_schedule\(\) again if"):
            late()
    assert np.array_equal(served.fetch(30), before)
    with served.storage.read() as txn:
        assert len(list(txn.items("schedule"))) == 4
    served.prepare(change=OTHER)
    assert served.commit(OTHER) is True


def test_a_change_given_up_before_it_arrives_is_refused(served: Served) -> None:
    version = served.version
    assert served.give_up() is True
    assert served.give_up() is False
    with pytest.raises(FencedError, match="changed by another call"):
        served.prepare(version=version)
    assert served.shard.schedule.pending is None
    assert served.version == version + 1


def test_known_learning_rates_prepare_no_change(served: Served) -> None:
    """Whether or not a change is pending, from any client."""
    version = served.version
    for start, rates in ((0, OLD), (5, OLD[5:20]), (30, OLD[:0])):
        assert served.shard.has_learning_rates(Part(OTHER, start, rates))
        served.prepare(start, rates, version=version - 1)
        assert served.shard.schedule.pending is None
    assert not served.shard.has_learning_rates(Part(OTHER, 31, OLD[:0]))
    served.prepare()
    served.prepare(0, OLD, change=OTHER)
    pending = served.shard.schedule.pending
    assert pending is not None
    assert (pending.change, pending.first_step, pending.digest) == (CHANGE, CHANGED_AT, digest(NEW))
    with pytest.raises(FencedError, match="another call is changing the learning rates"):
        served.prepare(20, OLD[:1], change=OTHER)


def test_a_change_in_parts(served: Served) -> None:
    """Some parts change nothing; each may be repeated at any time."""
    rates = np.append(NEW, np.full(8, 0.25, np.float32))
    parts = [(start, rates[start : start + 6]) for start in range(0, len(rates), 6)]
    served.prepare(*parts[0], last=False)
    assert served.shard.schedule.pending is None
    served.prepare(*parts[2], last=False)
    with pytest.raises(InvalidRequestError, match="in the order of their steps"):
        served.prepare(*parts[4], last=False)
    served.restart()
    for number, part in enumerate(parts[2:-1], start=2):
        served.prepare(*part, last=False)
        served.prepare(*parts[number - 1], last=False)
        served.prepare(*part, last=False)
        with pytest.raises(InvalidRequestError, match="a part of this change of the learning rates is missing"):
            served.commit(schedule=digest(rates))
    with pytest.raises(InvalidRequestError, match="in the order of their steps"):
        served.prepare(CLOCK, np.ones(1, np.float32), last=False)
    served.prepare(*parts[-1])
    for part in parts[:-1]:
        served.prepare(*part, last=False)
    assert served.commit(schedule=digest(rates)) is True
    served.restart()
    assert np.array_equal(served.rates(), rates)
    assert served.shard.schedule.digest == digest(rates)
    assert verify_after(served) == []


def test_used_steps_cannot_be_rewritten(served: Served) -> None:
    for start, rates in ((CLOCK - 1, OLD[:1]), (0, NEW[::-1].copy())):
        with pytest.raises(TableMismatchError, match="and was used: only steps from 10 on may be rewritten"):
            served.prepare(start, rates)
    with pytest.raises(StepError, match="ends at 30: step 31 would leave a gap"):
        served.prepare(31, OLD)
    assert served.shard.schedule.pending is None


def test_an_earlier_schedule_is_valid_for_unchanged_steps(served: Served) -> None:
    served.prepare()
    served.commit()
    served.restart()
    old, new = digest(OLD), digest(NEW)
    for known in (0, old, new):
        served.fetch(CHANGED_AT, known)
        assert served.push(CHANGED_AT - 1, known) is True
        assert served.write(CHANGED_AT, known) is True
        assert served.checkpoint(CHANGED_AT, known) is True
    beyond: list[Callable[[int], object]] = [
        lambda known: served.fetch(CHANGED_AT + 1, known),
        lambda known: served.push(CHANGED_AT, known),
        lambda known: served.write(CHANGED_AT + 1, known),
        lambda known: served.checkpoint(CHANGED_AT + 1, known),
    ]
    for call in beyond:
        with pytest.raises(TableMismatchError, match=r"from step 12 on were changed .*: call describe\(\)"):
            call(old)
        with pytest.raises(TableMismatchError, match="does not know this client's learning rates"):
            call(old ^ 1)
    assert served.shard.state.clock == CHANGED_AT
    for call in beyond:
        call(new)
    # Back to what they were, as far as that goes.
    served.extend(20, OLD[20:25])
    served.fetch(20, new)
    with pytest.raises(TableMismatchError, match="from step 20 on were changed"):
        served.fetch(21, new)


def test_a_limited_number_of_earlier_schedules_is_remembered(served: Served) -> None:
    known = [digest(OLD)]
    for number in range(MAX_EARLIER):
        served.extend(20 + number % 7, np.full(1, 0.3 + 0.001 * number, np.float32))
        known.append(served.shard.schedule.digest)
    for earlier in known:
        served.fetch(20, earlier)
    served.extend(29, np.ones(1, np.float32))
    with pytest.raises(TableMismatchError, match="does not know"):
        served.fetch(20, known[0])
    served.restart()
    served.fetch(20, known[1])
    with pytest.raises(TableMismatchError, match="from step 20 on were changed"):
        served.fetch(21, known[1])


def test_a_restored_schedule_is_the_current_one(served: Served) -> None:
    for _ in range(3):
        served.extend(CHANGED_AT, NEW[CHANGED_AT:30])
        served.extend(CHANGED_AT, OLD[CHANGED_AT:])
        served.fetch(30, digest(OLD))
    assert [earlier for earlier, _ in served.shard.schedule.earlier] == [digest(NEW[:30])]


def test_a_duplicate_is_answered_though_its_schedule_is_forgotten(served: Served) -> None:
    """The answer must not look like a refusal of a write that was applied."""
    header = WriteHeader(1, OPENER, b"v" * 16, 1, CLOCK, digest(OLD))

    def push() -> object:
        return served.do(lambda batch: served.shard.push_gradients(batch, header, ROWS, np.ones((2, 4), np.float32)))

    assert push() is True
    for number in range(MAX_EARLIER + 1):
        served.extend(20, np.full(1, 0.3 + 0.001 * number, np.float32))
    assert push() is False


def test_all_chunks_of_a_fetch_use_one_schedule(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightserver.shard.reading.CHUNK_BYTES", 6 * 4 * SPEC.dim)
    rows = np.arange(20)
    chunks = [served.shard.fetch(rows, step=step, state=False) for step in (CHANGED_AT, 30, None)]
    for fetched in chunks:
        next(fetched)
    served.prepare()
    with pytest.raises(OverloadedError, match="neither finished nor given up"):
        next(chunks[1])
    next(chunks[0])
    next(chunks[2])
    served.commit()
    for fetched in chunks[0], chunks[2], served.shard.fetch(rows, step=30, state=False, schedule=digest(NEW)):
        assert list(fetched)


def test_a_chunk_after_a_change_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightserver.shard.reading.CHUNK_BYTES", 6 * 4 * SPEC.dim)
    fetched = served.shard.fetch(np.arange(20), step=30, state=False)
    next(fetched)
    served.extend(CHANGED_AT, NEW[CHANGED_AT:])
    with pytest.raises(TableMismatchError, match="from step 12 on were changed"):
        next(fetched)


def test_dropping_a_table_deletes_its_schedule(served: Served) -> None:
    version = served.version
    served.prepare()
    served.do(served.shard.drop_table)
    assert served.shard.schedule.digest == 0
    served.do(lambda batch: served.shard.create_table(batch, SPEC))
    for late in (served.commit, lambda: served.prepare(version=version)):
        with pytest.raises(WeightServerError, match=r"call extend_schedule\(\) again"):
            late()
    served.restart()
    assert (served.shard.schedule.digest, served.shard.schedule.pending, served.shard.horizon) == (0, None, 0)
    assert served.give_up() is True
    served.extend(0, NEW)
    assert served.shard.schedule.digest == digest(NEW)


def test_random_changes_against_a_plain_array(tmp_path: Path) -> None:
    """Rewrites, appends, parts, restarts and abandoned changes: compares learning rates and valid digests."""
    generator = np.random.default_rng(5)
    served = Served(tmp_path)
    try:
        served.do(lambda batch: served.shard.create_table(batch, SPEC))
        rates, past = np.zeros(0, np.float32), list[Float32Array]()
        for _ in range(60):
            start = int(generator.integers(0, len(rates) + 1))
            given = generator.choice(np.array([0.1, 0.2, 0.3], np.float32), int(generator.integers(0, 12)))
            wanted = np.concatenate([rates[:start], given, rates[start + len(given) :]])
            change, cut = os.urandom(16).hex(), int(generator.integers(0, len(given) + 1))
            served.prepare(start, given[:cut], change=change, last=False)
            served.prepare(start + cut, given[cut:], change=change)
            if generator.random() < 0.2:
                served.restart()
            changes = not np.array_equal(wanted, rates)
            assert (served.shard.schedule.pending is not None) == changes
            if changes and generator.random() < 0.3:
                assert served.give_up(change) is True
            elif changes:
                assert served.commit(change, digest(wanted)) is True
                past.append(rates)
                rates = wanted
            assert np.array_equal(served.rates(), rates)
            assert served.shard.schedule.digest == digest(rates)
            for known in past[-MAX_EARLIER:]:
                same = len(known) if np.array_equal(known, rates[: len(known)]) else first_difference(known, rates)
                if len(known) and known.tobytes() != rates.tobytes():
                    served.shard.schedule.require_known(digest(known), lowest_since(past, known, rates))
                    if same < len(rates):
                        with pytest.raises(TableMismatchError):
                            served.shard.schedule.require_known(digest(known), same + 1)
    finally:
        served.close()


def first_difference(one: Float32Array, other: Float32Array) -> int:
    common = min(len(one), len(other))
    differing = np.flatnonzero(one[:common] != other[:common])
    return int(differing[0]) if len(differing) else common


def lowest_since(past: list[Float32Array], known: Float32Array, rates: Float32Array) -> int:
    """The lowest step changed since `known` was the schedule."""
    newest = max(number for number, earlier in enumerate(past) if np.array_equal(earlier, known))
    later = [*past[newest:], rates]
    return min(first_difference(one, other) for one, other in itertools.pairwise(later))
