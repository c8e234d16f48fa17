"""The classes of a step, compared with sets; and the statistics of sampling rows in blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recent import recent_rows
from weightserver.torch.negatives import NEGATIVES, Negatives, NegativeSampler, sampled_rows
from weightserver.torch.recency import ActiveRows, visited_before
from weightserver.torch.windows import VisitSchedule

SIGMAS = 4.5
"""Bound of a test statistic in standard deviations: a right sampler exceeds it once in 150,000 times."""


def active_rows(sampler: NegativeSampler, schedule: VisitSchedule, step: int, batch_size: int) -> ActiveRows:
    """Those of a step of a schedule."""
    recent = None
    if sampler.num_recent and not sampler.takes_all:
        recent = visited_before(schedule.visits, (step + 1) * batch_size, num_active=sampler.num_recent)
    return sampler.active(step, schedule.visits(step * batch_size, (step + 1) * batch_size), recent)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_active_rows_are_own_recent_and_sampled_ones(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(10, 60), label="N")
    rows_per_block = data.draw(st.integers(1, 7), label="R")
    batch_size = data.draw(st.integers(1, 5), label="B")
    num_active = data.draw(st.integers(2 * (batch_size + rows_per_block), 40), label="K")
    negatives = data.draw(st.sampled_from(NEGATIVES))
    schedule = VisitSchedule(num_rows=num_rows, window_size=num_rows, window_stride=3, seed=1)
    num_active = min(num_active, num_rows)

    sampler, again = (
        NegativeSampler(num_active, num_rows=num_rows, rows_per_block=rows_per_block, kind=negatives, seed=5)
        for _ in range(2)
    )
    sampler.check(batch_size)
    whole = set(range(num_rows))
    for step in (0, 1, 2, 30, 4):
        active = active_rows(sampler, schedule, step, batch_size)
        batch = schedule.visits(step * batch_size, (step + 1) * batch_size)
        assert np.array_equal(active.rows[active.labels], batch)
        assert (np.diff(active.rows) > 0).all()  # a row that is positive and sampled counts once
        assert set(active.rows.tolist()) <= whole
        assert np.array_equal(active_rows(again, schedule, step, batch_size).rows, active.rows), (
            "not a function of the step"
        )
        if num_active >= num_rows:
            assert len(active.rows) == num_rows
            continue
        assert len(active.rows) <= num_active
        num_recent = {"recent": num_active, "uniform": 0, "both": round(num_active / 2)}[negatives]
        own = set(batch.tolist())
        if num_recent:
            own = set(recent_rows(schedule, step, num_active=num_recent, batch_size=batch_size).rows.tolist())
        sampled = set(active.rows.tolist()) - own
        assert own <= set(active.rows.tolist())
        blocks = {row // rows_per_block for row in sampled}
        of_blocks = {row for row in whole if row // rows_per_block in blocks}
        assert of_blocks <= sampled | own, "blocks are sampled whole"
        assert len(blocks) <= (num_active - (num_recent or min(batch_size, num_rows))) // rows_per_block


@pytest.mark.parametrize("num_blocks", [300, 4_500])  # fewer and more than are sorted
def test_every_row_and_pair_of_blocks_is_sampled_equally_often(num_blocks: int) -> None:
    """Inclusion is Bernoulli(n/M), and two blocks are included together with n(n−1)/(M(M−1)): sums of squares. A sum
    over all rows is estimated without bias, with a variance of M²/n · (1 − n/M) · s²
    (s²: that of the blocks' sums)."""
    steps, share = 600, num_blocks // 10
    of_table = {"num_rows": 3 * num_blocks - 1, "rows_per_block": 3, "num_sampled": 3 * share + 2, "seed": 2}
    counts, pairs = np.zeros(3 * num_blocks - 1), np.zeros(num_blocks - 1)
    values = np.sort(np.exp(np.random.default_rng(0).standard_normal(3 * num_blocks - 1)))  # alike in each block
    deviations = np.zeros(steps)
    for step in range(steps):
        rows = sampled_rows(step, **of_table)
        assert len(rows) in (3 * share, 3 * share - 1)
        counts[rows] += 1
        deviations[step] = num_blocks / share * values[rows].sum() - values.sum()
        blocks = np.unique(rows // 3)
        pairs[blocks[:-1][np.diff(blocks) == 1]] += 1  # neighbours
    probability = share / num_blocks
    z = (counts[::3] - steps * probability) / math.sqrt(steps * probability * (1 - probability))
    degrees = num_blocks - 1  # the counts add up
    assert abs((z**2).sum() * degrees / num_blocks - degrees) <= SIGMAS * math.sqrt(2 * degrees)
    assert np.array_equal(counts[::3][:-1], counts[2::3])
    together = share * (share - 1) / (num_blocks * (num_blocks - 1))
    expected = steps * together * len(pairs)
    assert abs(pairs.sum() - expected) <= SIGMAS * math.sqrt(expected)
    sums = np.add.reduceat(values, range(0, len(values), 3))
    variance = num_blocks**2 / share * (1 - share / num_blocks) * sums.var(ddof=1)
    assert abs(deviations.mean()) <= SIGMAS * math.sqrt(variance / steps)
    assert abs((deviations**2).mean() - variance) <= SIGMAS * (deviations**2).std() / math.sqrt(steps)


@pytest.mark.parametrize(
    ("negatives", "num_active", "share", "message"),
    [
        ("uniform", 10, 0.5, "leaves 2 rows to sample, less than a block of 5: choose more, or fewer rows per block"),
        (
            "both",
            14,
            0.5,
            "num_negatives is 14, of which 7 are recent ones, but a batch may contain 8 classes: choose more",
        ),
        ("both", 20, 0.9, "leaves 2 rows to sample"),
        ("both", 20, 1.0, "recent_share must lie between 0 and 1, got 1: .* choose negatives recent or uniform"),
        ("recent", 101, 0.5, "only 100"),
        ("uniform", 101, 0.5, "only 100"),
        ("hard", 50, 0.5, "negatives must be recent, uniform or both, got hard"),
    ],
)
def test_impossible_sizes_are_refused(negatives: Negatives, num_active: int, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NegativeSampler(num_active, num_rows=100, rows_per_block=5, kind=negatives, recent_share=share).check(8)
