"""The protocol between the training loop and whoever holds the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weightserver import RowState
from weightserver.sharding import Int64Array


@dataclass
class RowCounters:
    """What a store did since it was made."""

    wait_seconds: float = 0.0
    """Time that the training loop waited for rows."""
    fetched_rows: int = 0
    fetched_bytes: int = 0
    pushed_rows: int = 0
    pushed_bytes: int = 0


class RowStore(Protocol):
    """Holds N rows of D values; each step asks for K of them, strictly increasing int64 (K,).

    For each step in turn: `prefetch`, `weights`, `apply_gradients`. An error in the background is raised by the next
    call.
    """

    counters: RowCounters

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        """Tells which rows `weights` will be asked for; returns at once."""

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        """The rows before update `step`: float32 (K, D)."""

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        """Makes update `step` with gradients (K, D); may return before it is done."""

    def read_state(self, rows: Int64Array, *, step: int) -> RowState:
        """Any rows before update `step`, with their momentum, after all updates given so far."""

    def close(self) -> None:
        """Ends all updates given so far."""
