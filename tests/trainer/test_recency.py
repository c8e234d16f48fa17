"""The K most recent distinct rows, compared with a walk back through the stream."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recent import recent_rows
from weightserver.torch import VisitSchedule
from weightserver.torch.ranks import RowOwners
from weightserver.torch.recency import ActiveRows, Visited, visited_before


def walk_back(schedule: VisitSchedule, stop: int, num_active: int) -> list[int]:
    seen: list[int] = []
    visit = stop
    while len(seen) < num_active:
        visit -= 1
        row = int(schedule.visits(visit, visit + 1)[0])
        if row not in seen:
            seen.append(row)
    return sorted(seen)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_active_rows(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 40), label="N")
    window_size = data.draw(st.integers(1, num_rows), label="W")
    stride = data.draw(st.integers(1, window_size), label="S")
    batch_size = data.draw(st.integers(1, 12), label="B")  # may straddle windows, and hold a row twice
    num_active = data.draw(st.integers(min(batch_size, num_rows), num_rows), label="K")
    schedule = VisitSchedule(num_rows=num_rows, window_size=window_size, window_stride=stride, seed=1)
    visited = visited_before(schedule.visits, 0, num_active=num_active)
    for step in range(12):
        batch = schedule.visits(step * batch_size, (step + 1) * batch_size)
        visited = visited.followed_by(batch, num_active=num_active)
        active = recent_rows(schedule, step, num_active=num_active, batch_size=batch_size)
        assert active.rows.tolist() == walk_back(schedule, (step + 1) * batch_size, num_active)
        assert np.array_equal(active.rows[active.labels], batch)
        assert np.array_equal(visited.held(), active.rows)
        again = visited_before(schedule.visits, (step + 1) * batch_size, num_active=num_active)
        assert np.array_equal(visited.settled().last_visit, again.last_visit)


@given(
    seed=st.integers(0, 2**32),
    num_active=st.integers(1, 100),
    gap=st.integers(1, 2**40),
    num_shards=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_the_rows_that_leave_are_those_visited_longest_ago(
    seed: int, num_active: int, gap: int, num_shards: int, num_ranks: int
) -> None:
    """However far apart the visits are; and each rank has its part of the rows and of the visits. What was recent
    before a step stays as it was, so that steps can be forgotten."""
    generator = np.random.default_rng(seed)
    visits, rows = generator.permutation(num_active) * gap, np.arange(num_active) * 2
    all_owners = [RowOwners(5, num_shards, num_ranks, rank) for rank in range(num_ranks)]
    of_ranks = [Visited(rows, visits) for _ in all_owners]
    last = dict(zip(rows.tolist(), visits.tolist(), strict=True))
    before = []
    for _ in range(12):
        batch = generator.integers(0, 3 * num_active, generator.integers(1, 2 + num_active // 9))
        before += [(visited, dict(last)) for visited in of_ranks]
        newest = max(last.values())
        last |= {row: newest + 1 + number for number, row in enumerate(batch.tolist())}
        last = dict(sorted(last.items(), key=lambda item: item[1])[-num_active:])
        active = np.array(sorted(last))
        for rank, owners in enumerate(all_owners):
            of_ranks[rank] = visited = of_ranks[rank].followed_by(batch, num_active=num_active, owners=owners)
            mine = ActiveRows.of(visited.held(owners), batch, owners)
            of_rank = owners.rank_of(active) == rank
            assert mine.rows.tolist() == active[of_rank].tolist()
            for row, label in zip(batch, mine.labels, strict=True):
                assert label == (list(mine.rows).index(row) if owners.rank_of(row) == rank else -1)
    for visited, of_rows in [*before, *((visited, last) for visited in of_ranks)]:
        settled = visited.settled()
        assert list(zip(settled.rows.tolist(), settled.last_visit.tolist(), strict=True)) == sorted(of_rows.items())


def test_a_long_walk_back_takes_little_memory() -> None:
    """With a small stride the K-th most recent row is far back: here 10⁶ visits, which would take 8 MB."""
    schedule = VisitSchedule(num_rows=10**9, window_size=1_000, window_stride=2, seed=4)
    tracemalloc.start()
    active = recent_rows(schedule, 0, num_active=3_000, batch_size=1_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    newest = (np.arange(-2_000, 1_000)) % 10**9  # windows reach back by their strides, all of them whole
    assert np.array_equal(active.rows, np.sort(newest))
    assert peak < 4e6
