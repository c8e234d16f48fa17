"""What a baseline's directory holds besides a run's usual files: what it is, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.run.checkpoint_file import FORMAT, file_path, load, restore, saved_steps, tensors_to_save
from weightserver.common.atomic_files import atomic_write, make_directory
from weightserver.torch import Ranks

IDENTITY_FILE = "baseline.json"
"""The method, its own settings, the digests of the images, and the updates of PIC's run; the rest is in config.json."""


def identify(output: Path, identity: dict[str, Any]) -> None:
    """Writes baseline.json; raises ValueError if the directory holds another baseline, or a run of the trainer."""
    path, text = output / IDENTITY_FILE, json.dumps(identity, indent=2) + "\n"
    if not path.exists() and not saved_steps(output / "checkpoints"):
        atomic_write(path, lambda new: new.write_text(text))
    found = json.loads(path.read_text()) if path.exists() else {"method": "a run of the trainer"}
    wanted = json.loads(text)
    for name in wanted:
        if found.get(name) != wanted[name]:
            raise ValueError(
                f"{output} holds another run, whose {name} is {found.get(name)}, not {wanted[name]}: "
                "choose another directory, or delete it"
            )


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
