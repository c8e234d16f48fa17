"""Imports encoders that other trainers wrote: finds a model's weights among the tensors of a file.

A model's keys may stand under any prefix, such as state_dict.module.encoder_q. in a checkpoint of MoCo. The prefix is
the one under which the file has all of them; of several, as where it also has a moving average of the encoder, one is
to be chosen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.pixels import IMAGENET
from trainer.export.weights_file import WeightsFile, read_weights
from trainer.model import EncoderConfig, TorchvisionEncoder, build_model, library_model, measure_feature_dim
from trainer.torchvision_schemas import import_module

_COUNTER = "num_batches_tracked"
"""BatchNorm's number of batches, which changes no feature; old files do not have it."""
_NOT_WEIGHTS = {_COUNTER, "relative_position_index", "attn_mask", "total_ops", "total_params"}
"""Last parts of keys of which a file may have more: constants that libraries used to store, and counts of profilers."""
_MOST_SHOWN, _MOST_GROUPS = 3, 20


@dataclass(frozen=True)
class ImportedEncoder:
    """An encoder with the weights of a file, in eval mode, on the CPU."""

    encoder: nn.Module
    notes: list[str]
    """Lines that say what was taken from the file and what was not."""


@dataclass(frozen=True)
class _Match:
    """The tensors of a file under one prefix that are named like those of a model."""

    prefix: str
    paths: dict[str, str]
    """Path in the file of each of the model's keys that it has."""
    problems: list[str]
    """What is missing, or has another shape; empty if the match is complete."""


def import_encoder(path: Path, config: EncoderConfig, *, prefix: str | None = None) -> ImportedEncoder:
    """Builds an encoder with the weights in `path`, a checkpoint of torch.save or a safetensors file.

    Args:
        prefix: chooses among several encoders in a file: the whole path before the encoder's keys, or else names that
            stand together in it; "" for keys without a prefix.

    Raises:
        ValueError: the file is not a weights file, or needs more than tensors; its weights are of another model,
            incomplete, ambiguous or not finite; the model does not exist.
    """
    file = read_weights(path)
    encoder = build_model(config).encoder
    model = library_model(encoder)
    initial = model.state_dict()
    file, interpolated = _with_positions(file, model, initial)
    match = _choose(_matches(file, config.name, model, prefix), file, config.name)
    left_out = sorted(file.tensors.keys() - match.paths.values())
    _refuse_larger_model(match, left_out, _heads(encoder), file, config.name)
    weights, converted = _weights(file, match, initial)
    model.load_state_dict(initial | weights)
    num_features = measure_feature_dim(encoder.eval(), config)
    notes = [
        f"took {len(match.paths)} tensors of {config.name} under {match.prefix or 'no prefix'}",
        f"left out {_groups(left_out, match.prefix) or 'nothing'}",
        *(interpolated[path] for path in match.paths.values() if path in interpolated),
        *(f"converted {count} tensors from {dtype} to float32" for dtype, count in converted.items()),
        f"{num_features} features; {config.image_size} px images, pixel mean {_spaced(config.pixels.mean)}, standard "
        f"deviation {_spaced(config.pixels.std)}",
        *_pixel_note(encoder, config),
    ]
    return ImportedEncoder(encoder, notes)


def library_config(
    name: str,
    *,
    image_size: int = 224,
    in_channels: int = 3,
    pixel_mean: Sequence[float] | None = None,
    pixel_std: Sequence[float] | None = None,
) -> EncoderConfig:
    """The config of a model, torchvision:NAME, timm:NAME, or a torchvision NAME; pixels are on ImageNet's scale unless
    another is given.

    Raises:
        ValueError: values that contradict each other, or out of range; no name, or that of an encoder of our own.
    """
    if (pixel_mean is None) != (pixel_std is None):
        raise ValueError("--pixel-mean and --pixel-std belong together: give both or neither")
    family, _, short = name.rpartition(":")
    if short in ("", "small", "none"):
        raise ValueError(f"--model {short!r} is no library's: give torchvision:NAME or timm:NAME")
    return EncoderConfig(
        name=f"{family or 'torchvision'}:{short}",
        image_size=image_size,
        in_channels=in_channels,
        pixel_mean=tuple(pixel_mean or IMAGENET.mean),
        pixel_std=tuple(pixel_std or IMAGENET.std),
    )


