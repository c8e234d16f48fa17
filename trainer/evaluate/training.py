"""Trains a network by SGD on all ranks: the one loop of every protocol that trains. It continues when interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.batch_norm import BatchNormOfRanks
from trainer.distributed import averaged_over_ranks
from trainer.evaluate.evaluation import Evaluation
from trainer.run.checkpoint_file import give_state, tensors_to_save
from weightserver.common.atomic_files import atomic_write
from weightserver.torch import Ranks

Batches = Callable[[int], Generator[Any, None, None]]
"""This rank's parts of the batches from a step on; closed at the end."""


class Training:
    """The training of a network by all ranks; BatchNorm uses the whole batch.

    Args:
        network: on its device; trained in place.
        optimizer: of the network's parameters, with the initial learning rates.
        loss_of: this rank's part of a batch's loss, which is the sum over ranks, by the network that it is given; of
            several networks that share nothing, the loss of each.
        factor: of the learning rates at a step, counted from 0.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        network: nn.Module,
        optimizer: torch.optim.SGD,
        *,
        loss_of: Callable[[nn.Module, Any], Tensor],
        factor: Callable[[int], float],
    ) -> None:
        self._evaluation, self._ranks = evaluation, evaluation.ranks
        self._network, self._optimizer = network, optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._loss_of, self._factor = loss_of, factor
        synchronise_batch_norm(network, self._ranks)
        self._parallel = averaged_over_ranks(network, self._ranks)

    def run(self, name: str, batches: Batches, *, num_steps: int, save_every: int) -> None:
        """Trains to the end, from the state that an interrupted training of this name saved, if there is one.

        Raises:
            ValueError: the state is damaged.
            DivergedError: on all ranks, no loss is finite where it is saved.
        """
        file = self._evaluation.state / f"{name}.safetensors"
        done = load_state(file, self._network, self._optimizer)
        self._network.train()
        with self._evaluation.progress(name, num_steps) as advance, closing(batches(done)) as ahead:
            advance(done)
            for step in range(done, num_steps):
                loss = self.step(next(ahead), step)
                if (step + 1) % save_every == 0 or step + 1 == num_steps:
                    self._save(file, step + 1, loss)
                advance(loss=loss.where(loss.isfinite(), torch.nan).nanmean() * self._ranks.world_size)
        self._ranks.barrier()

    def step(self, batch: Any, number: int) -> Tensor:
        """One update, the one of this number; returns this rank's part of each loss."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._factor(number)
        loss = self._loss_of(self._parallel, batch)
        self._optimizer.zero_grad()
        (loss.sum() * self._ranks.world_size).backward()  # type: ignore[no-untyped-call]  # ranks' gradients are averaged
        self._optimizer.step()
        return loss.detach()

    def _save(self, file: Path, num_done: int, loss: Tensor) -> None:
        totals = self._ranks.sum_over_ranks(loss.flatten().tolist())
        if not any(map(math.isfinite, totals)):
            raise DivergedError(f"the loss is {totals[0]} after {num_done} steps: give a lower learning rate")
        if self._ranks.is_first:
            save_state(file, self._network, self._optimizer, num_done)


class DivergedError(ValueError):
    """The loss of a training is not finite."""


def synchronise_batch_norm(network: nn.Module, ranks: Ranks) -> nn.Module:
    """Makes BatchNorm use the statistics of the batches of all ranks, so that their number changes no result.

    On GPUs by torch's SyncBatchNorm, which does not support CPUs.

    Raises:
        ValueError: a BatchNorm of another class than torch's, such as timm's with an activation, which would be lost.
    """
    if ranks.world_size == 1:
        return network
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
            raise ValueError(f"{type(norm).__name__} of the encoder cannot be synchronised: evaluate on a single rank")
    if ranks.device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        return converted
    for norm in norms:
        norm.__class__ = BatchNormOfRanks  # the same state, computed otherwise
    return network


def check_batch(num_images: int, batch_size: int, ranks: Ranks) -> None:
    """Raises ValueError if the images make no batch, or a batch leaves ranks without images."""
    if num_images < batch_size:
        raise ValueError(f"{num_images} training images make no batch of {batch_size}: give a smaller --batch-size")
    if batch_size < ranks.world_size:
        raise ValueError(
            f"--batch-size {batch_size} leaves some of {ranks.world_size} ranks without images: give larger batches or "
            "fewer ranks"
        )


def cosine(progress: float) -> float:
    """The factor of the learning rate after a part `progress` (0..1) of all steps."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def save_state(path: Path, network: nn.Module, optimizer: torch.optim.SGD, num_done: int) -> None:
    """Writes a network, SGD's momentum and the number of finished steps."""
    tensors = tensors_to_save(network, optimizer)
    atomic_write(path, lambda target: save_file(tensors, target, {"steps": str(num_done)}))


def load_state(path: Path, network: nn.Module, optimizer: torch.optim.SGD) -> int:
    """Restores the state in `path`; returns its number of finished steps, 0 if there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            give_state({name: file.get_tensor(name) for name in file.keys()}, network, optimizer)  # noqa: SIM118
            return int(file.metadata()["steps"])
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"cannot read the state {path} ({error}): remove it to start over") from error
