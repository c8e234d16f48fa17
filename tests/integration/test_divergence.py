"""Learning rates under which dense torch.optim.SGD makes rows infinite or NaN, on real shards: an error with the row
and the update, and nothing is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightserver import StepError, TableSpec, WeightClient
from weightserver.core.initial import initial_rows

SPEC = TableSpec(num_rows=60, dim=2, rows_per_block=5, momentum=0.0, weight_decay=0.125)
DIVERGING, RESET = 64.0, 8.0
"""1 − η·λ is −7, and 0: that makes any finite weight 0."""
RATES = np.array([*np.full(60, DIVERGING), RESET, *np.full(39, 0.01)], np.float32)
ROWS = np.arange(SPEC.num_rows)


def overflows(weight: npt.NDArray[np.float32], rates: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The update in which torch.optim.SGD makes each row infinite or NaN, else the number of updates."""
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter], momentum=SPEC.momentum, weight_decay=SPEC.weight_decay)
    first = np.full(len(weight), len(rates))
    for step, rate in enumerate(rates.tolist()):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        bad = ~torch.isfinite(parameter).all(dim=1).numpy()
        first[bad] = np.minimum(first[bad], step)
    return first


def decided(weight: npt.NDArray[np.float32], rates: npt.NDArray[np.float32]) -> list[int]:
    """Rows of which no fused multiply-add changes when they overflow: η·u' is 8·w where w' is −7·w."""
    return np.flatnonzero(overflows(weight, rates) == overflows(weight * np.float32(8 / 7), rates)).tolist()


def begin(client: WeightClient, correction: bool | Literal["paper"]) -> npt.NDArray[np.float32]:
    """Makes a table with an open session and no stored rows; returns its weights."""
    client.create_table(replace(SPEC, correction=correction))
    client.extend_schedule(0, RATES)
    client.open_session("diverging")
    return initial_rows(SPEC, ROWS)


def assert_push_is_refused(client: WeightClient, rows: list[int], *, step: int, match: str, size: float = 1.0) -> None:
    """The whole write is refused although its other rows would be valid: rows, clock and number of rows stay."""
    before, info = client.fetch_state(ROWS), client.describe()
    with pytest.raises(StepError, match=match):
        client.push_gradients(rows, np.full((len(rows), SPEC.dim), size, np.float32), step=step)
    after = client.fetch_state(ROWS)
    for name in ("weight", "momentum_buffer", "last_step"):
        assert getattr(after, name).tobytes() == getattr(before, name).tobytes()
    assert client.describe().clock == info.clock
    assert client.describe().rows_stored == info.rows_stored


def test_rows_that_overflow_are_neither_answered_nor_stored(client: WeightClient) -> None:
    """The correction of every row ends in 0."""
    weight = begin(client, True)
    expected, named = overflows(weight, RATES), decided(weight, RATES)
    assert (expected < 60).all()
    assert len(set(expected)) > 1
    assert np.isfinite(client.fetch(ROWS, step=int(expected.min()) - 1)).all()
    for row in (named[0], named[-1]):
        lost = rf"row {row} would become infinite or NaN in update {expected[row]}, nothing was written"
        assert np.isfinite(client.fetch([row], step=int(expected[row]))).all()
        for step in (int(expected[row]) + 1, 61, 100):
            with pytest.raises(StepError, match=lost):
                client.fetch([row], step=step)
            with pytest.raises(StepError, match=lost):
                client.fetch_state([row], step=step)
        assert_push_is_refused(client, [row], step=80, match=lost)
    # Finite states may be written, whatever becomes of them; those of zeros are zeros whatever the coefficients.
    largest = np.full((2, 2), np.finfo(np.float32).max, np.float32)
    client.write_state([16, 17], np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32), 0)
    client.write_state([18, 19], largest, -largest, 0)
    assert not client.fetch([16, 17], step=100).any()
    assert (client.fetch_state([18, 19]).weight == largest).all()
    assert_push_is_refused(client, [16, 17, 18], step=80, match="row 18 would become infinite or NaN in update 0,")
    client.push_gradients([16, 17], np.ones((2, 2), np.float32), step=80)
    client.checkpoint("kept", step=81)
    client.write_state([18, 19], largest, largest, 100)
    assert (client.fetch([18, 19], step=100) == largest).all()
    with pytest.raises(StepError, match="row 18 would become infinite or NaN in update 0,"):
        client.fetch([18, 19], step=100, checkpoint="kept")


def test_late_gradients_that_would_have_diverged_since_are_refused(client: WeightClient) -> None:
    begin(client, True)
    client.write_state([3, 4], np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32), 70)
    impulse = np.full((1, 2), -DIVERGING, np.float32)
    assert decided(impulse, RATES[11:]) == [0]
    first = int(overflows(impulse, RATES[11:])[0])
    assert_push_is_refused(
        client, [3, 4], step=10, match=f"row 3 would become infinite or NaN in update {11 + first}, "
    )
    client.push_gradients([3, 4], np.ones((2, 2), np.float32), step=60)  # the last to diverge was 59
    assert np.isfinite(client.fetch([3, 4], step=100)).all()


def test_the_papers_correction_diverges_where_its_one_rate_does(client: WeightClient) -> None:
    weight = begin(client, "paper")
    rates = np.full(60, RATES[59])
    row = decided(weight, rates)[0]
    lost = f"row {row} would become infinite or NaN in update {overflows(weight, rates)[row]},"
    with pytest.raises(StepError, match=lost):
        client.fetch([row], step=60)
    assert not client.fetch([row], step=61).any()  # by the rate that resets
    assert np.isfinite(client.fetch(ROWS, step=100)).all()
    assert_push_is_refused(client, [row], step=60, match=lost)
    client.push_gradients([row], np.ones((1, 2), np.float32), step=99)


def test_without_correction_rows_stand_still_and_only_updates_may_overflow(client: WeightClient) -> None:
    weight = begin(client, False)
    assert (client.fetch(ROWS, step=100) == weight).all()
    client.push_gradients([5], np.ones((1, 2), np.float32), step=20)
    assert_push_is_refused(
        client, [5, 6], step=30, size=1e37, match="row 5 would become infinite or NaN in update 30, nothing was written"
    )
    largest = np.full((1, 2), np.finfo(np.float32).max, np.float32)
    client.write_state([7], largest, largest, 0)
    assert (client.fetch([7], step=100) == largest).all()
    assert_push_is_refused(client, [7], step=30, match="row 7 would become infinite or NaN in update 30, ")
