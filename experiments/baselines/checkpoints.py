"""Checkpoints of a baseline."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.run.checkpoint_file import FORMAT, file_path, load, restore, saved_steps, tensors_to_save
from weightserver.common.atomic_files import atomic_write, make_directory
from weightserver.torch import Ranks


class Checkpoints:
    """Saves and restores all that training changes, in files of the trainer's format, of which the newest is kept."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, step: int, method: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Saves the state after `step` updates."""
        make_directory(self._directory)
        earlier = [number for number in saved_steps(self._directory) if number != step]
        tensors, metadata = tensors_to_save(method, optimizer), {"format": FORMAT, "step": str(step)}
        atomic_write(file_path(self._directory, step), lambda partial: save_file(tensors, partial, metadata=metadata))
        for number in earlier:
            file_path(self._directory, number).unlink()

    def restore(self, method: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restores the newest state; returns the number of its updates, 0 if there is none."""
        steps = saved_steps(self._directory)
        if steps:
            restore(load(self._directory, steps[-1], Ranks()), file_path(self._directory, steps[-1]), method, optimizer)
        return steps[-1] if steps else 0
