"""Reads weight files of other programs: checkpoints that torch.save wrote, and safetensors.

Such a file is not trusted. Of a checkpoint only tensors in plain containers are read, by torch.load with
weights_only=True, whose unpickler imports no module and calls no function that a file names. A file that needs more is
refused. Settings of a run and NumPy scalars, which many checkpoints contain besides the weights, become placeholders.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_HEAD_BYTES = 512
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_MAX_DEPTH = 10
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")
"""How torch's message names a class or function that the unpickler did not import."""
_IGNORED_CLASSES = (
    "argparse.Namespace",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
)
"""Replaced by a placeholder: the options of a run (DINO, MAE, timm) and its best accuracy."""


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file, on the CPU, by their path in its nested containers: state_dict.module.conv1.weight."""

    path: Path
    tensors: dict[str, Tensor]


def read_weights(path: Path) -> WeightsFile:
    """Reads a checkpoint of torch.save or a safetensors file; the kind is told by content, not by name.

    Tensors are mapped from the file where its format allows it, so that only those that are used take memory.

    Raises:
        ValueError: the file cannot be read, is of another kind, is damaged, holds no tensors, or needs classes.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}): give a file of weights") from None
    if head[8:9] == b"{":  # after the length of the header
        weights = _read_safetensors(path)
    elif head.startswith((_ZIP, _PICKLE)):
        content = _read_checkpoint(path, is_zip=head.startswith(_ZIP))
        weights = WeightsFile(path, dict(_named_tensors(content, "", set())))
    else:
        begins = f"begins with {head[:30]!r}" if head else "is empty"
        raise ValueError(f"{path} {begins}: give a file of torch.save or safetensors, downloaded or copied again")
    if not weights.tensors:
        raise ValueError(f"{path} holds no tensors with names: give a file with a model's state_dict")
    if strange := [name for name in weights.tensors if not name.isprintable()]:
        raise ValueError(f"{path} names a tensor {strange[0][:50]!r}: give another file")
    return weights


def _read_safetensors(path: Path) -> WeightsFile:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({_one_line(error)}): download or copy it again") from None
    if metadata.get("format", "").startswith("pic-"):
        raise ValueError(f"{path} was written by this trainer and needs no import: give --encoder or --run")
    return WeightsFile(path, tensors)


class _Placeholder:
    """Stands for an object of an ignored class, and keeps nothing of it."""

    def __new__(cls, *_: object) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _read_checkpoint(path: Path, *, is_zip: bool) -> Any:
    """The content of a checkpoint. Raises ValueError unless it consists of tensors in plain containers."""
    ignored: list[Any] = [(_Placeholder, name) for name in _IGNORED_CLASSES]
    try:
        with torch.serialization.safe_globals(ignored), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats; what matters raises
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # older files cannot be mapped
    except Exception as error:  # noqa: BLE001 - foreign bytes can make an unpickler raise anything
        if refused := _REFUSED.search(str(error)):
            raise ValueError(
                f"{path} contains {_one_line(refused[1])}, but only weights are loaded: save the model's state_dict "
                "alone, on a machine where you trust the file"
            ) from None
        if "TorchScript" in str(error):
            raise ValueError(f"{path} is a TorchScript program, not weights: save its state_dict") from None
        raise ValueError(f"{path} is damaged, incomplete or no checkpoint ({_one_line(error)}): get it again") from None


def _named_tensors(value: object, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested mappings, by path. A mapping that is reached again, under another name, is skipped."""
    if not isinstance(value, Mapping) or id(value) in seen or prefix.count(".") > _MAX_DEPTH:
        return
    seen.add(id(value))
    for key, item in value.items():
        if isinstance(item, Tensor):
            yield f"{prefix}{key}", item.detach()
        else:
            yield from _named_tensors(item, f"{prefix}{key}.", seen)


def _one_line(error: Exception | str) -> str:
    """A printable line that says what went wrong, without torch's advice to load the file in an unsafe way."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].removeprefix("Weights only load failed.")
    text = re.split("Check the documentation|In PyTorch 2.6", text)[0]
    line = " ".join(text.split()).split(". ")[0][:200] or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in line)
