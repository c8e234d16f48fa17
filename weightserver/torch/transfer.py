"""Asynchronous copies between the host and a GPU. On a CPU nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The array on `device`: on a GPU copied through pinned memory, on a CPU the array itself.

    Any thread may call it; GPU work that is submitted later, to the default stream, runs after the copy.
    """
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors to the host in progress. On a CPU they are the tensors themselves, which must not change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [_host_copy(tensor) for tensor in tensors]
        self._done = [_event(device) for device in {tensor.device for tensor in tensors} if device.type == "cuda"]

    def wait(self) -> list[Tensor]:
        """Waits for the copies; any thread may call it, more than once."""
        for event in self._done:
            event.synchronize()
        return self._copies


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    """An event that occurs once `device` has finished all work submitted so far."""
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event
