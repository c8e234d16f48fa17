"""Compares training with rows on weight servers with plain SGD over all rows."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.wire import announced
from tests.helpers.dense_sgd import state_of
from tests.helpers.recent import recent_rows
from tests.integration.tables import begin
from trainer.schedule import learning_rates
from weightserver import LocalCluster, RowState, TableSpec, WeightClient
from weightserver.torch import VisitSchedule
from weightserver.torch.loss import Loss
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import DenseRows, RemoteRows, ResidentRows, RowStore

BATCH_SIZE, DIM, NUM_ROWS = 8, 16, 300
SCHEDULE = VisitSchedule(num_rows=NUM_ROWS, window_size=80, window_stride=20, seed=5)


@dataclass
class Recorded:
    losses: npt.NDArray[np.float64]  # (steps,)
    feature_gradients: list[npt.NDArray[np.float32]]  # (B, D) each
    rows: RowState  # all N


def replay(store: RowStore, num_active: int, num_steps: int, schedule: VisitSchedule = SCHEDULE) -> Recorded:
    """Trains the rows on fixed features that are functions of the image and the step."""
    steps = (recent_rows(schedule, step, num_active=num_active, batch_size=BATCH_SIZE) for step in range(num_steps))
    centres = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(2)
    losses, feature_gradients = [], []
    for step, active in enumerate(announced(steps, store)):
        visited = torch.from_numpy(active.rows[active.labels])
        features = (centres[visited] + 0.5 * torch.randn(BATCH_SIZE, DIM, generator=noise)).requires_grad_()
        weight = store.weights(active.rows, step=step).requires_grad_()
        loss = Loss()(features, weight, torch.from_numpy(active.labels))
        loss.backward()
        assert weight.grad is not None
        assert features.grad is not None
        store.apply_gradients(active.rows, weight.grad, step=step)
        losses.append(loss.item())
        feature_gradients.append(features.grad.numpy())
    return Recorded(np.array(losses), feature_gradients, all_rows(store, num_steps))


def all_rows(store: RowStore, step: int) -> RowState:
    """After `step` updates."""
    if isinstance(store, DenseRows):
        return state_of(store)
    assert isinstance(store, RemoteRows | ResidentRows)
    store.flush()
    return store._client.fetch_state(np.arange(NUM_ROWS), step=step)


def relative(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest ‖Δ‖/‖row‖."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=1)).max())


class SlowClient:
    """A client whose fetches and writes take random times."""

    def __init__(self, client: WeightClient, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self.require_session = client.require_session

    def fetch_state(self, *arguments: Any, **options: Any) -> RowState:
        time.sleep(self._random.choice([0, 0, 0.001, 0.01]))
        return self._client.fetch_state(*arguments, **options)

    def write_state(self, *arguments: Any) -> None:
        time.sleep(self._random.choice([0, 0, 0.001, 0.01]))
        self._client.write_state(*arguments)


@contextmanager
def remote(cluster: LocalCluster, spec: TableSpec, rates: npt.NDArray[np.float32]) -> Iterator[RemoteRows]:
    with fresh_table(cluster, spec, rates) as client:
        store = RemoteRows(client)
        yield store
        store.close()


@contextmanager
def resident(
    cluster: LocalCluster,
    spec: TableSpec,
    rates: npt.NDArray[np.float32],
    *,
    capacity: int,
    prefetch_steps: int,
    write_back_rows: int = 20,
    delays: int | None = None,
) -> Iterator[ResidentRows]:
    with fresh_table(cluster, spec, rates) as client:
        store = ResidentRows(
            client if delays is None else cast(WeightClient, SlowClient(client, delays)),
            spec,
            LearningRates(spec, rates),
            capacity=capacity,
            prefetch_steps=prefetch_steps,
            write_back_rows=write_back_rows,
            device=torch.device("cpu"),
        )
        yield store
        store.close()


@contextmanager
def fresh_table(cluster: LocalCluster, spec: TableSpec, rates: npt.NDArray[np.float32]) -> Iterator[WeightClient]:
    with WeightClient(cluster.addresses) as client:
        client.drop_table()
        begin(client, spec, rates)
        yield client
        client.drop_table()


def table(*, correction: bool = True) -> TableSpec:
    return TableSpec(num_rows=NUM_ROWS, dim=DIM, weight_decay=1e-3, rows_per_block=7, correction=correction)


def assert_alike(actual: Recorded, dense: Recorded) -> None:
    assert dense.losses[-50:].mean() < 0.6 * dense.losses[:50].mean(), "the rows learned nothing: this shows nothing"
    assert np.abs(actual.losses / dense.losses - 1).max() <= 1e-5
    for gradients, expected in zip(actual.feature_gradients, dense.feature_gradients, strict=True):
        assert np.linalg.norm(gradients - expected) <= 1e-5 * np.linalg.norm(expected)
    assert relative(actual.rows.weight, dense.rows.weight) <= 1e-5
    assert relative(actual.rows.momentum_buffer, dense.rows.momentum_buffer) <= 1e-5


def assert_same_bits(actual: Recorded, expected: Recorded) -> None:
    assert np.array_equal(actual.losses, expected.losses)
    assert np.array_equal(actual.rows.weight, expected.rows.weight)
    assert np.array_equal(actual.rows.momentum_buffer, expected.rows.momentum_buffer)


@pytest.mark.parametrize(
    ("num_active", "correction", "num_steps"),
    [
        pytest.param(60, True, 250, id="K<N", marks=pytest.mark.guard),
        pytest.param(NUM_ROWS, True, 400, id="K=N", marks=pytest.mark.slow),
        pytest.param(60, False, 250, id="no correction", marks=pytest.mark.slow),
        pytest.param(60, True, 2_000, id="K<N, long", marks=pytest.mark.slow),
        pytest.param(NUM_ROWS, True, 2_000, id="K=N, long", marks=pytest.mark.slow),
    ],
)
def test_remote_and_resident_rows_train_like_dense_ones(
    cluster: LocalCluster, num_active: int, correction: bool, num_steps: int
) -> None:
    """The window passes over all images several times; without correction only active rows move."""
    spec = table(correction=correction)
    rates = learning_rates(num_steps=num_steps, base=0.5, warmup_steps=num_steps // 10)
    dense = replay(DenseRows(spec, LearningRates(spec, rates)), num_active, num_steps)
    with remote(cluster, spec, rates) as store:
        fetched = replay(store, num_active, num_steps)
    assert_alike(fetched, dense)
    capacity = min(NUM_ROWS, max(80, num_active) + 2 * 20)
    with resident(cluster, spec, rates, capacity=capacity, prefetch_steps=4) as store:
        kept = replay(store, num_active, num_steps)
        entered = num_steps * BATCH_SIZE / 80 * 20 + capacity
        assert store.counters.fetched_rows <= min(entered, NUM_ROWS if capacity == NUM_ROWS else entered)
    assert_alike(kept, dense)
    assert_same_bits(kept, fetched)  # on a CPU a row's way changes nothing at all


@pytest.mark.parametrize(
    ("window_size", "window_stride", "num_active", "capacity", "prefetch_steps"),
    [
        pytest.param(80, 20, 60, 60, 0, id="K = capacity", marks=pytest.mark.slow),
        pytest.param(83, 19, 60, 121, 4, id="batches straddle windows", marks=pytest.mark.slow),
        pytest.param(5, 2, 40, 60, 3, id="a batch holds rows twice", marks=pytest.mark.guard),
        pytest.param(40, 40, 100, 200, 4, id="K > W = S", marks=pytest.mark.slow),
        pytest.param(290, 7, 60, NUM_ROWS, 4, id="windows wrap around at N"),
        pytest.param(NUM_ROWS, NUM_ROWS, 60, 92, 4, id="epoch order, few resident", marks=pytest.mark.guard),
        pytest.param(NUM_ROWS, NUM_ROWS, NUM_ROWS, NUM_ROWS, 4, id="K = W = N", marks=pytest.mark.guard),
    ],
)
def test_timing_changes_no_bit(
    cluster: LocalCluster, window_size: int, window_stride: int, num_active: int, capacity: int, prefetch_steps: int
) -> None:
    """Random delays of fetches and writes change nothing, whatever the schedule; rows return repeatedly."""
    num_steps = 250
    schedule = VisitSchedule(num_rows=NUM_ROWS, window_size=window_size, window_stride=window_stride, seed=5)
    rates = learning_rates(num_steps=num_steps, base=0.5, warmup_steps=25)
    dense = replay(DenseRows(table(), LearningRates(table(), rates)), num_active, num_steps, schedule)
    runs = []
    for delays in (None, 1):
        with resident(
            cluster, table(), rates, capacity=capacity, prefetch_steps=prefetch_steps, delays=delays
        ) as store:
            runs.append(replay(store, num_active, num_steps, schedule))
    assert relative(runs[0].rows.weight, dense.rows.weight) <= 1e-5
    assert relative(runs[0].rows.momentum_buffer, dense.rows.momentum_buffer) <= 1e-5
    assert_same_bits(runs[1], runs[0])
