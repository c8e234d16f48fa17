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
from tests.integration.tables import begin
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.core.initial import initial_rows

SPEC = TableSpec(num_rows=120, dim=12, weight_decay=1e-3, rows_per_block=5, seed=3, dtype="bfloat16")
ROWS = np.arange(SPEC.num_rows)
RATES = schedule(200)


def pushes(num_steps: int, seed: int = 0) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], int]]:
    """Rows, gradients and step: some rows in every step, others after gaps, the last ten never."""
    generator = np.random.default_rng(seed)
    for step in range(num_steps):
        rows = np.sort(np.concatenate([generator.choice(20, 10, False), 20 + generator.choice(90, 4, False)]))
        yield rows, generator.standard_normal((len(rows), SPEC.dim)).astype(np.float32), step


@pytest.mark.guard
def test_rows_follow_sgd_within_the_error_model(client: WeightClient) -> None:
    """Pushes of two writers, some late and behind later updates of the same row. No error is beyond the sum of all
    roundings, and, rounded fairly, none grows faster than their square root."""
    begin(client, SPEC, RATES)
    model, generator = RoundedRows(SPEC, RATES), np.random.default_rng(0)
    waiting = sorted([*pushes(60, seed=1), *pushes(60, seed=2)], key=lambda push: push[2] + generator.integers(15))
    for rows, gradients, step in waiting:
        client.push_gradients(rows, gradients, step=step)
        model.push(rows, gradients, step)
    state = client.fetch_state(ROWS, step=80)
    deviations = model.check(state, 80)
    assert (state.last_step == 80).all()
    assert np.array_equal(client.fetch(ROWS, step=80), state.weight), "one state is rounded in one way"
    touched = deviations[:110]
    assert 0.2 < np.sqrt((touched**2).mean()) < 1
    assert abs(touched.mean()) < 5 / touched[:, 0].size ** 0.5, "the roundings are unbiased"
    relative = np.linalg.norm(state.weight - model.exact[:, 0], axis=1) / np.linalg.norm(model.exact[:, 0], axis=1)
    assert relative.max() < 0.1
    assert np.median(relative) < 5 * ROUNDING_ERROR


def test_raw_state_goes_around_unchanged_and_a_fetch_never_writes(client: WeightClient) -> None:
    begin(client, SPEC, RATES)
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
    begin(client, SPEC, RATES)
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


def test_rows_of_one_value_fit_messages(client: WeightClient) -> None:
    """Their numbers take more of one than their values."""
    begin(client, replace(SPEC, num_rows=2_400_000, dim=1, rows_per_block=2_048), RATES)
    rows = np.arange(0, 2_400_000, 2)
    client.push_gradients(rows, np.ones((len(rows), 1), np.float32), step=0)
    assert client.describe().rows_stored == len(rows)


@pytest.mark.guard
def test_shards_and_kills_change_no_bit(tmp_path: Path) -> None:
    """Any number of shards; one killed between pushes."""
    results = []
    for num_shards in (1, 3):
        directory = tmp_path / str(num_shards)
        with LocalCluster(num_shards, directory) as cluster, WeightClient(cluster.addresses) as client:
            begin(client, SPEC, RATES)
            for rows, gradients, step in pushes(40):
                client.push_gradients(rows, gradients, step=step)
                if step == 25:
                    cluster.processes[0].kill()
                    cluster.restart(0)
            client.checkpoint("kept", step=40)
            results += [client.fetch_state(ROWS), client.fetch_state(ROWS, step=40)]
    assert same(results[0], results[2])
    assert same(results[1], results[3])
