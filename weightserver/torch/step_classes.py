"""The rows of the classes of a head's steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.ranks import Ranks
from weightserver.torch.recency import ActiveRows, Visited, visited_before
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.table import Table
from weightserver.torch.windows import RangesOrder


@dataclass(frozen=True)
class Announced(ActiveRows):
    """The classes of one step that was announced. Rows are those of this rank."""

    ids: Int64Array  # (A, B) or (A, B, P), the classes of each batch of the step, on all ranks together
    before: Visited
    after: Visited

    def has(self, ids: Int64Array, ranks: Ranks) -> bool:
        """Whether a batch of it has these classes on this rank."""
        return any(np.array_equal(of_part[ranks.share(len(of_part))], ids) for of_part in self.ids)


class StepClasses:
    """Which rows a step has: a function of what was recently visited before it, its images' classes and its number.

    What is recent follows from the step before; before the first step that a sampler draws, from the visits that the
    sampler would have made.
    """

    def __init__(self, table: Table, negatives: NegativeSampler, order: RangesOrder) -> None:
        self._table = table
        self._negatives = negatives
        self._order = order

    def after(self, before: Visited, step: int, ids: Int64Array, sampler: WindowSampler | None) -> Announced:
        """The step of these classes, int64 (A, B), or (A, B, P) with -1 for none, which the sampler has drawn if one is
        given."""
        flat = ids.reshape(-1, *ids.shape[2:])
        visited = before
        if sampler is not None and before.drawn_by is not sampler:
            visited = self._past(sampler, step)
        if sampler is None:
            rows = self._order.rows(ids[ids >= 0])
        else:
            rows = sampler.rows(step * sampler.step_size, (step + 1) * sampler.step_size)
        recent = None
        if self._negatives.num_recent and not (sampler is not None and self._negatives.takes_all):
            recent = visited.followed_by(rows, num_active=self._negatives.num_recent, owners=self._table.owners)
        active = self._negatives.active(step, rows, recent, self._table.owners)
        labels = np.full(flat.shape, -1)
        labels[flat >= 0] = active.labels
        return Announced(active.rows, labels, ids, before, replace(recent or visited, drawn_by=sampler))

    def _past(self, sampler: WindowSampler, step: int) -> Visited:
        """What was recently visited before a step if the sampler drew all earlier ones."""
        if self._negatives.takes_all or not (num_recent := self._negatives.num_recent):
            return Visited()
        return visited_before(sampler.rows, step * sampler.step_size, num_active=num_recent)
