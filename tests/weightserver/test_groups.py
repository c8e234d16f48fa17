"""Writes that share one commit: the effects of earlier ones on later ones, and writers after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.schedules import naming, used_by
from tests.helpers.stored import decoded
from weightserver.core.errors import NoTableError, TableMismatchError
from weightserver.core.initial import initial_rows
from weightserver.core.spec import TableSpec
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import MAX_GROUP, CancellableFuture, Committer
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader
from weightserver.storage.lmdb_storage import LmdbStorage

SPEC = TableSpec(num_rows=20, dim=3, weight_decay=0.0, rows_per_block=4)
ROW = np.array([7], np.int64)
ONES = np.ones((1, 3), np.float32)


class Groups:
    """A shard whose committer commits exactly the operations given as one group."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = LmdbStorage(directory)
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.committer = Committer(self.shard.batch)
        self.sequence = 0

    def commit(self, *operations: Callable[[ShardChange], object]) -> list[CancellableFuture[object]]:
        busy, go = threading.Event(), threading.Event()

        def hold(_: ShardChange) -> None:
            busy.set()
            assert go.wait(60)

        self.committer.submit(hold)
        assert busy.wait(60)
        futures = [self.committer.submit(operation) for operation in operations]
        go.set()
        for future in futures:
            future.exception(10)
        return futures

    def push(self, step: int, *rates: float) -> Callable[[ShardChange], object]:
        """A push that brings these learning rates, under the next number."""
        self.sequence += 1
        header = WriteHeader(1, b"o" * 16, b"w" * 16, self.sequence, step, naming(rates))
        return lambda batch: batch.push_gradients(header, ROW, ONES)

    def create(self, batch: ShardChange) -> None:
        batch.create_table(SPEC)

    def open_session(self, batch: ShardChange) -> None:
        batch.open_session("run", 1, b"o" * 16)

    def weight(self) -> float:
        chunks = self.shard.fetch(ROW, step=self.shard.state.clock, state=False, rates=used_by(self.shard))
        return float(decoded(chunks, SPEC).weight[0, 0])

    def close(self) -> None:
        self.committer.close()
        self.storage.close()

    def restart(self) -> None:
        self.close()
        self.__init__(self.directory)


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    groups = Groups(tmp_path)
    yield groups
    groups.close()


def test_a_group_may_contain_the_whole_life_of_a_table(groups: Groups) -> None:
    """Three calls arrive while the disk is busy; each builds on the earlier ones."""
    for future in groups.commit(groups.create, groups.open_session, groups.push(0, 0.5)):
        assert future.exception() is None
    initial = float(initial_rows(SPEC, ROW)[0, 0])
    assert groups.weight() == pytest.approx(initial - 0.5)


def test_operations_run_in_the_order_of_their_arrival(groups: Groups) -> None:
    seen: list[int] = []
    number = 2 * MAX_GROUP + 5  # three groups
    groups.commit(*[lambda batch, n=n: seen.append(n) for n in range(number)])
    assert seen == list(range(number))


def test_the_first_of_two_learning_rates_in_a_group_counts(groups: Groups) -> None:
    """The second push brings another one, and is refused whatever it shares a commit with."""
    groups.commit(groups.create, groups.open_session)
    initial = groups.weight()
    first, second = groups.commit(groups.push(0, 0.5), groups.push(0, 2.0))
    assert first.exception() is None
    with pytest.raises(TableMismatchError, match=r"the learning rate of step 0 is 0\.5 and was used, not 2"):
        second.result()
    assert groups.weight() == pytest.approx(initial - 0.5)
    groups.restart()
    groups.sequence = 2
    (again,) = groups.commit(groups.push(0, 2.0))
    assert isinstance(again.exception(), TableMismatchError)
    assert groups.weight() == pytest.approx(initial - 0.5)


def test_learning_rates_of_a_write_that_failed_are_not_used(groups: Groups) -> None:
    groups.commit(groups.create, groups.open_session)

    def fails(batch: ShardChange) -> None:
        groups.push(0, 0.5)(batch)
        raise OSError("the disk is full")

    failed, pushed = groups.commit(fails, groups.push(0, 2.0))
    assert isinstance(failed.exception(), OSError)
    assert pushed.result() is True
    assert groups.shard.used_rates.values.tolist() == [2.0]


def test_a_write_after_a_drop_in_its_group_is_refused(groups: Groups) -> None:
    groups.commit(groups.create, groups.open_session, groups.push(2, 0.5, 0.5, 0.5))
    dropped, pushed = groups.commit(ShardChange.drop_table, groups.push(3, 0.5, 0.5, 0.5, 0.5))
    assert dropped.exception() is None
    assert isinstance(pushed.exception(), NoTableError)
    groups.commit(groups.create)
    assert len(groups.shard.used_rates) == 0
    groups.restart()
    assert len(groups.shard.used_rates) == 0, "the dropped table's schedule came back"


def test_a_write_cancelled_while_it_runs_is_undone(groups: Groups) -> None:
    """The others of its group are applied, and a repetition of the cancelled write is applied once."""
    groups.commit(groups.create, groups.open_session)
    promises: list[CancellableFuture[object]] = []
    first, second = groups.push(0, 1.0), groups.push(0, 1.0)

    def give_up(batch: ShardChange) -> object:
        promises[0].cancel()
        return second(batch)

    busy, go = threading.Event(), threading.Event()
    groups.committer.submit(lambda batch: (busy.set(), go.wait(60)))
    assert busy.wait(60)
    promises.append(groups.committer.submit(give_up))
    other = groups.committer.submit(first)
    go.set()
    with pytest.raises(CancelledError):
        promises[0].result(60)
    assert other.result(60) is True
    once = groups.weight()
    assert [groups.committer.submit(second).result(60) for _ in range(2)] == [True, False]
    assert groups.weight() < once
