"""The ranks of a run and their communication through the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from weightserver.core.arrays import Int64Array

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of this process; all ranks must call the methods that communicate."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number of this rank among those on its machine."""
    local_world_size: int = 1
    """Number of ranks on this machine."""
    num_nodes: int = 1
    """Number of machines, if all have as many ranks and number them one after another; else 1."""
    control: dist.ProcessGroup | None = field(default=None, compare=False)
    """The group that sends tensors on the CPU; by default that of all communication."""
    device: torch.device = _CPU
    """Device of this rank. A GPU has an index: without one it would mean each thread's current GPU."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, num_items: int) -> slice:
        """This rank's slice of `num_items` items; the ranks' slices cover all in order, and differ by at most one."""
        return slice(num_items * self.rank // self.world_size, num_items * (self.rank + 1) // self.world_size)

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self.sum_over_ranks([0.0])  # torch's own barrier would involve NCCL, and so the GPU

    def broadcast_text(self, text: str | None) -> str:
        """Returns rank 0's text on every rank; the arguments of other ranks are ignored."""
        if self.world_size == 1:
            assert text is not None, "rank 0 has the text"
            return text
        content = [text]
        dist.broadcast_object_list(content, src=0, group=self.control)
        assert content[0] is not None, "rank 0 has the text"
        return content[0]

    def of_first(self, call: Callable[[], Any]) -> Any:
        """What `call` returns on rank 0, a JSON value, on every rank.

        Raises:
            ValueError: rank 0 failed; its own error is raised there.
        """
        answer, failure = {}, None
        if self.is_first:
            try:
                answer = {"value": call()}
            except Exception as error:  # noqa: BLE001 - also of a token's own; it is raised below
                answer, failure = {"error": str(error)}, error
        answer = json.loads(self.broadcast_text(json.dumps(answer)))
        if failure is not None:
            raise failure
        if "error" in answer:
            raise ValueError(f"rank 0 failed: {answer['error']}")
        return answer["value"]

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sums each value over ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.control)
        return [float(value) for value in tensor.tolist()]


@dataclass(frozen=True)
class RowOwners:
    """Which rank holds a row: blocks are dealt by their shard first, so that few ranks write to a shard.

    R ranks and S shards divide a line of R·S places: a shard has R of them, a rank S. A shard deals its blocks to its
    places, each S places after the last one, so to one rank after another. At most R + S − 1 pairs of rank and shard
    share a place. With one shard, rank = block mod R.
    """

    rows_per_block: int = 1
    num_shards: int = 1
    num_ranks: int = 1
    rank: int = 0
    """Number of this rank."""

    def are_mine(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether this rank holds each row, bool [n]."""
        are_mine: npt.NDArray[np.bool_] = self.rank_of(rows) == self.rank
        return are_mine

    def mine(self, rows: Int64Array) -> Int64Array:
        """The rows among these, int64 [n], that this rank holds."""
        return rows if self.num_ranks == 1 else rows[self.are_mine(rows)]

    def rank_of(self, rows: Int64Array) -> Int64Array:
        """The rank of each row, int64 [n]."""
        turn, shard = np.divmod(rows // self.rows_per_block, self.num_shards)
        place: Int64Array = self.num_ranks * shard + self.num_shards * turn % self.num_ranks
        return place // self.num_shards

    @property
    def surplus(self) -> int:
        """How many of consecutive rows a rank may hold beyond its mean: a block, and one for each of its shards."""
        return self.rows_per_block * (1 + -(-self.num_shards // self.num_ranks))


ONE_OWNER = RowOwners()
"""One rank that holds all rows."""


def num_processes() -> int:
    """Number of processes of torch.distributed; 1 unless that is initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_of_process(device: torch.device) -> Ranks:
    """This process among those of torch.distributed, if that is initialised; all call it, since it may make a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(device=device)
    world_size = dist.get_world_size()
    has_gloo = "gloo" in dist.get_backend_config(dist.group.WORLD)
    ranks = Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        control=None if has_gloo else dist.new_group(backend="gloo"),
    )
    is_elsewhere = ranks.rank % ranks.local_world_size != ranks.local_rank
    most, least, some_are = ranks.max_over_ranks([ranks.local_world_size, -ranks.local_world_size, is_elsewhere])
    return ranks if most != -least or some_are else replace(ranks, num_nodes=world_size // ranks.local_world_size)


def check_same_on_all_ranks(settings: Mapping[str, object], ranks: Ranks) -> None:
    """Raises ValueError on every rank unless all have the same settings as rank 0. All ranks call it."""
    own = {name: str(value) for name, value in settings.items()}
    first = json.loads(ranks.broadcast_text(json.dumps(own)))
    other = [f"{name}={own[name]} (rank 0: {first[name]})" for name in own if own[name] != first[name]]
    if ranks.max_over_ranks([len(other)]) != [0]:
        found = ", ".join(other) or "other settings on another rank"
        raise ValueError(f"rank {ranks.rank}: every rank must make the head with the same arguments, got {found}")


def gathered(part: Tensor, total: int, ranks: Ranks, *, dim: int = 0) -> Tensor:
    """The shares (`Ranks.share`) of all ranks in order along `dim`, of `total` items, on every rank."""
    if ranks.world_size == 1:
        return part
    whole = part.new_zeros(*part.shape[:dim], total, *part.shape[dim + 1 :])
    share = ranks.share(total)
    whole.narrow(dim, share.start, share.stop - share.start).copy_(part)
    group = ranks.control if whole.device.type == "cpu" else None
    dist.all_reduce(whole, group=group)  # exact: all ranks except one add zeros
    return whole


def gathered_parts(part: Tensor, ranks: Ranks) -> list[Tensor]:
    """The parts of all ranks, in order, on every rank; they may differ in length. All ranks call it."""
    if ranks.world_size == 1:
        return [part]
    lengths = [0.0] * ranks.world_size
    lengths[ranks.rank] = len(part)
    sizes = [int(length) for length in ranks.sum_over_ranks(lengths)]
    parts = list(torch.split(part.new_zeros(sum(sizes), *part.shape[1:]), sizes))
    parts[ranks.rank].copy_(part)
    whole = torch.cat(parts)
    dist.all_reduce(whole, group=ranks.control if whole.device.type == "cpu" else None)  # exact, as above
    return list(torch.split(whole, sizes))
