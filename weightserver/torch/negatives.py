"""The classes of a step: the batch's own, recent ones, and uniformly sampled ones.

Uniform negatives are sampled in whole blocks of rows, as the weight servers store them, so that scattered rows cost
what neighbouring rows cost. Of M blocks, n are drawn without replacement, all subsets equally likely. Then

- a row that is not in the batch is active with probability n/M, whatever its block and the batch. So M/n times the sum
  of exp(logit) over the sampled rows is an unbiased estimate of the sum over all rows, as if rows were drawn singly.
- The estimate's variance is M²/n · (1 − n/M) · s², s² being the variance of the blocks' sums. Compared with single rows
  it is larger by Kish's design effect 1 + (R−1)·ρ, R being the rows of a block and ρ the correlation of exp(logit)
  within blocks (Kish, Survey Sampling, 1965). Rows in a random order (`RowOrder`, `ClassOrder`) that are visited at
  random have ρ ≈ 0; rows sorted by similarity would have ρ near 1, and R times the variance. A sliding window visits
  the rows of a block at about the same time, so that they may have more in common: smaller blocks help there.

The uniform scheme is Partial FC's (An et al., 2021), whose rows are sampled singly.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from weightserver.core.arrays import Int64Array, checked_number
from weightserver.core.errors import ArgumentError
from weightserver.core.splitmix import derive_seed, splitmix64
from weightserver.torch.ranks import ONE_OWNER, RowOwners
from weightserver.torch.recency import ActiveRows, Visited, check_num_active
from weightserver.torch.windows import RowOrder

Negatives = Literal["recent", "uniform", "both"]
NEGATIVES: tuple[Negatives, ...] = ("recent", "uniform", "both")

_NEGATIVES = 7
"""The purpose of a seed's numbers (see `windows`)."""
_SORTED_BLOCKS = 1 << 12
"""Up to this many blocks, those with the smallest hashes are drawn: `RowOrder` is slightly biased for few numbers."""


def sampled_rows(step: int, *, num_rows: int, rows_per_block: int, num_sampled: int, seed: int) -> Int64Array:
    """Samples whole blocks of rows uniformly without replacement, in each step anew: strictly increasing int64 [n·R or
    less], a pure function of (seed, step).

    The blocks of a step are the first of a keyed permutation of all blocks, so memory does not grow with the table.

    Args:
        num_rows: rows of the table; the last block may be smaller than the others.
        num_sampled: most rows to sample, at least one block.
    """
    num_blocks, seed = -(-num_rows // rows_per_block), derive_seed(derive_seed(seed, _NEGATIVES), step)  # M
    num_drawn = min(num_blocks, num_sampled // rows_per_block)  # n
    if num_blocks > _SORTED_BLOCKS:
        blocks = RowOrder(num_blocks, seed).images(np.arange(num_drawn))
    else:
        blocks = np.argsort(splitmix64(seed, np.arange(num_blocks, dtype=np.uint64)))[:num_drawn]
    rows = (np.sort(blocks)[:, None] * rows_per_block + np.arange(rows_per_block)).reshape(-1)
    return rows[: np.searchsorted(rows, num_rows)]


class NegativeSampler:
    """Which rows a step has besides those of its own batch: at most K together. A pure function of (seed, step).

    recent: the K most recently visited rows, the batch's own included. uniform: the batch's own rows and uniformly
    sampled blocks. both: the round(recent_share · K) most recent rows, the batch's own included, and sampled blocks. If
    K is all rows, every row is active in every step.

    A row that is own, recent and sampled counts once, so there are slightly fewer than K rows with uniform and both.

    Raises:
        ValueError: an unknown kind, or a share that is not between 0 and 1.
    """

    def __init__(
        self,
        num_active: int,
        *,
        num_rows: int,
        rows_per_block: int | None,
        kind: Negatives = "recent",
        recent_share: float = 0.5,
        seed: int = 0,
    ) -> None:
        if kind not in NEGATIVES:
            raise ValueError(f"negatives must be {', '.join(NEGATIVES[:-1])} or {NEGATIVES[-1]}, got {kind}")
        if kind == "both" and not 0 < checked_number(recent_share, "recent_share") < 1:
            raise ValueError(
                f"recent_share must lie between 0 and 1, got {recent_share:g}: for one kind only, choose negatives "
                "recent or uniform"
            )
        self.num_active = num_active
        self.num_recent = {"recent": num_active, "uniform": 0, "both": round(recent_share * num_active)}[kind]
        """Number of most recent rows that are active; 0 for the batch's own only."""
        self.rows_per_block = rows_per_block
        """None until the table's is known."""
        self._num_rows = num_rows
        self._seed = seed

    def check(self, num_visits: int) -> None:
        """Raises ArgumentError unless K rows can hold those of `num_visits` visits, and a sampled block besides."""
        check_num_active(self.num_active, self._num_rows, num_visits)
        if self.takes_all or self.num_recent == self.num_active:
            return
        if 0 < self.num_recent < min(num_visits, self._num_rows):
            raise ArgumentError(
                "num_negatives",
                f"is {self.num_active}, of which {self.num_recent} are recent ones, but a batch may contain "
                f"{num_visits} classes: choose more of either",
            )
        if self.rows_per_block is not None and (left := self.num_sampled(num_visits)) < self.rows_per_block:
            raise ArgumentError(
                "num_negatives",
                f"leaves {left} rows to sample, less than a block of {self.rows_per_block}: choose more, or fewer rows "
                "per block",
            )

    def num_sampled(self, num_visits: int) -> int:
        """Most rows that a step of `num_visits` visits samples."""
        if self.takes_all or self.num_recent == self.num_active:
            return 0
        return self.num_active - (self.num_recent or min(num_visits, self._num_rows))

    def active(self, step: int, batch: Int64Array, recent: Visited | None, owners: RowOwners = ONE_OWNER) -> ActiveRows:
        """The active rows of a step with visits to the rows `batch`, int64 [n], which `recent` ends with: this rank's.

        `recent` is None if there are no recent rows to keep (`num_recent` is 0).
        """
        if self.takes_all:
            return ActiveRows.of(owners.mine(np.arange(self._num_rows)), batch, owners)
        rows = owners.mine(np.unique(batch)) if recent is None else recent.held(owners)
        if num_sampled := self.num_sampled(len(batch)):
            assert self.rows_per_block is not None, "the table is open"
            sampled = sampled_rows(
                step,
                num_rows=self._num_rows,
                rows_per_block=self.rows_per_block,
                num_sampled=num_sampled,
                seed=self._seed,
            )
            rows = np.union1d(rows, owners.mine(sampled))
        return ActiveRows.of(rows, batch, owners)

    @property
    def takes_all(self) -> bool:
        """Whether every row is active in every step."""
        return self.num_active >= self._num_rows
