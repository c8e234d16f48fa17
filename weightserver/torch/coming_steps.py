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
        self._steps: deque[tuple[Announced, tuple[Int64Array, Int64Array]]] = deque()  # with what was recent before

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
        recent = self._recent_rows(sampler)

        def announced(step: int) -> Announced:
            ids = sampler.images_of_step(step).reshape(sampler.batches_per_step, -1)
            return self._shared(recent.active(step), ids)

        return announced

    def of_batches(self, step: int, ids: Int64Array) -> Announced:
        """The next step, of these classes: int64 (A, B)."""
        if self._sampled is not None:
            sampler, recent = self._sampled
            if np.array_equal(sampler.images_of_step(step), ids.ravel()):
                return self._shared(recent.active(step), ids)
        rows, (_, last_visit) = self._order.rows(ids.ravel()), self.recent
        self._recent.add(rows, int(last_visit.max(initial=-1)) + 1)
        return self._shared(self._recent.active(rows), ids)

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
