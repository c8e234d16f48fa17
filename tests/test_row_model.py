"""The model of rows that tests compare with (tests/helpers/row_model.py), against torch.optim.SGD in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from tests.helpers.dense_sgd import Oracle
from tests.helpers.row_model import RowModel, TableModel, schedule
from weightserver import TableSpec
from weightserver.core.initial import initial_rows

NUM_STEPS = 40


def table(correction: bool | Literal["paper"] = True) -> TableSpec:
    return TableSpec(num_rows=12, dim=5, momentum=0.8, weight_decay=0.05, init_std=1.0, correction=correction)


def test_a_row_follows_sgd_whatever_the_order_of_its_gradients() -> None:
    spec, rates, generator = table(), schedule(NUM_STEPS), np.random.default_rng(0)
    pushes = [(int(step), generator.standard_normal(spec.dim)) for step in generator.integers(0, NUM_STEPS, 30)]
    oracle, model = Oracle(spec, rates), RowModel(spec, rates)
    for step in range(NUM_STEPS):
        gradient = np.zeros((spec.num_rows, spec.dim))
        gradient[3] = sum((gradient for when, gradient in pushes if when == step), np.zeros(spec.dim))
        oracle.step(step, gradient)
    (row,) = model.initial([3])
    for step, gradient in pushes:
        row = model.pushed(row, step, gradient)
    assert row.last_step == 1 + max(step for step, _ in pushes)
    row = model.at(row, NUM_STEPS)
    np.testing.assert_allclose(row.weight, oracle.weight[3], atol=1e-12)
    np.testing.assert_allclose(row.momentum_buffer, oracle.momentum_buffer[3], atol=1e-12)


@pytest.mark.parametrize("correction", [True, False])
def test_a_table_follows_sgd(correction: bool) -> None:
    """With the correction, dense SGD; without it, SGD of one parameter a row, which rests while it has no gradient."""
    spec, rates, generator = table(correction), schedule(NUM_STEPS), np.random.default_rng(1)
    parameters = [torch.nn.Parameter(torch.from_numpy(row).double()) for row in initial_rows(spec, np.arange(12))]
    optimizer = torch.optim.SGD(parameters, momentum=spec.momentum, weight_decay=spec.weight_decay)
    model = TableModel(spec, rates)
    for step in range(NUM_STEPS):
        rows, gradients = generator.choice(9, 4, replace=False), generator.standard_normal((4, spec.dim))
        model.update(rows, gradients, step)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if correction else None
        for row, gradient in zip(rows, gradients, strict=True):
            parameters[row].grad = torch.from_numpy(gradient)
        optimizer.param_groups[0]["lr"] = float(rates[step])
        optimizer.step()
    weight, _ = model.at(np.arange(spec.num_rows), NUM_STEPS)
    np.testing.assert_allclose(weight, torch.stack([*parameters]).detach().numpy(), atol=1e-12)


def test_the_papers_correction_repeats_the_newest_missed_update() -> None:
    """Update by update, from the raw state, for every gap and step."""
    spec, rates = table("paper"), schedule(NUM_STEPS)
    model = TableModel(spec, rates)
    everything = np.arange(spec.num_rows)
    model.last_step[:] = 3 * everything
    model.momentum_buffer[:] = 0.5
    for step in (33, NUM_STEPS):
        weight, momentum = model.weight.copy(), model.momentum_buffer.copy()
        for row in everything:
            for _ in range(model.last_step[row], step):
                momentum[row] = 0.8 * momentum[row] + 0.05 * weight[row]
                weight[row] -= float(rates[step - 1]) * momentum[row]
        np.testing.assert_allclose(model.at(everything, step), [weight, momentum], atol=1e-12)
