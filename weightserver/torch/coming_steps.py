"""The classes of the steps that were announced to a head and not begun yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from weightserver.common.background import computed_ahead
from weightserver.core.arrays import Int64Array
from weightserver.core.sharding import Sharding
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.ranks import Ranks
from weightserver.torch.recency import ActiveRows, RecentRows, Visited
from weightserver.torch.rows.store import RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.windows import RangesOrder

_COMPUTED_AHEAD = 2
"""Steps whose active rows are computed before they are announced to the store."""


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B) or (A, B, P), the classes of each batch of the step, on all ranks together
    before: Visited
    after: Visited

    def has(self, ids: Int64Array, ranks: Ranks) -> bool:
        """Whether a batch of it has these classes on this rank."""
        return any(np.array_equal(of_part[ranks.share(len(of_part))], ids) for of_part in self.ids)


class ComingSteps:
    """A queue of announced steps, with the active rows of each.

    What is recent follows from the step before; before the first step that a sampler draws, from the visits that the
    sampler would have made.
    """

    def __init__(self, negatives: NegativeSampler, order: RangesOrder) -> None:
        self.sampler: WindowSampler | None = None
        self._negatives = negatives
        self._order = order
        self._ranks, self._sharding = Ranks(), Sharding(1, 1)
        self._steps: deque[Announced] = deque()
        self._last = Visited()  # after the last step in the queue

    def use(self, ranks: Ranks, sharding: Sharding) -> None:
        """Sets the ranks that share the rows, and how."""
        self._ranks, self._sharding = ranks, sharding

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Announced]:
        return iter(self._steps)

    @property
    def visited(self) -> Visited:
        """What was recently visited before the next step."""
        return self._steps[0].before if self._steps else self._last

    def of_batches(self, step: int, ids: Int64Array) -> Announced:
        """The step after the last one, of these classes: int64 (A, B), or (A, B, P) with -1 for none."""
        sampler = self.sampler
        is_drawn = sampler is not None and np.array_equal(
            sampler.classes_of_step(step), ids.reshape(-1, *ids.shape[2:])
        )
        return self._after(self._last, step, ids, drawn_by=sampler if is_drawn else None)

    def of_sampler(self, sampler: WindowSampler, steps: range) -> Iterator[Announced]:
        """The steps that a sampler draws."""
        visited = Visited()
        for step in steps:
            ids = sampler.classes_of_step(step).reshape(sampler.batches_per_step, -1)
            announced = self._after(visited, step, ids, drawn_by=sampler)
            visited = announced.after
            yield announced

    def _after(self, before: Visited, step: int, ids: Int64Array, *, drawn_by: WindowSampler | None) -> Announced:
        if drawn_by is not None and before.drawn_by is not drawn_by:
            before = self._past(drawn_by, step)
        rows, recent = self._order.rows(ids[ids >= 0]), None
        if self._negatives.num_recent and not (drawn_by is not None and self._negatives.takes_all):
            recent = before.followed_by(rows, num_active=self._negatives.num_recent)
        active = self._negatives.active(step, rows, recent)
        labels = np.full(ids.shape, -1)
        labels[ids >= 0] = active.labels
        mine = ActiveRows(active.rows, labels.reshape(-1, *ids.shape[2:])).share(self._sharding, self._ranks.rank)
        return Announced(mine.rows, mine.labels, ids, before, replace(recent or before, drawn_by=drawn_by))

    def _past(self, sampler: WindowSampler, step: int) -> Visited:
        """What was recently visited before a step if the sampler drew all earlier ones."""
        if self._negatives.takes_all or not (num_recent := self._negatives.num_recent):
            return Visited()
        return RecentRows(sampler.row_visits, num_active=num_recent, batch_size=sampler.step_size).visited(step - 1)

    def add(self, announced: Announced) -> None:
        """Adds the next step."""
        self._steps.append(announced)
        self._last = announced.after

    def take(self) -> Announced:
        """Removes and returns the next step."""
        return self._steps.popleft()

    def forget(self, visited: Visited | None = None) -> None:
        """Forgets all steps; then that is recent which was `visited` before the next one, or other rows."""
        self._last = visited or self.visited
        self._steps.clear()

    def forget_last(self) -> None:
        """Forgets the step that was added last."""
        self._last = self._steps.pop().before


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
