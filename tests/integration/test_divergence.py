"""Rows and learning rates that leave float32 on real shards: unstable rates are refused when they are given, and a row
that is infinite or NaN is neither answered nor stored."""

from __future__ import annotations

from dataclasses import replace

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.helpers.raw_calls import raw_channel, stub
from tests.integration.tables import begin, everything
from weightserver import LocalCluster, StepError, TableSpec, WeightClient
from weightserver.core.initial import initial_rows
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import to_bytes

SPEC = TableSpec(num_rows=60, dim=2, rows_per_block=5, momentum=0.5, weight_decay=0.125)
LIMIT = 24.0
"""Learning rates from here on, 2·(1 + m)/λ, are not stable."""
RATES = np.linspace(4, 0.01, 100, dtype=np.float32)
ROWS = np.arange(SPEC.num_rows)
LARGEST = float(np.finfo(np.float32).max)


def write(client: WeightClient, row: int, weight: float, momentum_buffer: float, last_step: int = 0) -> None:
    weights, buffers = (np.full((1, SPEC.dim), value, np.float32) for value in (weight, momentum_buffer))
    client.write_state([row], weights, buffers, last_step)


def largest_of_sgd(weight: float, momentum_buffer: float, rates: npt.NDArray[np.float32]) -> list[float]:
    """The |weight| that torch.optim.SGD in float64 leaves after each update without a gradient."""
    parameter = torch.nn.Parameter(torch.tensor([weight], dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter], momentum=SPEC.momentum, weight_decay=SPEC.weight_decay)
    optimizer.state[parameter]["momentum_buffer"] = torch.tensor([momentum_buffer], dtype=torch.float64)
    sizes = [abs(weight)]
    for rate in rates.tolist():
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        sizes.append(abs(parameter.item()))
    return sizes


def assert_push_is_refused(client: WeightClient, rows: list[int], *, step: int, match: str, size: float = 1.0) -> None:
    """The whole write is refused although its other rows would be valid."""
    before = everything(client)
    with pytest.raises(StepError, match=match):
        client.push_gradients(rows, np.full((len(rows), SPEC.dim), size, np.float32), step=step)
    assert everything(client) == before


def test_unstable_learning_rates_are_refused_when_they_are_given(cluster: LocalCluster, client: WeightClient) -> None:
    """By the client before it sends them, and by the shards; an unstable update would make rows grow for ever."""
    begin(client, SPEC, RATES)
    growing = largest_of_sgd(1.0, 0.0, np.full(3_000, LIMIT * 1.001, np.float32))
    assert growing[-1] > growing[100] > growing[10] > 1
    told = r"the learning rate 24 of step 102 makes rows grow .* momentum 0.5 and weight decay 0.125 .* less than 24"
    with pytest.raises(ValueError, match=told):
        client.extend_schedule(100, np.array([1, 23.99, LIMIT, 30], np.float32))
    rates = pb.Rates(learning_rates=to_bytes(np.append(client.learning_rates(), np.array([1, 2, LIMIT], np.float32))))
    with raw_channel(cluster.addresses[0]) as channel, pytest.raises(grpc.RpcError, match=told) as raised:
        list(stub(channel).Fetch(pb.FetchRequest(rates=rates), timeout=60))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.describe().horizon == 100
    client.extend_schedule(100, np.array([np.nextafter(np.float32(LIMIT), np.float32(0))]))


def test_without_weight_decay_every_learning_rate_is_stable(client: WeightClient) -> None:
    begin(client, replace(SPEC, weight_decay=0.0), np.full(20, LARGEST, np.float32))
    assert (client.fetch(ROWS, step=20) == initial_rows(SPEC, ROWS)).all()
    write(client, 3, 1.0, 2.0)
    with pytest.raises(StepError, match="row 3 would be infinite or NaN after update 9"):
        client.fetch([3], step=10)


def test_rows_beyond_float32_are_neither_answered_nor_stored(client: WeightClient) -> None:
    """Rows of any size, corrected to any step: the row as in exact arithmetic, or an error that names it."""
    begin(client, SPEC, RATES)
    for row, share in enumerate(np.linspace(0.21, 0.99, 9).tolist()):
        write(client, row, share * LARGEST, -share * LARGEST)
        sizes = largest_of_sgd(share * LARGEST, -share * LARGEST, RATES)
        for step in (0, 1, 2, 3, 5, 8, 13, 100):
            for call in (client.fetch, lambda rows, step: client.fetch_state(rows, step=step).weight):
                try:
                    found = call([row, 20], step=step)[0]
                except StepError as refusal:
                    error = str(refusal)
                else:
                    assert sizes[step] < LARGEST * (1 + 1e-5)
                    np.testing.assert_allclose(np.abs(found), sizes[step], rtol=1e-5)
                    continue
                assert max(sizes) > LARGEST  # a product on the way may be beyond float32, and the row not
                assert f"row {row} would be infinite or NaN after update {step - 1}, nothing was" in error
    assert_push_is_refused(client, [9, 8], step=2, match="row 8 would be infinite or NaN after update 2,")
    assert_push_is_refused(
        client, [20], step=2, size=LARGEST / 2, match="row 20 would be infinite or NaN after update 2,"
    )
    client.checkpoint("kept", step=2)
    write(client, 8, LARGEST, LARGEST, 100)
    assert (client.fetch([8], step=100) == np.float32(LARGEST)).all()
    with pytest.raises(StepError, match="row 8 would be infinite or NaN after update 2,"):
        client.fetch([8], step=3, checkpoint="kept")


def test_late_gradients_beyond_float32_are_refused(client: WeightClient) -> None:
    begin(client, SPEC, RATES)
    for row in (3, 4):
        write(client, row, 1.0, 0.0, 12)
    assert_push_is_refused(
        client, [3, 4], step=10, size=LARGEST, match="row 3 would be infinite or NaN after update 11, "
    )
    client.push_gradients([3, 4], np.ones((2, 2), np.float32), step=10)
    assert np.isfinite(client.fetch([3, 4], step=100)).all()


def test_the_papers_correction_is_checked_too(client: WeightClient) -> None:
    begin(client, replace(SPEC, correction="paper"), RATES)
    write(client, 5, LARGEST, -LARGEST)
    with pytest.raises(StepError, match="row 5 would be infinite or NaN after update 1,"):
        client.fetch([5], step=2)
    assert_push_is_refused(client, [5, 6], step=2, match="row 5 would be infinite or NaN after update 2,")


def test_without_correction_rows_stand_still_and_only_updates_may_overflow(client: WeightClient) -> None:
    begin(client, replace(SPEC, correction=False), RATES)
    assert (client.fetch(ROWS, step=100) == initial_rows(SPEC, ROWS)).all()
    client.push_gradients([5], np.ones((1, 2), np.float32), step=20)
    assert_push_is_refused(
        client, [5, 6], step=21, size=3e38, match="row 5 would be infinite or NaN after update 21, nothing was written"
    )
    write(client, 7, LARGEST, -LARGEST)
    assert (client.fetch([7], step=100) == np.float32(LARGEST)).all()
    assert_push_is_refused(client, [7], step=30, match="row 7 would be infinite or NaN after update 30, ")
