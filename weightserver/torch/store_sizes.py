"""How many rows a resident store holds, and how far ahead it fetches them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weightserver import TableSpec
from weightserver.core.errors import ArgumentError
from weightserver.torch.class_order import ClassOrder
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.ranks import RowOwners
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.settings import Rows

AHEAD = 2
"""Steps whose batches are loaded in advance if no sampler knows them."""


@dataclass(frozen=True)
class StoreSizes:
    """What a resident store is sized by."""

    capacity: int
    """Rows held on all ranks together."""
    prefetch_steps: int
    write_back_rows: int


def sizes_for_steps(
    step_size: int, sampler: WindowSampler | None, *, spec: TableSpec, rows: Rows, negatives: NegativeSampler
) -> StoreSizes:
    """The sizes for steps of `step_size` images, of the sampler that draws them if there is one.

    Raises:
        ArgumentError: the active rows cannot hold a step's classes, or the capacity is too small for a sampler's.
    """
    negatives.check(step_size)
    if sampler is None:
        good = _rows_in_any_order(spec, negatives, step_size, AHEAD)
        return StoreSizes(rows.capacity or good, AHEAD, max(step_size, spec.rows_per_block))
    ahead = rows.prefetch_steps
    needed, good = _rows_of_sampler(sampler, spec, negatives, step_size, ahead)
    if rows.capacity is not None and rows.capacity < needed:
        raise ArgumentError(
            "capacity",
            f"is {rows.capacity}, but the {ahead} steps that are requested in advance need {needed}: raise "
            "it, or request fewer",
        )
    good = max(good, _rows_in_any_order(spec, negatives, step_size, ahead))  # of other loaders too
    return StoreSizes(rows.capacity or good, ahead, min(sampler.schedule.window_stride, 1 << 14))


def _rows_of_sampler(
    sampler: WindowSampler, spec: TableSpec, negatives: NegativeSampler, step_size: int, prefetch_steps: int
) -> tuple[int, int]:
    """The fewest resident rows for a sampler's steps that are requested `prefetch_steps` in advance, and a good number.

    The good number holds the rows of as many windows as the visits from the current step to the last requested one
    touch, so that no row of a window is fetched twice; where images share classes, recent rows may be far outside the
    window, and it holds twice the fewest. Sampled rows are needed for their step only.
    """
    if negatives.takes_all:
        return spec.num_rows, spec.num_rows
    recent, ahead = negatives.num_recent or step_size, prefetch_steps * step_size
    needed, good = recent + ahead, 2 * (recent + ahead)
    if not isinstance(sampler.order, ClassOrder):
        size, stride = sampler.schedule.window_size, sampler.schedule.window_stride
        windows = 1 + -(-max(0, recent - size) // stride) + -(-ahead // size)
        visited = min(spec.num_rows, size + windows * stride)
        needed, good = min(visited, needed), max(visited, max(size, recent) + 2 * stride)
    sampled = (prefetch_steps + 1) * negatives.num_sampled(step_size)
    return min(spec.num_rows, needed + sampled), min(spec.num_rows, min(spec.num_rows, good) + sampled)


def _rows_in_any_order(spec: TableSpec, negatives: NegativeSampler, step_size: int, prefetch_steps: int) -> int:
    """A good number of rows for steps whose classes come in any order."""
    steps = prefetch_steps + 1
    rows = negatives.num_active + steps * (negatives.num_sampled(step_size) + 2 * step_size)
    return min(spec.num_rows, rows)


def share_of_capacity(rows: int, owners: RowOwners) -> int:
    """A rank's part of `rows` resident rows.

    Blocks are assigned evenly, active ones randomly: room for 8 standard deviations more.
    """
    if owners.num_ranks == 1:
        return rows
    mean = rows / owners.num_ranks
    return min(rows, math.ceil(mean) + owners.surplus + round(8 * math.sqrt(mean)))
