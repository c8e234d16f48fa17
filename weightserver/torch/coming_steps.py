"""The classes of the steps that were announced to a head and not begun yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.core.sharding import Sharding
from weightserver.torch.negatives import NegativeSampler, ScheduledRows
from weightserver.torch.ranks import Ranks
from weightserver.torch.recency import ActiveRows, MostRecent
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.windows import RangesOrder


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B) or (A, B, P), the classes of each batch of the step, on all ranks together


@dataclass(frozen=True)
class Visited:
    """The recently visited rows before a step."""

    rows: Int64Array  # (≤ K,)
    last_visit: Int64Array  # the same shape
    sampler: WindowSampler | None = None
    """It drew the step before: then the rows are a function of it, and the arrays are older."""


@dataclass(frozen=True)
class Coming:
    """A step in the queue."""

    announced: Announced
    before: Visited
    """What was recently visited before it."""

    def has(self, ids: Int64Array, ranks: Ranks) -> bool:
        """Whether a batch of it has these classes on this rank."""
        share = ranks.share(self.announced.ids.shape[1])
        return any(np.array_equal(of_part[share], ids) for of_part in self.announced.ids)


class ComingSteps:
    """A queue of announced steps, with the active rows of each.

    Steps that the sampler draws are a function of their number; of others, the recently visited rows are kept.
    """

    def __init__(self, negatives: NegativeSampler, order: RangesOrder) -> None:
        self._negatives = negatives
        self._order = order
        self._ranks, self._sharding = Ranks(), Sharding(1, 1)
        self._recent = MostRecent(negatives.num_recent)
        self._sampled: tuple[WindowSampler, ScheduledRows] | None = None
        self._drawn_by: WindowSampler | None = None  # the sampler of the last step in the queue, or before it
        self._steps: deque[Coming] = deque()

    def use(self, ranks: Ranks, sharding: Sharding) -> None:
        """Sets the ranks that share the rows, and how."""
        self._ranks, self._sharding = ranks, sharding

    @property
    def sampler(self) -> WindowSampler | None:
        return self._sampled[0] if self._sampled else None

    @sampler.setter
    def sampler(self, sampler: WindowSampler) -> None:
        self._sampled = sampler, self._scheduled(sampler)

    def _scheduled(self, sampler: WindowSampler) -> ScheduledRows:
        return ScheduledRows(sampler.row_visits, self._negatives, batch_size=sampler.step_size)

    def visited_before(self, step: int, visited: Visited | None = None) -> tuple[Int64Array, Int64Array]:
        """Rows (≤ K,) and their last visits before `step`: those of the next one that begins unless `visited`."""
        visited = visited or (self._steps[0].before if self._steps else self.visited())
        if visited.sampler is None:
            return visited.rows, visited.last_visit
        return self._scheduled(visited.sampler).visited(step - 1)

    def restore(self, visited: tuple[Int64Array, Int64Array]) -> None:
        """Forgets all steps, and sets what `visited_before` returned."""
        self._steps.clear()
        self._set(Visited(*visited))

    def visited(self) -> Visited:
        """What was recently visited after the last step in the queue."""
        return Visited(self._recent.rows, self._recent.last_visit, self._drawn_by)

    def _set(self, visited: Visited) -> None:
        self._recent.rows, self._recent.last_visit = visited.rows, visited.last_visit
        self._drawn_by = visited.sampler

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Coming]:
        return iter(self._steps)

    def of_sampler(self, sampler: WindowSampler) -> Callable[[int], Announced]:
        """A function from a step to its classes, for one thread that asks for the steps in order."""
        scheduled = self._scheduled(sampler)

        def announced(step: int) -> Announced:
            ids = sampler.classes_of_step(step).reshape(sampler.batches_per_step, -1)
            return self._shared(scheduled.active(step), ids)

        return announced

    def add_batches(self, step: int, ids: Int64Array) -> Announced:
        """Adds the next step, of these classes: int64 (A, B), or (A, B, P) with -1 for none; returns it."""
        before, drawn_by = self.visited(), None
        if self._sampled is not None and self._is_drawn(self._sampled[0], step, ids):
            drawn_by, scheduled = self._sampled
            active = scheduled.active(step)
        else:
            if before.sampler is not None:
                self._recent.rows, self._recent.last_visit = self._scheduled(before.sampler).visited(step - 1)
            active = self._active(step, ids)
        self._drawn_by = drawn_by
        announced = self._shared(active, ids)
        self._steps.append(Coming(announced, before))
        return announced

    @staticmethod
    def _is_drawn(sampler: WindowSampler, step: int, ids: Int64Array) -> bool:
        return np.array_equal(sampler.classes_of_step(step), ids.reshape(-1, *ids.shape[2:]))

    def _active(self, step: int, ids: Int64Array) -> ActiveRows:
        """The active rows of a step that no sampler has drawn, and the positions of its classes: (A·B,) or (A·B, P)."""
        rows, recent = self._order.rows(ids[ids >= 0]), self._recent if self._negatives.num_recent else None
        if recent is not None:
            recent.add(rows, int(recent.last_visit.max(initial=-1)) + 1)
        active = self._negatives.active(step, rows, recent)
        labels = np.full(ids.shape, -1)
        labels[ids >= 0] = active.labels
        return ActiveRows(active.rows, labels.reshape(-1, *ids.shape[2:]))

    def add_sampled(self, announced: Announced, sampler: WindowSampler) -> None:
        """Adds the next step, drawn by a sampler."""
        self._steps.append(Coming(announced, self.visited()))
        self._drawn_by = sampler

    def remove_last(self) -> None:
        """Removes the step that was added last."""
        self._set(self._steps.pop().before)

    @property
    def first(self) -> Coming:
        """The next step."""
        return self._steps[0]

    def take(self) -> Coming:
        """Removes and returns the next step."""
        return self._steps.popleft()

    def forget(self, before: Visited | None = None) -> None:
        """Forgets all steps; with `before`, also the one that was taken last, or whatever came after it."""
        if self._steps:
            before = before or self._steps[0].before
        self._steps.clear()
        if before is not None:
            self._set(before)

    def _shared(self, active: ActiveRows, ids: Int64Array) -> Announced:
        mine = active.share(self._sharding, self._ranks.rank)
        return Announced(mine.rows, mine.labels, ids)
