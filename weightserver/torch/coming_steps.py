"""The classes of the steps that were announced to a head and not begun yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.core.sharding import Sharding
from weightserver.torch.ranks import Ranks
from weightserver.torch.recency import ActiveRows, MostRecent, RecentRows
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.windows import RangesOrder


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B), the classes of each batch of the step, on all ranks together


@dataclass(frozen=True)
class Visited:
    """The recently visited rows before a step."""

    rows: Int64Array  # (≤ K,)
    last_visit: Int64Array  # the same shape
    sampler: WindowSampler | None = None
    """It drew the step before: then the rows are a function of it, and the arrays are older."""


@dataclass(frozen=True)
class _Entry:
    """A step in the queue."""

    announced: Announced
    before: Visited


class ComingSteps:
    """A queue of announced steps, with the K most recently visited rows of each.

    Steps that the sampler draws are a function of their number; of others, the recently visited rows are kept.

    Args:
        with_past: whether a sampler's visits before step 0 count, see `RecentRows`.
    """

    def __init__(self, num_active: int, order: RangesOrder, *, with_past: bool = True) -> None:
        self._num_active = num_active
        self._order = order
        self._with_past = with_past
        self._ranks, self._sharding = Ranks(), Sharding(1, 1)
        self._recent = MostRecent(num_active)
        self._sampled: tuple[WindowSampler, RecentRows] | None = None
        self._drawn_by: WindowSampler | None = None  # the sampler of the last step in the queue, or before it
        self._steps: deque[_Entry] = deque()

    def use(self, ranks: Ranks, sharding: Sharding) -> None:
        """Sets the ranks that share the rows, and how."""
        self._ranks, self._sharding = ranks, sharding

    @property
    def sampler(self) -> WindowSampler | None:
        return self._sampled[0] if self._sampled else None

    @sampler.setter
    def sampler(self, sampler: WindowSampler) -> None:
        self._sampled = sampler, self._recent_rows(sampler)

    def _recent_rows(self, sampler: WindowSampler) -> RecentRows:
        return RecentRows(
            sampler.schedule, num_active=self._num_active, batch_size=sampler.step_size, with_past=self._with_past
        )

    def visited_before(self, step: int) -> tuple[Int64Array, Int64Array]:
        """Rows (≤ K,) and their last visits before `step`, the next one that begins."""
        visited = self._steps[0].before if self._steps else self._visited()
        if visited.sampler is None:
            return visited.rows, visited.last_visit
        return self._recent_rows(visited.sampler).visited(step - 1)

    def restore(self, visited: tuple[Int64Array, Int64Array]) -> None:
        """Forgets all steps, and sets what `visited_before` returned."""
        self._steps.clear()
        self._set(Visited(*visited))

    def _visited(self) -> Visited:
        """What was recently visited after the last step in the queue."""
        return Visited(self._recent.rows, self._recent.last_visit, self._drawn_by)

    def _set(self, visited: Visited) -> None:
        self._recent.rows, self._recent.last_visit = visited.rows, visited.last_visit
        self._drawn_by = visited.sampler

    def __len__(self) -> int:
        return len(self._steps)

    def of_sampler(self, sampler: WindowSampler) -> Callable[[int], Announced]:
        """A function from a step to its classes, for one thread that asks for the steps in order."""
        recent = self._recent_rows(sampler)

        def announced(step: int) -> Announced:
            ids = sampler.images_of_step(step).reshape(sampler.batches_per_step, -1)
            return self._shared(recent.active(step), ids)

        return announced

    def add_batches(self, step: int, ids: Int64Array) -> Announced:
        """Adds the next step, of these classes: int64 (A, B); returns it."""
        before, drawn_by = self._visited(), None
        if self._sampled is not None and np.array_equal(self._sampled[0].images_of_step(step), ids.ravel()):
            drawn_by, recent = self._sampled
            active = recent.active(step)
        else:
            if before.sampler is not None:
                self._recent.rows, self._recent.last_visit = self._recent_rows(before.sampler).visited(step - 1)
            rows = self._order.rows(ids.ravel())
            self._recent.add(rows, int(self._recent.last_visit.max(initial=-1)) + 1)
            active = self._recent.active(rows)
        self._drawn_by = drawn_by
        announced = self._shared(active, ids)
        self._steps.append(_Entry(announced, before))
        return announced

    def add_sampled(self, announced: Announced, sampler: WindowSampler) -> None:
        """Adds the next step, drawn by a sampler."""
        self._steps.append(_Entry(announced, self._visited()))
        self._drawn_by = sampler

    def remove_last(self) -> None:
        """Removes the step that was added last."""
        self._set(self._steps.pop().before)

    def take(self) -> tuple[Announced, Visited]:
        """Removes and returns the next step, and what was recently visited before it."""
        entry = self._steps.popleft()
        return entry.announced, entry.before

    def forget(self, before: Visited | None = None) -> None:
        """Forgets all steps; with `before`, also the one that was taken last."""
        if self._steps:
            before = before or self._steps[0].before
        self._steps.clear()
        if before is not None:
            self._set(before)

    def _shared(self, active: ActiveRows, ids: Int64Array) -> Announced:
        mine = active.share(self._sharding, self._ranks.rank)
        return Announced(mine.rows, mine.labels, ids)
