"""Tables of bfloat16 on real shards: their error, and what stays the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.comparing import same
from tests.helpers.rounding_model import ROUNDING_ERROR, RoundedRows
from tests.helpers.row_model import schedule
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.core.initial import initial_rows

SPEC = TableSpec(num_rows=120, dim=12, weight_decay=1e-3, rows_per_block=5, seed=3, dtype="bfloat16")
ROWS = np.arange(SPEC.num_rows)


def begin(client: WeightClient, spec: TableSpec = SPEC, num_steps: int = 200) -> npt.NDArray[np.float32]:
    """Makes the table; returns its learning rates."""
    rates = schedule(num_steps)
    client.create_table(spec)
    client.extend_schedule(0, rates)
    client.open_session("test")
    return rates


def pushes(num_steps: int, seed: int = 0) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]]:
    """Rows, gradients and step: some rows in every step, others after gaps, the last ten never."""
    generator = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = np.sort(np.concatenate([generator.choice(20, 10, False), 20 + generator.choice(90, 4, False)]))
        yield rows, generator.standard_normal((len(rows), SPEC.dim)).astype(np.float32), step


@pytest.mark.guard  # seconds
def test_rows_follow_sgd_within_the_error_model(client: WeightClient) -> None:
    """No error beyond the sum of all roundings, and, rounded fairly, none that grows faster than their square root."""
    model = RoundedRows(SPEC, begin(client))
    for rows, gradients, step in pushes(100):
        client.push_gradients(rows, gradients, step=step)
        model.push(rows, gradients, step)
    state = client.fetch_state(ROWS, step=120)
    deviations = model.check(state, 120)
    assert (state.last_step == 120).all()
    assert np.array_equal(client.fetch(ROWS, step=120), state.weight), "one state is rounded in one way"
    touched = deviations[:110]
    assert 0.2 < np.sqrt((touched**2).mean()) < 1
    assert abs(touched.mean()) < 5 / touched[:, 0].size ** 0.5, "the roundings are unbiased"
    relative = np.linalg.norm(state.weight - model.exact[:, 0], axis=1) / np.linalg.norm(model.exact[:, 0], axis=1)
    assert relative.max() < 0.1
    assert np.median(relative) < 5 * ROUNDING_ERROR


@pytest.mark.guard
def test_pushes_commute_up_to_rounding(client: WeightClient) -> None:
    """Two writers, and pushes that arrive late, in any order, also behind later updates of the same row."""
    model = RoundedRows(SPEC, begin(client))
    waiting = [*pushes(60, seed=1), *pushes(60, seed=2)]
    generator = np.random.default_rng(0)
    while waiting:
        some, waiting = waiting[:20], waiting[20:]
        for index in generator.permutation(len(some)):
            rows, gradients, step = some[index]
            client.push_gradients(rows, gradients, step=step)
            model.push(rows, gradients, step)
    model.check(client.fetch_state(ROWS, step=70), 70)


def test_raw_state_goes_around_unchanged_and_a_fetch_never_writes(client: WeightClient) -> None:
    begin(client)
    for rows, gradients, step in pushes(20):
        client.push_gradients(rows, gradients, step=step)
    before, info = client.fetch_state(ROWS), client.describe()
    assert info.spec == SPEC
    for step in (20, 47, 200):
        fetched = client.fetch_state(ROWS, step=step)
        assert same(client.fetch_state(ROWS, step=step), fetched)
    assert same(client.fetch_state(ROWS), before)
    assert replace(client.describe(), holder=info.holder) == info  # the holder's age is told in whole seconds
    client.write_state(ROWS, before.weight, before.momentum_buffer, before.last_step)
    assert same(client.fetch_state(ROWS), before)
    never = before.last_step == 0
    assert np.array_equal(before.weight[never], initial_rows(SPEC, ROWS[never]))


def test_float32_state_is_rounded_once_on_its_way(client: WeightClient) -> None:
    """A write that is repeated, or another client's, stores the same bits; no finite value becomes infinite."""
    begin(client)
    values = np.random.default_rng(0).standard_normal((2, SPEC.num_rows, SPEC.dim)).astype(np.float32)
    values[0, :5, 0] = np.array([3.4e38, -3.4e38, 1e-40, -0.0, 0.0])
    client.write_state(ROWS, values[0], values[1], 7)
    stored = client.fetch_state(ROWS)
    for array, found in zip(values, (stored.weight, stored.momentum_buffer), strict=True):
        error = np.abs(found.astype(np.float64) - array)
        assert (error <= np.maximum(ROUNDING_ERROR * np.abs(array.astype(np.float64)), 2.0**-133)).all()
    shuffled = np.random.default_rng(1).permutation(SPEC.num_rows)
    client.write_state(shuffled, values[0, shuffled], values[1, shuffled], 7)
    assert same(client.fetch_state(ROWS), stored)
    client.write_state(ROWS, values[0], values[1], 8)
    assert not np.array_equal(client.fetch_state(ROWS).weight, stored.weight), "another step, other random bits"
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="gradients must be finite"):
            client.push_gradients([3], np.full((1, SPEC.dim), bad, np.float32), step=9)


@pytest.mark.guard
def test_shards_and_kills_change_no_bit(tmp_path: Path) -> None:
    """Any number of shards; one killed between pushes."""
    results = []
    for num_shards in (1, 3):
        directory = tmp_path / str(num_shards)
        with LocalCluster(num_shards, directory) as cluster, WeightClient(cluster.addresses) as client:
            begin(client)
            for rows, gradients, step in pushes(40):
                client.push_gradients(rows, gradients, step=step)
                if step == 25:
                    cluster.processes[0].kill()
                    cluster.restart(0)
            client.checkpoint("kept", step=40)
            results += [client.fetch_state(ROWS), client.fetch_state(ROWS, step=40)]
    assert same(results[0], results[2])
    assert same(results[1], results[3])
