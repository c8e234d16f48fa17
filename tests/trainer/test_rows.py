"""Dense rows compared with torch.optim.SGD written out by hand: they are the oracle of all other stores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tests.helpers.numerics import Rounded, sgd_update
from weightserver import TableSpec
from weightserver.core.initial import initial_rows
from weightserver.torch import DenseRows, LearningRates

NUM_ROWS, DIM, NUM_STEPS = 40, 6, 60
ALL = np.arange(NUM_ROWS)
RATES = np.linspace(0.02, 0.4, NUM_STEPS, dtype=np.float32)


def table(*, correction: bool) -> TableSpec:
    return TableSpec(num_rows=NUM_ROWS, dim=DIM, weight_decay=0.01, correction=correction)


def updates() -> Iterator[tuple[int, np.ndarray, torch.Tensor]]:
    """Step, the active rows (K,) and their gradients (K, D)."""
    generator = np.random.default_rng(0)
    for step in range(NUM_STEPS):
        rows = np.sort(generator.choice(NUM_ROWS, size=12, replace=False))
        yield step, rows, torch.from_numpy(generator.normal(size=(12, DIM)).astype(np.float32))


def test_dense_rows_are_sgd_over_the_whole_matrix() -> None:
    """Idle rows have a zero gradient, not None: weight decay and momentum move them."""
    spec = table(correction=True)
    weight = torch.nn.Parameter(torch.from_numpy(initial_rows(spec, ALL)))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=spec.momentum, weight_decay=spec.weight_decay)
    store = DenseRows(spec, LearningRates(spec, RATES))
    for step, rows, gradients in updates():
        assert torch.equal(store.weights(rows, step=step), weight.detach()[rows])
        store.apply_gradients(rows, gradients, step=step)
        weight.grad = torch.zeros(NUM_ROWS, DIM)
        weight.grad[rows] = gradients
        optimizer.param_groups[0]["lr"] = float(RATES[step])
        optimizer.step()
    state = store.read_state(ALL, step=NUM_STEPS)
    assert np.array_equal(state.weight, weight.detach().numpy())
    assert np.array_equal(state.momentum_buffer, optimizer.state[weight]["momentum_buffer"].numpy())
    assert (state.last_step == NUM_STEPS).all()


def test_without_correction_each_row_is_a_parameter_that_rests() -> None:
    """torch.optim.SGD skips a parameter without a gradient: the paper's ablation, with one parameter per row."""
    spec = table(correction=False)
    weights = [torch.nn.Parameter(torch.from_numpy(row)) for row in initial_rows(spec, ALL)]
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=spec.momentum, weight_decay=spec.weight_decay)
    store = DenseRows(spec, LearningRates(spec, RATES))
    expected = [
        (Rounded.exact(weight, torch.float32), Rounded.exact(np.zeros(DIM), torch.float32)) for weight in weights
    ]
    for step, rows, gradients in updates():
        store.apply_gradients(rows, gradients, step=step)
        optimizer.zero_grad(set_to_none=True)
        for row, gradient in zip(rows, gradients, strict=True):
            weights[row].grad = gradient
            given = Rounded.exact(gradient, torch.float32)
            weight, momentum_buffer = expected[row]
            expected[row] = sgd_update(weight, momentum_buffer, given, learning_rate=float(RATES[step]), spec=spec)
        optimizer.param_groups[0]["lr"] = float(RATES[step])
        optimizer.step()
    state = store.read_state(ALL, step=NUM_STEPS)
    for row, (weight, momentum_buffer) in enumerate(expected):
        weight.assert_near(state.weight[row], f"row {row}")
        weight.assert_near(weights[row], f"parameter {row}")
        momentum_buffer.assert_near(state.momentum_buffer[row], f"row {row}'s momentum buffer")
        momentum_buffer.assert_near(optimizer.state[weights[row]]["momentum_buffer"], f"parameter {row}'s")
        assert (weight.error < 1e-4 * np.abs(weight.value).max()).all(), "a missing term would show"
