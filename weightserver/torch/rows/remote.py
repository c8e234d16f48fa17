"""Rows on the weight servers, which also run their optimizer: a step fetches K weights and pushes K gradients."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from weightserver import WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.torch.rows.store import RowCounters, RowStore
from weightserver.torch.transfer import HostCopy, to_device

_CPU = torch.device("cpu")


@dataclass
class _Push:
    """The gradients of one update, on their way."""

    step: int
    rows: Int64Array
    gradients: HostCopy | None
    """None once the servers have them."""
    sending: Future[None] | None = None


class RemoteRows(RowStore):
    """Calls the servers from one background thread, in the order of its own calls.

    Step t's fetch therefore follows step t−1's push, while the trainer prepares images and runs the encoder; no step is
    requested earlier.

    Args:
        client: has a table, its schedule and an open session; its owner closes it.
        device: device of `weights`.
        value_bytes: bytes of a value on the wire, for the counters.
    """

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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote-rows")
        self._fetched: tuple[int, Future[Tensor]] | None = None
        self._push: _Push | None = None  # the last one

    @property
    def num_updates(self) -> int:
        return 0 if self._push is None else self._push.step + 1

    def prefetch(self, rows: Int64Array, *, step: int) -> None:
        self._settle()
        self._fetched = step, self._thread.submit(self._fetch, rows, step)

    def forget_announced(self, *, in_progress: bool) -> None:
        self._settle()
        self._fetched = None

    def weights(self, rows: Int64Array, *, step: int) -> Tensor:
        self._settle()
        if self._fetched is not None and self._fetched[0] == step:
            fetched = self._fetched[1]
        else:
            fetched = self._thread.submit(self._fetch, rows, step)
        self._fetched = None
        with self.counters.waiting():
            self._raise_push_error()
            return fetched.result()

    def apply_gradients(self, rows: Int64Array, gradients: Tensor, *, step: int) -> None:
        self._raise_push_error()
        self._push = _Push(step, rows, HostCopy([gradients.detach()]))  # from here on the update is made
        self._settle()

    def _settle(self) -> None:
        """Sends the last push if an interrupt has prevented it; may be repeated."""
        if self._push is not None and self._push.sending is None:
            self._push.sending = self._thread.submit(self._send, self._push)

    def peek(self, rows: Int64Array, *, step: int) -> Tensor:
        self._raise_push_error()
        return self._thread.submit(lambda: to_device(self._client.fetch(rows, step=step), self._device)).result()

    def flush(self) -> None:
        self._raise_push_error()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _fetch(self, rows: Int64Array, step: int) -> Tensor:
        weight = self._client.fetch(rows, step=step)
        self.counters.fetched(len(rows), weight.size)
        return to_device(weight, self._device)

    def _send(self, push: _Push) -> None:
        if push.gradients is None:
            return  # it was submitted twice
        (gradients,) = push.gradients.wait()
        self._client.push_gradients(push.rows, gradients.numpy(), step=push.step)
        push.gradients = None
        self.counters.pushed(len(push.rows), gradients.numel())

    def _raise_push_error(self) -> None:
        """Raises the error of a failed push, which may have caused later ones. The next call sends it again: the client
        knows where it was applied."""
        self._settle()
        if self._push is None or self._push.sending is None:
            return
        try:
            self._push.sending.result()
        except Exception:  # also of a token's own
            self._push.sending = self._fetched = None  # what was fetched since may lack it
            raise
