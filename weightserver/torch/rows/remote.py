"""Rows on the weight servers, which also run their optimizer: a step fetches K weights and pushes K gradients."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from weightserver import RowState, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.torch.rows.store import RowCounters
from weightserver.torch.transfer import HostCopy, to_device

_CPU = torch.device("cpu")


class RemoteRows:
    """Calls the servers from one background thread, in the order of its own calls.

    Step t's fetch therefore follows step t−1's push, while the trainer prepares images and runs the encoder.

    Args:
        client: has a table, its schedule and an open session; its owner closes it.
        device: device of `weights`.
        value_bytes: bytes of a value on the wire, for the counters.
    """

    prefetch_steps = 0
    """A step's rows can only be fetched after the previous step's push."""

    def __init__(
        self,
        client: WeightClient,
        device: torch.device = _CPU,
        *,
        value_bytes: int = 4,
    ) -> None:
        self.counters = RowCounters(value_bytes=value_bytes)
        self._client = client
        self._device = device
        self.fresh = np.zeros(0, bool)  # a fetch of weights alone does not tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote-rows")
        self._fetched: tuple[int, Future[Tensor]] | None = None
        self._pushed: Future[None] | None = None
        self._in_progress = False  # between `weights` and `apply_gradients`

    def reserve(self, capacity: int) -> None:
        """Does nothing: there is no limit."""

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        if not self._in_progress:  # otherwise the rows would lack the update in progress
            self._fetched = step, self._thread.submit(self._fetch, rows, step)

    def forget_announced(self, *, in_progress: bool) -> None:
        self._fetched, self._in_progress = None, in_progress

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        if self._fetched is not None and self._fetched[0] == step:
            fetched = self._fetched[1]
        else:
            fetched = self._thread.submit(self._fetch, rows, step)
        self._fetched, self._in_progress = None, True
        with self.counters.waiting():
            self._raise_push_error()
            return fetched.result()

    def begin(self, positions: Int64Array, weight: Tensor) -> None:
        raise NotImplementedError("rows on the servers begin as the table says")

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        self._raise_push_error()
        self._in_progress = False
        self._pushed = self._thread.submit(self._push, rows, HostCopy([gradients.detach()]), step)

    def read_state(self, rows: Int64Array, *, step: int) -> RowState:
        return self._thread.submit(lambda: self._client.fetch_state(rows, step=step)).result()

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        self._raise_push_error()
        return self._thread.submit(lambda: to_device(self._client.fetch(rows, step=step), self._device)).result()

    def flush(self) -> None:
        self._raise_push_error()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _fetch(self, rows: Int64Array, step: int) -> Tensor:
        with self.counters.fetching():
            weight = self._client.fetch(rows, step=step)
        self.counters.fetched(len(rows), weight.size)
        return to_device(weight, self._device)

    def _push(self, rows: Int64Array, copied: HostCopy, step: int) -> None:
        (gradients,) = copied.wait()
        self._client.push_gradients(rows, gradients.numpy(), step=step)
        self.counters.pushed(len(rows), gradients.numel())

    def _raise_push_error(self) -> None:
        """Raises the error of a failed push, which may have caused later ones."""
        if self._pushed is not None:
            self._pushed.result()
            self._pushed = None
