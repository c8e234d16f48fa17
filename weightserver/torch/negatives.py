"""The classes of a step: the batch's own, recent ones, and uniformly sampled ones.

Uniform negatives are sampled in whole blocks of rows, as the weight servers store them, so that scattered rows cost
what neighbouring rows cost. Of M blocks, n are drawn without replacement, all subsets equally likely. Then

- a row that is not in the batch is active with probability n/M, whatever its block and the batch. So M/n times the sum
  of exp(logit) over the sampled rows is an unbiased estimate of the sum over all rows, as if rows were drawn singly.
- The estimate's variance is M²/n · (1 − n/M) · s², s² being the variance of the blocks' sums. Compared with single rows
  it is larger by Kish's design effect 1 + (R−1)·ρ, R being the rows of a block and ρ the correlation of exp(logit)
  within blocks (Kish, Survey Sampling, 1965). Rows in a random order (`RowOrder`, `ClassOrder`) have ρ ≈ 0; rows sorted
  by similarity would have ρ near 1, and R times the variance.

The uniform scheme is Partial FC's (An et al., 2021), whose rows are sampled singly.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.core.initial import derive_seed, splitmix64
from weightserver.torch.recency import ActiveRows, RecentRows
from weightserver.torch.windows import RowOrder, Visits

Negatives = Literal["recent", "uniform", "both"]
NEGATIVES: tuple[Negatives, ...] = ("recent", "uniform", "both")

_NEGATIVES = 7
"""The purpose of a seed's numbers (see `windows`)."""
_SORTED_BLOCKS = 1 << 12
"""Up to so many blocks, those with the smallest hashes are drawn: `RowOrder` is slightly biased for few numbers."""


class ActiveSource(Protocol):
    """Where the active rows of a step come from."""

    def active(self, step: int) -> ActiveRows:
        """The active rows of a step ≥ 0, and each visit's place among them."""


class BlockSampler:
    """Samples whole blocks of rows uniformly without replacement, each step anew: a pure function of (seed, step).

    The blocks of a step are the first of a keyed permutation of all blocks, so memory does not grow with the table.

    Args:
        num_rows: rows of the table; the last block may be smaller than the others.
        num_sampled: most rows to sample in a step, at least one block.

    Raises:
        ValueError: fewer rows to sample than a block has.
    """

    def __init__(self, *, num_rows: int, rows_per_block: int, num_sampled: int, seed: int) -> None:
        self._num_rows = num_rows
        self._rows_per_block = rows_per_block
        self._seed = derive_seed(seed, _NEGATIVES)
        self.num_blocks = -(-num_rows // rows_per_block)
        """M, the blocks of the table."""
        self.num_sampled_blocks = min(self.num_blocks, num_sampled // rows_per_block)
        """n, the blocks of a step."""
        if self.num_sampled_blocks < 1:
            raise ValueError(
                f"--num-negatives leaves {num_sampled} rows to sample, less than a block of {rows_per_block}: "
                "choose more, or smaller blocks by --rows-per-block"
            )

    def rows(self, step: int) -> Int64Array:
        """The sampled rows of a step, strictly increasing int64 [n·R or less]."""
        blocks = np.sort(self._blocks(derive_seed(self._seed, step)))
        rows = (blocks[:, None] * self._rows_per_block + np.arange(self._rows_per_block)).reshape(-1)
        return rows[: np.searchsorted(rows, self._num_rows)]

    def _blocks(self, seed: int) -> Int64Array:
        """n of the M blocks, in any order."""
        if self.num_blocks > _SORTED_BLOCKS:
            return RowOrder(self.num_blocks, seed).images(np.arange(self.num_sampled_blocks))
        hashes = splitmix64(seed, np.arange(self.num_blocks, dtype=np.uint64))
        return np.argsort(hashes)[: self.num_sampled_blocks]


class AllRows:
    """Every row in every step: K = C, the full softmax."""

    def __init__(self, visits: Visits, batch_size: int) -> None:
        self._visits = visits
        self._batch_size = batch_size

    def active(self, step: int) -> ActiveRows:
        """All rows, and those of the batch."""
        batch = self._visits.visits(step * self._batch_size, (step + 1) * self._batch_size)
        return ActiveRows(np.arange(self._visits.num_rows), batch)


class BatchRows:
    """The batch's own rows, without negatives."""

    def __init__(self, visits: Visits, batch_size: int) -> None:
        self._visits = visits
        self._batch_size = batch_size

    def active(self, step: int) -> ActiveRows:
        """The distinct rows of the batch."""
        batch = self._visits.visits(step * self._batch_size, (step + 1) * self._batch_size)
        rows, labels = np.unique(batch, return_inverse=True)
        return ActiveRows(rows, labels)


class WithSampledRows:
    """The rows of another source, and uniformly sampled ones; a row of both counts once."""

    def __init__(self, own: ActiveSource, sampler: BlockSampler) -> None:
        self._own = own
        self._sampler = sampler

    def active(self, step: int) -> ActiveRows:
        """At most K rows: fewer where sampled rows are among the others, or are those of a smaller last block."""
        return with_rows(self._own.active(step), self._sampler.rows(step))


def with_rows(active: ActiveRows, more: Int64Array) -> ActiveRows:
    """Adds rows (strictly increasing int64 [n]) as negatives; those that are active already count once."""
    rows = np.union1d(active.rows, more)
    return ActiveRows(rows, np.searchsorted(rows, active.rows)[active.labels])


def active_source(
    visits: Visits,
    *,
    negatives: Negatives,
    num_active: int,
    batch_size: int,
    rows_per_block: int,
    recent_share: float = 0.5,
    seed: int = 0,
) -> ActiveSource:
    """The K = `num_active` classes of each step, or slightly fewer; batch t is visits t·B … t·B+B−1.

    recent: the K most recently visited rows, the batch's own included. uniform: the batch's own rows and uniformly
    sampled blocks. both: round(recent_share · K) most recent rows, and sampled blocks. If K is all rows, every row is
    active in every step.

    Raises:
        ValueError: K is too small or too large, or a share outside 0..1.
    """
    if negatives not in NEGATIVES:
        raise ValueError(f"--negatives must be {', '.join(NEGATIVES[:-1])} or {NEGATIVES[-1]}, got {negatives}")
    if negatives == "recent" or num_active >= visits.num_rows:
        recent = RecentRows(visits, num_active=num_active, batch_size=batch_size)  # checks the sizes
        return AllRows(visits, batch_size) if num_active == visits.num_rows else recent
    own_rows = min(batch_size, visits.num_rows)
    if negatives == "uniform":
        own: ActiveSource = BatchRows(visits, batch_size)
    else:
        if not 0 < recent_share < 1:
            raise ValueError(
                f"--recent-share must lie between 0 and 1, got {recent_share:g}: "
                "for one kind only, give --negatives recent or uniform"
            )
        own_rows = round(recent_share * num_active)
        if own_rows < min(batch_size, visits.num_rows):
            raise ValueError(
                f"--recent-share {recent_share:g} of --num-negatives {num_active} is {own_rows} rows, but a batch may "
                f"contain {batch_size} classes: choose more of either"
            )
        own = RecentRows(visits, num_active=own_rows, batch_size=batch_size)
    sampler = BlockSampler(
        num_rows=visits.num_rows, rows_per_block=rows_per_block, num_sampled=num_active - own_rows, seed=seed
    )
    return WithSampledRows(own, sampler)
