"""The K most recent distinct rows, compared with a walk back through the stream."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recent import recent_rows
from weightserver.torch import VisitSchedule, visited_before
from weightserver.torch.ranks import RowOwners
from weightserver.torch.recency import ActiveRows, Visited


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
        assert np.array_equal(visited.rows, active.rows)
        again = visited_before(schedule.visits, (step + 1) * batch_size, num_active=num_active)
        assert np.array_equal(visited.last_visit, again.last_visit)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_rows_that_leave_are_those_visited_longest_ago(data: st.DataObject) -> None:
    """However far apart the visits are; and each rank has its part of the rows and of the visits."""
    visits = data.draw(st.lists(st.integers(0, 2**50), min_size=1, max_size=30, unique=True), label="last visits")
    batch = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=len(visits)), label="batch")
    before = Visited(np.arange(len(visits)) * 2, np.array(visits))
    after = before.followed_by(np.array(batch), num_active=len(visits))

    last = dict(zip(before.rows.tolist(), visits, strict=True))
    last |= {row: max(visits) + 1 + number for number, row in enumerate(batch)}
    newest = sorted(last.items(), key=lambda visited: visited[1])[-len(visits) :]
    assert list(zip(after.rows.tolist(), after.last_visit.tolist(), strict=True)) == sorted(newest)

    active, num_ranks = after.active(np.array(batch)), data.draw(st.integers(1, 3), label="ranks")
    active = ActiveRows(active.rows, np.append(active.labels, -1))
    owners = RowOwners(5, data.draw(st.integers(1, 3), label="shards"), num_ranks)
    for rank in range(num_ranks):
        mine, of_rank = active.share(owners, rank), owners.rank_of(active.rows) == rank
        assert mine.rows.tolist() == active.rows[of_rank].tolist()
        for label, own in zip(active.labels, mine.labels, strict=True):
            assert own == (-1 if label < 0 or not of_rank[label] else list(mine.rows).index(active.rows[label]))


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
