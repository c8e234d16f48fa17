"""Row stores whose servers were away for longer than the client tries: what failed is sent again, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from weightserver import (
    AuthenticationError,
    RowState,
    ShardUnavailableError,
    StorageError,
    TableSpec,
    WeightServerError,
)
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import RemoteRows, ResidentRows, RowStore

SPEC = TableSpec(num_rows=9, dim=2)
ERRORS = ["it is down", "its disk is full", "it has another token", "no token", "no token in the answer"]


class LateClient:
    """Of a server that is away for the first write, whose disk is full for the second, and which refuses the token of
    the third; for others, there is none. A weight is the number of writes before its fetch."""

    def __init__(self) -> None:
        self._failures = iter(
            [
                ShardUnavailableError("it is down"),
                StorageError("its disk is full"),
                AuthenticationError("it has another token"),
                OSError("no token"),
                ValueError("no token in the answer"),
            ]
        )
        self.written: list[list[int]] = []

    def require_session(self) -> None:
        return

    def fetch(self, rows: Int64Array, *, step: int) -> Float32Array:
        return np.full((len(rows), SPEC.dim), len(self.written), np.float32)

    def fetch_state(self, rows: Int64Array) -> RowState:
        weight, momentum_buffer = np.zeros((2, len(rows), SPEC.dim), np.float32)
        return RowState(weight, momentum_buffer, np.zeros(len(rows), np.int64))

    def push_gradients(self, rows: Int64Array, *_: Any, **__: Any) -> None:
        for failure in self._failures:
            raise failure
        self.written.append(rows.tolist())

    write_state = push_gradients


@pytest.fixture
def client() -> LateClient:
    return LateClient()


def train(store: RowStore) -> list[str]:
    """Five steps, step t of row t alone, and a flush; what fails is repeated. Returns the errors."""
    errors = []

    def repeated(call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except (WeightServerError, OSError, ValueError) as error:
                errors.append(str(error))

    for step in range(5):
        rows = np.array([step])
        repeated(partial(store.weights, rows, step=step))
        repeated(partial(store.apply_gradients, rows, torch.ones(1, SPEC.dim), step=step))
    repeated(store.flush)
    return errors


def test_rows_that_leave(client: Any) -> None:
    rates, device = LearningRates(SPEC, [0.1] * 9), torch.device("cpu")
    sizes = {"capacity": 1, "prefetch_steps": 0, "write_back_rows": 1}
    with closing(ResidentRows(client, SPEC, rates, device=device, **sizes)) as store:
        assert train(store) == ERRORS
    assert client.written == [[0], [1], [2], [3], [4]]


def test_gradients(client: Any) -> None:
    with closing(RemoteRows(client)) as store:
        assert train(store) == ERRORS
    assert client.written == [[0], [1], [2], [3], [4]]


def test_a_fetch_that_followed_a_failed_push_is_made_again(client: Any) -> None:
    """It lacks the update."""
    rows = np.array([1])
    with closing(RemoteRows(client)) as store:
        store.weights(rows, step=0)
        store.apply_gradients(rows, torch.ones(1, SPEC.dim), step=0)
        store.prefetch(rows, step=1)
        for message in ERRORS:
            with pytest.raises((WeightServerError, OSError, ValueError), match=message):
                store.flush()
        assert (store.weights(rows, step=1) == 1).all()
