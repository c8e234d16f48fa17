"""Recent negative sampling: the K rows that are the classes of a step (Section 2.3 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.torch.ranks import RowOwners


@dataclass(frozen=True)
class ActiveRows:
    """The classes of one step: a pure function of the step."""

    rows: Int64Array  # (K,), strictly increasing
    labels: Int64Array  # (B,) or (B, P), position in `rows` of each visit of the batch; -1 for none

    def share(self, owners: RowOwners, rank: int) -> ActiveRows:
        """The rows that one rank holds; the label of a visit is -1 if another one holds its row."""
        if owners.num_ranks == 1:
            return self
        mine = self.rows[owners.rank_of(self.rows) == rank]
        visited = self.rows[self.labels]
        here = (self.labels >= 0) & (owners.rank_of(visited) == rank)
        return ActiveRows(mine, np.where(here, np.searchsorted(mine, visited), -1))


@dataclass(frozen=True)
class Visited:
    """The K rows with the latest visits; fewer until as many distinct rows were visited."""

    rows: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))  # (≤ K,), strictly increasing
    last_visit: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))  # the number of each one's last visit
    drawn_by: object = None
    """The sampler that drew the last visits, if one did."""

    def followed_by(self, batch: Int64Array, *, num_active: int) -> Visited:
        """After visits to rows, int64 [n], which may repeat. Costs about one sort of the rows that enter."""
        visited, ago = np.unique(batch[::-1], return_index=True)  # the first occurrence is the latest
        last_visit = int(self.last_visit.max(initial=-1)) + len(batch) - ago
        position = np.searchsorted(self.rows, visited)
        known = self.rows.take(position, mode="clip") == visited if len(self.rows) else np.zeros(len(visited), bool)
        rows, visits = self.rows, self.last_visit.copy()
        visits[position[known]] = last_visit[known]
        num_entering = int((~known).sum())
        if (num_leaving := len(rows) + num_entering - num_active) > 0:
            leaving = _oldest(visits, num_leaving)
            rows, visits = np.delete(rows, leaving), np.delete(visits, leaving)
        if num_entering:
            where = np.searchsorted(rows, visited[~known])
            rows, visits = np.insert(rows, where, visited[~known]), np.insert(visits, where, last_visit[~known])
        return Visited(rows, visits)

    def active(self, batch: Int64Array) -> ActiveRows:
        """The rows, and the positions of the visits that came last."""
        return ActiveRows(self.rows, np.searchsorted(self.rows, batch))


def _oldest(visits: Int64Array, number: int) -> Int64Array:
    """Positions of the `number` smallest of different visits, in any order. They are near the smallest one, which is
    found without partitioning all."""
    first, reach = int(visits.min()), 2 * number
    while len(near := np.flatnonzero(visits < first + reach)) < number:
        reach *= 8
    return near[np.argpartition(visits[near], number - 1)[:number]]


def visited_before(visits: Callable[[int, int], Int64Array], stop: int, *, num_active: int) -> Visited:
    """What was recently visited before visit `stop` of a stream of at least `num_active` rows, as
    `VisitSchedule.visits` returns it from one visit to another.

    Visits before visit 0 count as if they had been made. Walks back to the K-th distinct row, piece by piece, since
    small strides make it a long walk; memory is O(K + W), independent of N. `Visited.followed_by` takes less time for
    what comes after.
    """
    rows, last_visit = np.zeros(0, np.int64), np.zeros(0, np.int64)
    while len(rows) < num_active:
        start = stop - 2 * num_active
        met, ago = np.unique(visits(start, stop)[::-1], return_index=True)  # the first occurrence is the latest
        new = ~np.isin(met, rows)
        rows, last_visit = np.append(rows, met[new]), np.append(last_visit, stop - 1 - ago[new])
        stop = start
    newest = np.argsort(-last_visit)[:num_active]
    newest = newest[np.argsort(rows[newest])]
    return Visited(rows[newest], last_visit[newest])


def check_num_active(num_active: int, num_rows: int, batch_size: int) -> None:
    """Raises ValueError unless `num_active` of `num_rows` rows can hold every batch."""
    if num_active > num_rows:
        raise ValueError(f"num_negatives is {num_active}, but there are only {num_rows} classes: choose fewer")
    if num_active < min(batch_size, num_rows):
        raise ValueError(
            f"num_negatives is {num_active}, but a batch may contain {batch_size} classes: choose at least as many"
        )