# ---- names


def _matches(file: WeightsFile, name: str, model: nn.Module, prefix: str | None) -> list[_Match]:
    """The prefixes under which the file has most of the model's keys.

    Under the library's names, or the numbers of the model's parts in nn.Sequential(*model.children()), as
    lightly builds its backbones.
    """
    wanted = model.state_dict()
    numbers = {part: str(number) for number, (part, _) in enumerate(model.named_children())}
    numbered = {key: ".".join([numbers.get(key.split(".")[0], ""), *key.split(".")[1:]]) for key in wanted}
    keys = {numbered[key]: key for key in wanted} | {key: key for key in wanted}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in file.tensors:
        parts = path.split(".")
        for start in range(len(parts)):
            if key := keys.get(".".join(parts[start:])):
                found["".join(f"{part}." for part in parts[:start])][key] = path
    sizes = {candidate: sum(not key.endswith(_COUNTER) for key in paths) for candidate, paths in found.items()}
    chosen = _under(found, prefix)
    most = max((sizes[candidate] for candidate in chosen), default=0)
    if not most:
        where = "" if prefix is None else f" under --prefix {prefix!r}"
        raise ValueError(f"{file.path} has no keys of {name}{where}: its keys are {_first(list(file.tensors))}")
    best = [candidate for candidate in chosen if sizes[candidate] == most]
    return [_Match(candidate, found[candidate], _problems(file, wanted, found[candidate])) for candidate in best]


def _under(candidates: Collection[str], prefix: str | None) -> list[str]:
    """The prefix that --prefix names in whole, or else those of which it is a part; all if it is not given."""
    if prefix is None:
        return list(candidates)
    names = prefix.strip(".")
    whole = [candidate for candidate in candidates if candidate.rstrip(".") == names]
    return whole or [candidate for candidate in candidates if names and f".{names}." in f".{candidate}"]


def _problems(file: WeightsFile, wanted: dict[str, Tensor], paths: dict[str, str]) -> list[str]:
    """Why these tensors are not the model's: those that are missing, and those of another shape."""
    missing = [key for key in wanted if key not in paths and not key.endswith(_COUNTER)]
    differing = [
        f"{key} is {list(file.tensors[path].shape)}, not {list(wanted[key].shape)}"
        for key, path in paths.items()
        if file.tensors[path].shape != wanted[key].shape
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(wanted)} keys are missing ({_first(missing)})")
    if differing:
        problems.append(f"{len(differing)} tensors have another shape ({_first(differing)})")
    return problems


def _choose(matches: list[_Match], file: WeightsFile, model: str) -> _Match:
    """The match that is complete. Raises ValueError if none or several are."""
    complete = [match for match in matches if not match.problems]
    if not complete:
        best = matches[0]
        where = f"under {best.prefix} " if best.prefix else ""
        problems = " and ".join(best.problems)
        raise ValueError(f"{file.path} does not hold {model}: {where}{problems}: give its --model and --image-size")
    if len(complete) > 1:
        prefixes = [match.prefix or "no prefix (--prefix=)" for match in complete]
        raise ValueError(f"{file.path} holds {model} under {_first(prefixes)}: choose by --prefix")
    return complete[0]


def _refuse_larger_model(
    match: _Match, left_out: Sequence[str], heads: Collection[str], file: WeightsFile, model: str
) -> None:
    """Raises ValueError if the file has more inside the model's parts: a ResNet-101 has all keys of a ResNet-50."""
    parts = {path.removeprefix(match.prefix).partition(".")[0] for path in match.paths.values()}
    ignored = tuple(f"{head}." for head in heads)
    under = [path.removeprefix(match.prefix) for path in left_out if path.startswith(match.prefix)]
    more = [name for name in under if name.partition(".")[0] in parts and not name.startswith(ignored)]
    more = [name for name in more if name.rpartition(".")[2] not in _NOT_WEIGHTS]
    if more:
        raise ValueError(
            f"{file.path} holds another model than {model}: it has {len(more)} tensors more in the same parts "
            f"({_first(more)}): give its --model"
        )


