"""The classes of the steps that were announced to a head and not begun yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
        self._steps: deque[tuple[Announced, tuple[Int64Array, Int64Array]]] = deque()  # with what was recent before

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

    @property
    def recent(self) -> tuple[Int64Array, Int64Array]:
        """Rows (≤ K,) and their last visits, as after all steps that were announced without a sampler."""
        return self._recent.rows, self._recent.last_visit

    @recent.setter
    def recent(self, recent: tuple[Int64Array, Int64Array]) -> None:
        self._recent.rows, self._recent.last_visit = recent

    def __len__(self) -> int:
        return len(self._steps)

    def of_sampler(self, sampler: WindowSampler) -> Callable[[int], Announced]:
        """A function from a step to its classes, for one thread that asks for the steps in order."""
        scheduled = self._scheduled(sampler)

        def announced(step: int) -> Announced:
            ids = sampler.classes_of_step(step).reshape(sampler.batches_per_step, -1)
            return self._shared(scheduled.active(step), ids)

        return announced

    def of_batches(self, step: int, ids: Int64Array) -> Announced:
        """The next step, of these classes: int64 (A, B), or (A, B, P) with -1 for none."""
        if self._sampled is not None:
            sampler, scheduled = self._sampled
            if np.array_equal(sampler.classes_of_step(step), ids.reshape(-1, *ids.shape[2:])):
                return self._shared(scheduled.active(step), ids)
        rows, recent = self._order.rows(ids[ids >= 0]), self._recent if self._negatives.num_recent else None
        if recent is not None:
            recent.add(rows, int(recent.last_visit.max(initial=-1)) + 1)
        active = self._negatives.active(step, rows, recent)
        labels = np.full(ids.shape, -1)
        labels[ids >= 0] = active.labels
        return self._shared(ActiveRows(active.rows, labels.reshape(-1, *ids.shape[2:])), ids)

    def _shared(self, active: ActiveRows, ids: Int64Array) -> Announced:
        mine = active.share(self._sharding, self._ranks.rank)
        return Announced(mine.rows, mine.labels, ids)

    def append(self, announced: Announced, before: tuple[Int64Array, Int64Array] | None = None) -> None:
        """Adds a step; `before` is what was `recent` before it."""
        self._steps.append((announced, before or self.recent))

    def take(self) -> Announced:
        """Removes and returns the next step."""
        return self._steps.popleft()[0]

    def forget(self) -> None:
        """Forgets all steps: what is recent is what was before them."""
        if self._steps:
            self.recent = self._steps[0][1]
        self._steps.clear()
