"""Training with the rows on weight servers against training with plain SGD over all rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainer.loss import cosine_softmax_loss
from trainer.recency import RecentRows
from trainer.rows import DenseRows, RemoteRows, RowStore
from trainer.schedule import VisitSchedule, learning_rates
from weightserver import LocalCluster, RowState, TableSpec, WeightClient

BATCH_SIZE, DIM, NUM_ROWS = 8, 16, 300
SCHEDULE = VisitSchedule(num_rows=NUM_ROWS, window_size=80, window_stride=20, seed=5)


@dataclass
class Recorded:
    losses: npt.NDArray[np.float64]  # (steps,)
    feature_gradients: list[npt.NDArray[np.float32]]  # (B, D) each
    rows: RowState  # all N


def replay(store: RowStore, num_active: int, num_steps: int) -> Recorded:
    """Trains the rows on features that are functions of the image and the step, as an encoder's would be, but fixed."""
    recent = RecentRows(SCHEDULE, num_active=num_active, batch_size=BATCH_SIZE)
    centres = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(2)
    losses, feature_gradients = [], []
    for step in range(num_steps):
        active = recent.active(step)
        store.prefetch(active.rows, step=step)
        visited = torch.from_numpy(active.rows[active.labels])
        features = (centres[visited] + 0.5 * torch.randn(BATCH_SIZE, DIM, generator=noise)).requires_grad_()
        weight = store.weights(active.rows, step=step).requires_grad_()
        loss = cosine_softmax_loss(features, weight, torch.from_numpy(active.labels), temperature=0.2)
        loss.backward()
        store.apply_gradients(active.rows, weight.grad, step=step)
        losses.append(loss.item())
        feature_gradients.append(features.grad.numpy())
    return Recorded(np.array(losses), feature_gradients, store.read_state(np.arange(NUM_ROWS), step=num_steps))


def relative(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """The largest ‖Δ‖/‖row‖."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=1)).max())


@pytest.mark.parametrize(
    ("num_active", "correction", "num_steps"),
    [
        pytest.param(60, True, 2_000, id="K<N"),
        pytest.param(NUM_ROWS, True, 2_000, id="K=N"),
        pytest.param(60, False, 600, id="no correction"),
    ],
)
def test_remote_rows_train_like_dense_ones(
    cluster: LocalCluster, num_active: int, correction: bool, num_steps: int
) -> None:
    """13 passes of the window over all images in 2,000 steps; without correction only active rows move."""
    spec = TableSpec(num_rows=NUM_ROWS, dim=DIM, weight_decay=1e-3, rows_per_block=7, correction=correction)
    rates = learning_rates(num_steps=num_steps, base=0.5, warmup_steps=num_steps // 10)
    dense = replay(DenseRows(spec, rates), num_active, num_steps)
    with WeightClient(cluster.addresses) as client:
        client.drop_table()
        client.create_table(spec)
        client.extend_schedule(0, rates)
        client.open_session("remote")
        store = RemoteRows(client)
        remote = replay(store, num_active, num_steps)
        store.close()
        client.drop_table()
    assert dense.losses[-50:].mean() < 0.6 * dense.losses[:50].mean(), "the rows learned nothing: this shows nothing"
    assert np.abs(remote.losses / dense.losses - 1).max() <= 1e-5
    for actual, expected in zip(remote.feature_gradients, dense.feature_gradients, strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
    assert relative(remote.rows.weight, dense.rows.weight) <= 1e-5
    assert relative(remote.rows.momentum_buffer, dense.rows.momentum_buffer) <= 1e-5
