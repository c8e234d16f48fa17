"""The stream of visits, compared with a slow implementation of its definition."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dealing import READERS, planned_run, table_of_reads
from trainer.schedule import forward_seed, learning_rates, visit_uniforms
from weightserver.operations.plan import plan
from weightserver.torch import ClassOrder, RangesOrder, Ranks, VisitSchedule, WindowSampler
from weightserver.torch.windows import RowOrder

ROOT = Path(__file__).parents[2]


def test_row_order_mixes() -> None:
    images = RowOrder(100_000, 7).images(np.arange(100_000))
    assert abs(np.corrcoef(images, np.arange(100_000))[0, 1]) < 0.02
    assert (images == RowOrder(100_000, 8).images(np.arange(100_000))).mean() < 0.001
    order, rows = RowOrder(10**9, 3), np.linspace(0, 10**9 - 1, 1_000, dtype=np.int64)  # without a table
    images = order.images(rows)
    assert ((images >= 0) & (images < 10**9)).all()
    assert np.array_equal(order.rows(images), rows)


@given(st.lists(st.integers(1, 200) | st.just(3_000), min_size=1, max_size=5), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_a_new_range_has_an_order_of_its_own_and_moves_no_row_before(sizes: list[int], order_seed: int) -> None:
    total = sum(sizes)
    order = RangesOrder(sizes, order_seed)
    images = order.images(np.arange(total))
    assert np.array_equal(order.rows(images), np.arange(total))
    assert np.array_equal(images[: sizes[0]], RowOrder(sizes[0], order_seed).images(np.arange(sizes[0])))
    first = 0
    for size in sizes:
        assert np.array_equal(np.sort(images[first : first + size]), np.arange(first, first + size))
        first += size
    assert np.array_equal(RangesOrder([*sizes, 7], order_seed).images(np.arange(total)), images)


def test_ranges_of_one_size_are_ordered_differently() -> None:
    images = RangesOrder([1_000, 1_000, 1_000], 5).images(np.arange(3_000)).reshape(3, 1_000) % 1_000
    assert all((images[a] == images[b]).mean() < 0.02 for a, b in ((0, 1), (0, 2), (1, 2)))


sizes = st.tuples(st.integers(1, 60), st.data())


@given(sizes, st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_windows(size: tuple[int, st.DataObject], seed: int) -> None:
    num_rows, data = size
    window_size = data.draw(st.integers(1, num_rows))
    stride = data.draw(st.integers(1, window_size))
    schedule = VisitSchedule(num_rows=num_rows, window_size=window_size, window_stride=stride, seed=seed)
    for window in range(-4, 8):
        visited = schedule.visits(window * window_size, (window + 1) * window_size)
        expected = {(window * stride + offset) % num_rows for offset in range(window_size)}
        assert len(visited) == window_size
        assert set(visited.tolist()) == expected
    start, length = data.draw(st.integers(-200, 200)), data.draw(st.integers(0, 200))
    pieces = [schedule.visits(visit, visit + 1) for visit in range(start, start + length)]
    assert schedule.visits(start, start + length).tolist() == [int(piece[0]) for piece in pieces]


def test_large_windows_do_not_pile_up() -> None:
    """In epoch order a window is as large as the data set."""
    size = 200_000
    schedule = VisitSchedule(num_rows=size, window_size=size, window_stride=size, seed=0)
    tracemalloc.start()
    try:
        for window in range(5):
            schedule.visits(window * size, window * size + 1)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 * 8 * size


def test_visits_may_be_given_as_numpy_integers() -> None:
    """Whose products would overflow."""
    schedule, start = VisitSchedule(num_rows=10**9, window_size=7, window_stride=2, seed=0), 10**15
    visits = schedule.visits(np.int64(start), np.int64(start + 20))  # type: ignore[arg-type]
    assert np.array_equal(visits, schedule.visits(start, start + 20))


def test_windows_are_shuffled_each_in_its_own_way() -> None:
    schedule = VisitSchedule(num_rows=1000, window_size=500, window_stride=500, seed=1)
    first, third = schedule.visits(0, 500), schedule.visits(1000, 1500)  # the same rows
    assert not np.array_equal(first, np.arange(500))
    assert not np.array_equal(first, third)
    other = VisitSchedule(num_rows=1000, window_size=500, window_stride=500, seed=2)
    assert not np.array_equal(first, other.visits(0, 500))


@pytest.mark.parametrize(("window_size", "stride"), [(0, 1), (101, 1), (10, 0), (10, 11)])
def test_impossible_windows_are_refused(window_size: int, stride: int) -> None:
    with pytest.raises(ValueError, match=r"window_(size|stride) must lie in 1\.\."):
        VisitSchedule(num_rows=100, window_size=window_size, window_stride=stride, seed=0)


@given(
    num_nodes=st.integers(1, 4),
    ranks_of_node=st.integers(1, 3),
    batch_size=st.integers(12, 40),
    step=st.integers(0, 50),
    part=st.integers(0, 1),
)
@settings(deadline=None)
def test_ranks_make_the_same_visits_of_a_batch_on_any_number_of_machines(
    num_nodes: int, ranks_of_node: int, batch_size: int, step: int, part: int
) -> None:
    """Each its share. A machine's visits keep their order, and its ranks share them; on one machine all do."""

    def sampler(rank: int, num_nodes: int, world_size: int) -> WindowSampler:
        ranks = Ranks(rank=rank, world_size=world_size, num_nodes=num_nodes)
        settings: dict[str, Any] = {
            "window_size": 200,
            "window_stride": 50,
            "batch_size": batch_size,
            "batches_per_step": 2,
        }
        return WindowSampler(1_000, **settings, ranks=ranks)

    world_size = num_nodes * ranks_of_node
    of_one = sampler(0, 1, 1)
    visits = dict(zip(of_one.visits(step, part), of_one.images(step, part), strict=True))
    dealt = [sampler(rank, num_nodes, world_size) for rank in range(world_size)]
    numbers = [one.visits(step, part) for one in dealt]
    images = [one.images(step, part) for one in dealt]
    shares = [len(range(batch_size)[one.ranks.share(batch_size)]) for one in dealt]
    assert [len(share) for share in numbers] == shares
    together, of_together = np.concatenate(numbers), np.concatenate(images)
    assert sorted(together) == sorted(visits)
    assert [visits[number] for number in together] == of_together.tolist()
    for node in range(num_nodes):
        assert (np.diff(np.concatenate(numbers[node * ranks_of_node : (node + 1) * ranks_of_node])) > 0).all()
    whole = slice(part * batch_size, (part + 1) * batch_size)
    for one in dealt:
        assert np.array_equal(one.classes_of_step(step)[whole], of_together)
    classes = ClassOrder(np.arange(1_000) // 4, 0)  # neighbours share them
    sharing = WindowSampler(classes, batch_size=batch_size, ranks=Ranks(num_nodes=num_nodes))
    assert sharing.visits(0, 0).tolist() == list(range(batch_size))
    if num_nodes == 1:
        assert np.array_equal(together, of_one.visits(step, part))


def test_the_documentation_has_the_simulated_reads() -> None:
    """Of images at most 1.3 times a machine's share at 8 of them, and twice at 128; `plan` counts what is read."""
    lines = table_of_reads()
    assert "\n".join(lines) in (ROOT / "docs/scale.md").read_text(), "python -m benchmarks.dealing"
    for numbers, line in zip(READERS, lines[2:], strict=True):
        images, of_plan, _, segments, segments_of_plan, _ = map(float, line.split("|")[6:-1])
        assert (images, segments) == pytest.approx((of_plan, segments_of_plan), rel=0.12), numbers
        assert images <= {8: 1.3, 128: 2.0}.get(numbers[0], math.inf)
        load = planned_run(*numbers)
        (read,) = (figure.value for figure in plan(load)["images"] if figure.name == "read from a bucket, per node")
        moved = load.image_bytes * load.moved_rows * load.steps_per_second / load.num_nodes
        assert read / moved == pytest.approx(segments, rel=0.12)


def test_uniforms_belong_to_the_visit_alone() -> None:
    """A version that draws more numbers per visit resumes earlier runs with the same ones; all are pinned."""
    visits = np.array([-3, 123_456_789_012, 0, 7, 2**40])
    many = visit_uniforms(3, visits, 32)
    for row, visit in zip(many, visits, strict=True):
        assert np.array_equal(row, visit_uniforms(3, np.array([visit]), 32)[0])
    for count in (1, 12, 13, 14, 26, 27):
        assert np.array_equal(many[:, :count], visit_uniforms(3, visits, count))
    long = visit_uniforms(3, np.arange(20_000), 32)
    assert ((long >= 0) & (long < 1)).all()
    assert abs(long.mean() - 0.5) < 0.005
    assert np.abs(np.corrcoef(long.T) - np.eye(32)).max() < 0.03
    assert np.abs(np.corrcoef(long[1:, :19].ravel(), long[:-1, 13:].ravel())[0, 1]) < 0.01
    assert np.abs(np.corrcoef(long.ravel(), visit_uniforms(4, np.arange(20_000), 32).ravel())[0, 1]) < 0.01
    assert hashlib.sha256(long.astype("<f4").tobytes()).hexdigest() == (
        "2786967135a1cbaa36f4ac647661e174ef355dcf77aeb0397dc5b6b60733ce0c"
    )


def test_each_step_of_each_rank_draws_other_numbers() -> None:
    seeds = {forward_seed(seed, step, rank) for seed in (0, 1) for step in range(20) for rank in range(20)}
    assert len(seeds) == 2 * 20 * 20
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_learning_rates() -> None:
    rates = learning_rates(num_steps=1_000, base=0.6, warmup_steps=100)
    assert rates.dtype == np.float32
    assert rates[0] == np.float32(0.006)
    assert rates[100] == np.float32(0.6)
    assert rates[550] == pytest.approx(0.3, rel=1e-6)
    assert 0 < rates[-1] < 1e-5
    assert (np.diff(rates[:101]) > 0).all()
    assert (np.diff(rates[100:]) < 0).all()
    assert len(learning_rates(num_steps=1, base=0.1, warmup_steps=0)) == 1
    with pytest.raises(ValueError, match="warm-up"):
        learning_rates(num_steps=10, base=0.1, warmup_steps=11)
