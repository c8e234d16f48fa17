"""The state of an interrupted training: a network, SGD's momentum and the number of finished parts, in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from weightserver.common.atomic_files import atomic_write


def save_state(path: Path, network: nn.Module, optimizer: torch.optim.SGD, num_done: int, identity: str = "") -> None:
    """Writes the state after `num_done` epochs or iterations of the training that `identity` describes."""
    tensors = {f"network.{name}": value for name, value in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        if (momentum := optimizer.state[parameter].get("momentum_buffer")) is not None:  # None with momentum 0
            tensors[f"momentum.{name}"] = momentum
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    metadata = {"done": str(num_done), "identity": identity}
    atomic_write(path, lambda target: save_file(tensors, target, metadata))


def load_state(path: Path, network: nn.Module, optimizer: torch.optim.SGD, identity: str = "") -> int:
    """Restores the state in `path`; returns its number of finished epochs or iterations, 0 if there is no file.

    Raises:
        ValueError: the file is damaged or of another training.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("identity") != identity:
                raise ValueError(f"{path} is the state of other settings, images or weights: remove it, or use them")
            network.load_state_dict({name: file.get_tensor(f"network.{name}") for name in network.state_dict()})
            saved = set(file.keys())
            for name, parameter in network.named_parameters():
                if f"momentum.{name}" not in saved:
                    continue
                momentum = torch.empty_like(parameter).copy_(file.get_tensor(f"momentum.{name}"))
                optimizer.state[parameter]["momentum_buffer"] = momentum
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"cannot read the state {path} ({error}): remove it to start over") from error
    return int(metadata["done"])
