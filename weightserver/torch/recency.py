"""Recent negative sampling: the K rows that are the classes of a step (Section 2.3 of the paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightserver.core.arrays import Int64Array
from weightserver.core.errors import ArgumentError
from weightserver.torch.ranks import ONE_OWNER, RowOwners

_GONE = np.iinfo(np.int64).max
"""Stands for the last visit of a row that is no longer among the recent ones, or is among the newest."""
_PART_OF_NEWEST = 8
"""The newest rows join the others when they are this part of K: a join takes as long as a few steps."""


@dataclass(frozen=True)
class ActiveRows:
    """The classes of one step that a rank holds: a pure function of the step."""

    rows: Int64Array  # (K of this rank,), strictly increasing
    labels: Int64Array  # (B,) or (B, P), position in `rows` of each visit of the batch; -1 for none

    @classmethod
    def of(cls, rows: Int64Array, batch: Int64Array, owners: RowOwners = ONE_OWNER) -> ActiveRows:
        """These rows, and the positions of visits to rows, int64 (B,)."""
        return cls(rows, np.where(owners.are_mine(batch), np.searchsorted(rows, batch), -1))


def _nothing() -> Int64Array:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Visited:
    """The K rows with the latest visits; fewer until as many distinct rows were visited.

    A step changes few of many rows. So those that it visits move to the `newest`, and what they and the oldest leave
    behind in `rows` stays there until `settled`: no step inserts into all rows, or deletes from them.
    """

    rows: Int64Array = field(default_factory=_nothing)  # (n,), strictly increasing
    last_visit: Int64Array = field(default_factory=_nothing)  # (n,), the number of each one's last visit
    drawn_by: object = None
    """The sampler that drew the last visits, if one did."""
    newest: Int64Array = field(default_factory=_nothing)  # (m,), strictly increasing
    newest_visits: Int64Array = field(default_factory=_nothing)  # (m,), as `last_visit`
    num_gone: int = 0
    """How many of `rows` are no longer recent, or among the newest."""
    mine: Int64Array | None = None
    """What `held` returns; None before the first step."""

    def held(self, owners: RowOwners = ONE_OWNER) -> Int64Array:
        """The recent rows that this rank holds, strictly increasing int64 [k]."""
        return owners.mine(self.settled().rows) if self.mine is None else self.mine

    def settled(self) -> Visited:
        """An equal one with all recent rows, and no others, in `rows`."""
        if not len(self.newest):
            return self
        stay = self.last_visit != _GONE
        rows, visits = self.rows[stay], self.last_visit[stay]
        where = np.searchsorted(rows, self.newest)
        rows, visits = np.insert(rows, where, self.newest), np.insert(visits, where, self.newest_visits)
        return Visited(rows, visits, self.drawn_by, mine=self.mine)

    def followed_by(self, batch: Int64Array, *, num_active: int, owners: RowOwners = ONE_OWNER) -> Visited:
        """After visits to rows, int64 [n], which may repeat."""
        visited, ago = np.unique(batch[::-1], return_index=True)  # the first occurrence is the latest
        if len(self.newest) and len(self.newest) + len(visited) > num_active // _PART_OF_NEWEST:
            return self.settled().followed_by(batch, num_active=num_active, owners=owners)
        latest = self.newest_visits if len(self.newest) else self.last_visit
        visits = int(latest.max(initial=-1)) + len(batch) - ago

        where, were_newest = _find(self.newest, visited)
        newest_visits, added = self.newest_visits.copy(), ~were_newest
        newest_visits[where[were_newest]] = visits[were_newest]
        newest = np.insert(self.newest, where[added], visited[added])
        newest_visits = np.insert(newest_visits, where[added], visits[added])

        where, were_older = _find(self.rows, visited)
        were_older[were_older] = self.last_visit[where[were_older]] != _GONE
        last_visit, num_gone = self.last_visit.copy(), self.num_gone + int(were_older.sum())
        last_visit[where[were_older]] = _GONE
        num_leaving = max(0, len(self.rows) - num_gone + len(newest) - num_active)
        leaving = _oldest(last_visit, num_leaving) if num_leaving else _nothing()
        last_visit[leaving] = _GONE

        mine = self.held(owners)
        mine = np.delete(mine, np.searchsorted(mine, owners.mine(np.sort(self.rows[leaving]))))
        entering = owners.mine(visited[~(were_newest | were_older)])
        return Visited(
            rows=self.rows,
            last_visit=last_visit,
            newest=newest,
            newest_visits=newest_visits,
            num_gone=num_gone + num_leaving,
            mine=np.insert(mine, np.searchsorted(mine, entering), entering),
        )


def _find(rows: Int64Array, wanted: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Where in increasing rows, int64 [n], each wanted one is or belongs, int64 [m], and whether it is there, [m]."""
    where = np.searchsorted(rows, wanted)
    is_there = rows.take(where, mode="clip") == wanted if len(rows) else np.zeros(len(wanted), np.bool_)
    return where, is_there


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
    """Raises ArgumentError unless `num_active` of `num_rows` rows can hold every batch."""
    if num_active > num_rows:
        raise ArgumentError("num_negatives", f"is {num_active}, but there are only {num_rows} classes: choose fewer")
    if num_active < min(batch_size, num_rows):
        raise ArgumentError(
            "num_negatives", f"is {num_active}, but a batch may contain {batch_size} classes: choose at least as many"
        )
