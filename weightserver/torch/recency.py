"""Recent negative sampling: the K rows that are the classes of a step (Section 2.3 of the paper)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Int64Array
from weightserver.core.sharding import Sharding
from weightserver.torch.rows.store import RowStore
from weightserver.torch.windows import Visits

_COMPUTED_AHEAD = 2
"""Steps whose active rows are computed before they are announced to the store."""


@dataclass(frozen=True)
class ActiveRows:
    """The classes of one step: a pure function of the step."""

    rows: Int64Array  # (K,), strictly increasing
    labels: Int64Array  # (B,) or (B, P), position in `rows` of each visit of the batch; -1 for none

    def share(self, sharding: Sharding, shard: int) -> ActiveRows:
        """The rows that one shard (a rank) holds; the label of a visit is -1 if another shard holds its row."""
        mine = sharding.shard_of(self.rows) == shard
        position = np.where(mine, np.cumsum(mine) - 1, -1)
        return ActiveRows(self.rows[mine], np.where(self.labels < 0, -1, position[self.labels]))


Active = TypeVar("Active", bound=ActiveRows)


def announced(active: Iterable[Active], store: RowStore, steps: range) -> Generator[Active, None, None]:
    """Yields the active rows of each step, announced to the store `store.prefetch_steps` steps earlier.

    A thread takes them from `active`; the store is called in this thread. Close the generator to end the thread.
    """
    upcoming: deque[Active] = deque()
    with closing(computed_ahead(active, ahead=_COMPUTED_AHEAD, name="active-rows")) as computed:
        for step in steps:
            while len(upcoming) <= store.prefetch_steps and step + len(upcoming) in steps:
                ahead = step + len(upcoming)
                upcoming.append(next(computed))
                store.prefetch(upcoming[-1].rows, step=ahead)
            yield upcoming.popleft()


class MostRecent:
    """The `num_active` rows with the latest visits, as visits come; fewer until as many distinct rows were visited.

    The next batch costs about one sort of the rows that enter. Not thread-safe.
    """

    def __init__(self, num_active: int) -> None:
        self.num_active = num_active
        self.rows = np.zeros(0, np.int64)  # (≤ K,), strictly increasing
        self.last_visit = np.zeros(0, np.int64)  # the same shape, number of each row's last visit

    def add(self, batch: Int64Array, first_visit: int) -> None:
        """Adds the rows of visits first_visit, first_visit + 1, … (int64 [n]), and removes the least recent ones."""
        visited, ago = np.unique(batch[::-1], return_index=True)  # the first occurrence is the latest
        last_visit = first_visit + len(batch) - 1 - ago
        position = np.searchsorted(self.rows, visited)
        known = self.rows.take(position, mode="clip") == visited if len(self.rows) else np.zeros(len(visited), bool)
        rows, visits = self.rows, self.last_visit.copy()
        visits[position[known]] = last_visit[known]
        num_entering = int((~known).sum())
        if (num_leaving := len(rows) + num_entering - self.num_active) > 0:
            leaving = np.argpartition(visits, num_leaving - 1)[:num_leaving]
            rows, visits = np.delete(rows, leaving), np.delete(visits, leaving)
        if num_entering:
            where = np.searchsorted(rows, visited[~known])
            rows, visits = np.insert(rows, where, visited[~known]), np.insert(visits, where, last_visit[~known])
        self.rows, self.last_visit = rows, visits

    def active(self, batch: Int64Array) -> ActiveRows:
        """The rows, and the positions of a batch that was added last."""
        return ActiveRows(self.rows, np.searchsorted(self.rows, batch))


class RecentRows:
    """The K most recently visited distinct rows, the step's own batch included; batch t is visits t·B … t·B+B−1.

    The next step costs about one sort of the rows that enter; any other step is computed from the stream of visits.
    Memory is O(K + W), independent of N. Not thread-safe.

    Args:
        with_past: whether visits before visit 0 count as if they had been made; otherwise there are fewer than K rows
            until as many were visited.

    Raises:
        ValueError: K exceeds N, or is smaller than the distinct rows that a batch may hold.
    """

    def __init__(self, schedule: Visits, *, num_active: int, batch_size: int, with_past: bool = True) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        check_num_active(num_active, schedule.num_rows, batch_size)
        self._schedule = schedule
        self._batch_size = batch_size
        self._first_visit = -math.inf if with_past else 0
        self._step: int | None = None
        self.most_recent = MostRecent(num_active)
        """The rows of the step whose `active` was called last."""

    def active(self, step: int) -> ActiveRows:
        """The active rows of a step ≥ 0, in any order of steps."""
        batch = self._schedule.visits(step * self._batch_size, (step + 1) * self._batch_size)
        if self._step is not None and step == self._step + 1:
            self.most_recent.add(batch, step * self._batch_size)
        elif step != self._step:
            self._look_back((step + 1) * self._batch_size)
        self._step = step
        return self.most_recent.active(batch)

    def visited(self, step: int) -> tuple[Int64Array, Int64Array]:
        """The active rows of a step (K,), and the number of the last visit of each."""
        self.active(step)
        return self.most_recent.rows, self.most_recent.last_visit

    def _look_back(self, stop: int) -> None:
        """Walks back from visit `stop` to the K-th distinct row, piece by piece: small strides make it a long walk."""
        num_active, rows, last_visit = self.most_recent.num_active, np.zeros(0, np.int64), np.zeros(0, np.int64)
        while len(rows) < num_active and stop > self._first_visit:
            start = int(max(stop - 2 * num_active, self._first_visit))
            met, ago = np.unique(
                self._schedule.visits(start, stop)[::-1], return_index=True
            )  # the first occurrence is the latest
            new = ~np.isin(met, rows)
            rows, last_visit = np.append(rows, met[new]), np.append(last_visit, stop - 1 - ago[new])
            stop = start
        newest = np.argsort(-last_visit)[:num_active]
        newest = newest[np.argsort(rows[newest])]
        self.most_recent.rows, self.most_recent.last_visit = rows[newest], last_visit[newest]


def check_num_active(num_active: int, num_rows: int, batch_size: int) -> None:
    """Raises ValueError unless `num_active` of `num_rows` rows can hold every batch."""
    if num_active > num_rows:
        raise ValueError(f"num_negatives is {num_active}, but there are only {num_rows} classes: choose fewer")
    if num_active < min(batch_size, num_rows):
        raise ValueError(
            f"num_negatives is {num_active}, but a batch may contain {batch_size} classes: choose at least as many"
        )
