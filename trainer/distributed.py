"""The ranks of a run, which torchrun starts, and their communication."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from weightserver.torch import Ranks

_GRACE_SECONDS = 15.0
"""Time for a rank that failed to end by itself."""


def averaged_over_ranks(network: nn.Module, ranks: Ranks) -> nn.Module:
    """The network, wrapped if there are several ranks, so that its gradients are averaged over them."""
    if ranks.world_size == 1:
        return network
    known = signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
    unsynced: dict[str, Any] = {name: False}
    return DistributedDataParallel(network, **unsynced, gradient_as_bucket_view=True)


def averaging_gradients(parallel: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Backward passes inside average gradients over ranks if `wanted`, otherwise they add to each rank's own."""
    if wanted or not isinstance(parallel, DistributedDataParallel):
        return nullcontext()
    return parallel.no_sync()


@contextmanager
def with_first_ranks_buffers(module: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Gives a module the buffers of rank 0 (BatchNorm's statistics, which differ between ranks), then its own again."""
    if ranks.world_size == 1:
        yield
        return
    own = [buffer.clone() for buffer in module.buffers()]
    for buffer in module.buffers():
        content = buffer.cpu()
        dist.broadcast(content, src=0)
        buffer.copy_(content)
    try:
        yield
    finally:
        for buffer, content in zip(module.buffers(), own, strict=True):
            buffer.copy_(content)


def tensors_of_first(call: Callable[[], dict[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors on the CPU, by name, that `call` returns on rank 0, on every rank.

    Raises:
        ValueError: rank 0 failed; its own error is raised there.
    """
    found: list[dict[str, Tensor]] = [{}]
    ranks.of_first(lambda: found[0].update(call()))
    if ranks.world_size > 1:
        dist.broadcast_object_list(found, src=0, group=ranks.control)
    return found[0]


@contextmanager
def process_group(
    device: torch.device, *, timeout_seconds: float = 600, agreed: tuple[type[BaseException], ...] = ()
) -> Iterator[Ranks]:
    """Connects the ranks that torchrun started, by gloo and, on CUDA, NCCL; gives each its GPU.

    Tensors on the CPU, such as all messages between ranks, are sent by gloo, so that no GPU waits for them. A rank that
    fails ends its process, whatever it waits for; torchrun then ends the others, with SIGKILL after 30 s. A process
    that torchrun did not start, or that it started alone, is a single rank and connects to no other.

    Args:
        timeout_seconds: time for which a rank waits in a collective for the others.
        agreed: errors that all ranks raise together to end the run.

    Raises:
        ConnectionError: another rank failed, or did not answer within the timeout.
        ValueError: fewer GPUs than ranks, or an incomplete environment.
    """
    ranks = Ranks(
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    ranks = replace(ranks, device=_device_of_rank(device, ranks))
    if ranks.world_size == 1:
        yield ranks
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if ranks.device.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=ranks.device)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        with _ending_after_errors(but=agreed):
            yield ranks
        _destroy()
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo has no error class of its own
            raise ConnectionError("another rank failed or does not answer: see its last message") from error
        raise
    finally:
        # After a failure NCCL would wait for operations in progress, which other ranks may never join.
        if dist.is_initialized() and ranks.device.type != "cuda":
            _destroy()


@contextmanager
def _ending_after_errors(*, but: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Ends the process some seconds after an error inside, whatever it waits for: threads, NCCL, a GPU."""
    try:
        yield
    except but:
        raise
    except BaseException:
        faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True)
        raise


def _destroy() -> None:
    """Destroys the process group.

    That waits for gloo's threads while it holds the GIL, which they need to free the tensors of their last operations:
    without a pause that releases it, they could wait for each other for ever.
    """
    time.sleep(0.1)
    dist.destroy_process_group()


def _device_of_rank(device: torch.device, ranks: Ranks) -> torch.device:
    """The device that `--device` means on this rank; a GPU gets its index and becomes this thread's current one."""
    if device.type != "cuda":
        return device
    if ranks.world_size > 1:
        num_gpus = torch.cuda.device_count()
        if device != torch.device("cuda"):
            raise ValueError(f"--device {device} is a single GPU, but each rank needs its own: give --device cuda")
        if ranks.local_world_size > num_gpus:
            raise ValueError(f"{ranks.local_world_size} ranks on a machine with {num_gpus} GPUs: start one per GPU")
        device = torch.device("cuda", ranks.local_rank)
    elif device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device
