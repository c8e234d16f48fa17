"""Rows on real shards, through gRPC and LMDB, against dense torch.optim.SGD over the whole matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.dense_sgd import Oracle
from tests.helpers.row_model import assert_rows_close, schedule
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.core.initial import initial_rows


def open_table(client: WeightClient, spec: TableSpec, rates: npt.NDArray[np.float32]) -> int:
    client.create_table(spec)
    client.extend_schedule(0, rates)
    return client.open_session("test")


@pytest.mark.guard
def test_random_subsets_of_several_writers_in_any_order(client: WeightClient, cluster: LocalCluster) -> None:
    """150 steps: repeats within a step, two writers of one epoch, pushes held back and sent late, shuffled."""
    spec = TableSpec(num_rows=400, dim=12, momentum=0.9, weight_decay=1e-3, rows_per_block=5, seed=3)
    num_steps = 150
    rates = schedule(num_steps)
    generator = np.random.default_rng(0)
    oracle = Oracle(spec, rates)
    epoch = open_table(client, spec, rates)
    held: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]] = []
    with WeightClient(cluster.addresses) as other:
        assert other.open_session("test", join=epoch) == epoch
        other.extend_schedule(0, rates)
        for step in range(num_steps):
            total = np.zeros((spec.num_rows, spec.dim))
            for writer in (client, other):
                rows = generator.integers(0, 360, generator.integers(1, 40))  # some twice; 360.. are never pushed
                gradients = generator.standard_normal((len(rows), spec.dim)).astype(np.float32)
                np.add.at(total, rows, gradients.astype(np.float64))
                if generator.random() < 0.3:
                    held.append((rows, gradients, step))
                else:
                    writer.push_gradients(rows, gradients, step=step)
            oracle.step(step, total)
            if len(held) > 20 or step == num_steps - 1:
                for index in generator.permutation(len(held)):
                    rows, gradients, late = held[index]
                    (client, other)[index % 2].push_gradients(rows, gradients, step=late)
                held.clear()
                fetched = client.fetch(np.arange(spec.num_rows), step=step + 1)
                error = np.linalg.norm(fetched - oracle.weight, axis=1) / np.linalg.norm(oracle.weight, axis=1)
                assert error.max() <= 1e-5
    oracle.assert_equals(client.fetch_state(np.arange(spec.num_rows), step=num_steps))
    assert client.describe().rows_stored == np.count_nonzero(client.fetch_state(np.arange(spec.num_rows)).last_step)


def test_a_table_in_the_place_of_a_dropped_one_moves_by_its_own_sgd(client: WeightClient) -> None:
    """Both have the same learning rates; rows of the first were fetched for a step that no write has reached."""
    first = TableSpec(num_rows=20, dim=3, momentum=0.9, weight_decay=0.01, rows_per_block=4, seed=1)
    rates, rows = schedule(12), np.arange(20)
    open_table(client, first, rates)
    client.fetch(rows, step=12)
    client.drop_table()
    spec = replace(first, momentum=0.0, weight_decay=0.1)
    open_table(client, spec, rates)
    gradient = np.ones((20, 3), np.float32)
    client.push_gradients(rows, gradient, step=0)
    oracle = Oracle(spec, rates)
    oracle.step(0, gradient.astype(np.float64))
    for step in range(1, 12):
        oracle.step(step, np.zeros((20, 3)))
    assert_rows_close(client.fetch(rows, step=12), oracle.weight)


def test_rows_can_be_fetched_for_any_step_to_come(client: WeightClient) -> None:
    spec = TableSpec(num_rows=50, dim=4, weight_decay=1e-2, rows_per_block=4)
    rates = schedule(400)
    oracle = Oracle(spec, rates)
    open_table(client, spec, rates)
    rows, gradients = np.arange(10, 30), np.random.default_rng(2).standard_normal((20, 4)).astype(np.float32)
    client.push_gradients(rows, gradients, step=5)
    before = client.describe()
    raw = client.fetch_state(np.arange(50))
    dense = np.zeros((50, 4))
    for step in range(400):
        dense[rows] = gradients if step == 5 else 0
        oracle.step(step, dense)
        if step >= 5 and step % 79 == 0:
            weight = client.fetch(np.arange(50), step=step + 1)
            assert (np.abs(weight - oracle.weight) <= 1e-5 * np.abs(oracle.weight).max()).all()
    oracle.assert_equals(client.fetch_state(np.arange(50), step=400))
    after, again = client.describe(), client.fetch_state(np.arange(50))
    assert (before.rows_stored, before.clock, before.disk_bytes) == (after.rows_stored, after.clock, after.disk_bytes)
    for name in ("weight", "momentum_buffer", "last_step"):  # a fetch never writes
        assert np.array_equal(getattr(raw, name), getattr(again, name))


def test_rows_come_back_in_the_order_asked_for(client: WeightClient) -> None:
    spec = TableSpec(num_rows=100, dim=3, rows_per_block=3)
    open_table(client, spec, schedule(10))
    rows = np.array([99, 3, 3, 0, 50, 99])
    expected = initial_rows(spec, rows)
    assert np.array_equal(client.fetch(rows, step=0), expected)
    out = np.full((6, 3), np.nan, np.float32)
    assert client.fetch(rows, step=0, out=out) is out
    assert np.array_equal(out, expected)
    assert client.fetch([], step=0).shape == (0, 3)


def test_state_written_is_state_read(client: WeightClient) -> None:
    spec = TableSpec(num_rows=1_000, dim=5, rows_per_block=6)
    open_table(client, spec, schedule(50))
    generator = np.random.default_rng(5)
    rows = generator.permutation(1_000)[:700]
    weight, momentum = generator.standard_normal((2, 700, 5)).astype(np.float32)
    last_step = generator.integers(0, 51, 700)
    client.write_state(rows, weight, momentum, last_step)
    state = client.fetch_state(rows)
    assert np.array_equal(state.weight, weight)
    assert np.array_equal(state.momentum_buffer, momentum)
    assert np.array_equal(state.last_step, last_step)
    assert client.describe().rows_stored == 700
    assert client.describe().clock == last_step.max()


def test_a_table_of_a_billion_rows_takes_no_space(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path) as cluster, WeightClient(cluster.addresses) as client:
        open_table(client, TableSpec(num_rows=10**9, dim=128), schedule(100))
        rows = np.array([0, 10**9 - 1])
        assert np.array_equal(client.fetch(rows, step=0), initial_rows(client.describe().spec, rows))
        client.push_gradients(rows[1:], np.ones((1, 128), np.float32), step=3)
        assert client.describe().rows_stored == 1
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "shard-0").iterdir()) < 1 << 20
