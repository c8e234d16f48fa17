"""Checkpoints of a run: the rows on the weight servers, and one file for all the rest, of the same step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.distributed import Ranks
from trainer.rows import RowStore
from weightserver import WeightClient

_FORMAT = "pic-checkpoint-1"
_MODEL, _MOMENTUM = "model.", "momentum."
# What may differ when a run goes on: where it runs, and what it tells.
_FREE = {
    *(
        "output",
        "resume",
        "servers",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "token_file",
        "insecure",
        "retry_seconds",
        "rows",
        "capacity",
        "prefetch_steps",
        "device",
        "data_dir",
    ),
    *("log_every", "knn_every", "metrics_port", "evaluate", "checkpoint_every", "keep_checkpoints"),
}


class Checkpoints:
    """Takes the checkpoints of a run, step by step consistent, and forgets old ones.

    In this order: every rank's rows are made durable; every shard keeps them under the checkpoint's name; the file is
    written and renamed into place; older checkpoints are released. A run that dies anywhere in between goes on from the
    newest checkpoint that has its file.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, rows: RowStore, client: WeightClient | None) -> None:
        self._directory = config.output / "checkpoints"
        self._keep = config.keep_checkpoints
        self._ranks = ranks
        self._rows = rows
        self._client = client

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keeps what `step` finished updates made; every rank calls it. With dense rows it does nothing."""
        if self._client is None:
            return
        self._rows.flush()
        self._ranks.barrier()
        if self._ranks.is_first:
            self._client.checkpoint(_name(step), step=step)
        self._ranks.barrier()  # nobody writes rows of later steps before that
        if self._ranks.is_first:
            _write(_path(self._directory, step), step, model, optimizer)
            self._forget_old()

    def _forget_old(self) -> None:
        assert self._client is not None
        kept = saved_steps(self._directory)[-self._keep :]
        retained = {known for shard in self._client.describe().shards for known in shard.checkpoints}
        for name in sorted(known.name for known in retained if known.step not in kept):
            self._client.release(name)  # those too that a failure left on some of the shards
        for step in saved_steps(self._directory)[: -self._keep]:
            _path(self._directory, step).unlink()


def check_same_run(config: TrainConfig) -> None:
    """Raises ValueError unless the run in config.output is the one that `config` describes."""
    path = config.output / "config.json"
    if not path.exists():
        raise ValueError(f"{config.output} holds no run to go on with: leave --resume away, or name another --output")
    stored, wanted = json.loads(path.read_text()), json.loads(config.to_json())
    for name in wanted.keys() - _FREE:
        if stored.get(name) != wanted[name] and not (name == "num_shards" and config.servers):
            raise ValueError(
                f"--resume goes on with the run in {config.output}, whose {name} is {stored.get(name)}, "
                f"not {wanted[name]}: give the same settings"
            )


def step_to_resume(directory: Path, client: WeightClient) -> int:
    """The newest step of which there are a file in `directory` and a checkpoint on all shards.

    Raises:
        ValueError: there is none.
    """
    kept = {known.name for known in client.checkpoints()}
    for step in reversed(saved_steps(directory)):
        if _name(step) in kept:
            return step
    raise ValueError(
        f"there is no checkpoint to go on from: {directory} has files for steps {saved_steps(directory)}, "
        f"the weight servers keep {sorted(kept)}"
    )


def roll_back(client: WeightClient, step: int) -> None:
    """Takes the rows back to a checkpoint's."""
    client.rollback(_name(step))


def saved_steps(directory: Path) -> list[int]:
    """Steps of the checkpoint files, ascending."""
    return sorted(int(path.stem.removeprefix("step-")) for path in directory.glob("step-*.safetensors"))


def load(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes model and optimizer what they were after `step` updates.

    Raises:
        ValueError: the file is damaged, or of another format or model.
    """
    path = _path(directory, step)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if (metadata.get("format"), metadata.get("step")) != (_FORMAT, str(step)):
            raise ValueError(f"{path} is no checkpoint of step {step} in format {_FORMAT}")
        model.load_state_dict(_with_prefix(tensors, _MODEL))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): remove it to go on from an older one"
        ) from None
    momentum = _with_prefix(tensors, _MOMENTUM)
    for name, parameter in model.named_parameters():
        if name in momentum:
            optimizer.state[parameter]["momentum_buffer"] = momentum[name].to(parameter.device)


def _write(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes the file whole or not at all."""
    tensors = {_MODEL + name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        momentum_buffer = optimizer.state[parameter].get("momentum_buffer")
        if momentum_buffer is not None:
            tensors[_MOMENTUM + name] = momentum_buffer.detach().cpu().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": _FORMAT, "step": str(step)})
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_prefix(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _name(step: int) -> str:
    return f"step-{step:012d}"


def _path(directory: Path, step: int) -> Path:
    return directory / f"{_name(step)}.safetensors"