def _heads(encoder: nn.Module) -> tuple[str, ...]:
    """The library's names of the classifier that the encoder was built without."""
    if isinstance(encoder, TorchvisionEncoder):
        return (encoder.last,)
    names = _timm_config(encoder).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


# ---- values


def _with_positions(
    file: WeightsFile, model: nn.Module, wanted: dict[str, Tensor]
) -> tuple[WeightsFile, dict[str, str]]:
    """The file with a transformer's positions interpolated to the model's grid of patches, and a line for each path."""
    to, grid = wanted.get("pos_embed"), getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if to is None or to.ndim != 3 or grid is None:
        return file, {}
    tensors, notes = dict(file.tensors), dict[str, str]()
    others = to.shape[1] - math.prod(grid)  # those of no patch
    for path, tensor in file.tensors.items():
        is_theirs = path.rpartition(".")[2] == "pos_embed" and tensor.ndim == 3 and tensor.shape[2] == to.shape[2]
        if not is_theirs or tensor.shape == to.shape or not _is_plain(tensor):
            continue
        side = math.isqrt(max(0, tensor.shape[1] - others))
        if side == 0 or tensor.shape != (1, side * side + others, to.shape[2]):
            continue
        resample = import_module("timm.layers").resample_abs_pos_embed
        tensors[path] = resample(tensor, list(grid), num_prefix_tokens=others)
        notes[path] = f"interpolated {path} from {side}×{side} to {grid[0]}×{grid[1]} patches"
    return replace(file, tensors=tensors), notes


def _weights(
    file: WeightsFile, match: _Match, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Counter[torch.dtype]]:
    """The model's weights by its keys, in its dtypes, and the numbers of tensors that were of another floating dtype.

    Raises:
        ValueError: tensors that are not plain floating-point numbers, or not finite.
    """
    weights, converted, broken = dict[str, Tensor](), Counter[torch.dtype](), list[str]()
    for key, path in match.paths.items():
        tensor, dtype = file.tensors[path], wanted[key].dtype
        if not _is_plain(tensor):
            raise ValueError(f"{file.path}: {path} is sparse, quantised or complex: give plain floating-point weights")
        if dtype.is_floating_point:
            if not tensor.is_floating_point():
                raise ValueError(f"{file.path}: {path} holds {tensor.dtype} numbers: give floating-point weights")
            if tensor.dtype != dtype:
                converted[tensor.dtype] += 1
                tensor = tensor.to(dtype)
            if not torch.isfinite(tensor).all():
                broken.append(path)
        weights[key] = tensor
    if broken:
        raise ValueError(
            f"{file.path} has NaN or infinite numbers in {len(broken)} tensors ({_first(broken)}): give another"
        )
    return weights, converted


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_complex())


# ---- notes


def _groups(left_out: Sequence[str], prefix: str) -> str:
    """The tensors that were not taken, counted by where their paths leave the prefix: state_dict.module.queue (1)."""
    ours, groups = prefix.split("."), Counter[str]()
    for path in left_out:
        parts = path.split(".")
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parts, ours, strict=False)))
        groups[".".join(parts[: shared + 1])] += 1
    shown = [f"{group} ({count})" for group, count in groups.items()]
    return ", ".join(shown[:_MOST_GROUPS]) + (", …" if len(shown) > _MOST_GROUPS else "")


def _pixel_note(encoder: nn.Module, config: EncoderConfig) -> list[str]:
    """A hint if timm's own weights of this name expect pixels on another scale."""
    mean, std = (_timm_config(encoder).get(name) for name in ("mean", "std"))
    if not mean or not std or config.pixels != IMAGENET or (mean, std) == IMAGENET:
        return []
    return [f"timm's own weights of this name expect --pixel-mean {_spaced(mean)} --pixel-std {_spaced(std)}"]


def _timm_config(encoder: nn.Module) -> dict[str, Any]:
    config: Any = getattr(encoder, "pretrained_cfg", None)
    return config if isinstance(config, dict) else {}


def _spaced(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")
