"""An encoder in the keys of torchvision, timm or detectron2: a safetensors file, its SHA-256 and a model card.

How pixels are scaled is said where each library looks for it: timm's config.json, torchvision's transforms and
detectron2's PIXEL_MEAN and PIXEL_STD.

An architecture moves between torchvision and timm where both have a model of its name with the same keys and shapes
(plain ResNets, ResNeXts and wide ResNets do); before anything is written the other library's model is given the
weights, and its features must be the encoder's. detectron2 has its own names for a ResNet's parts; they follow its
tools/convert-torchvision-to-d2.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import RESUMABLE
from trainer.data.decode import decoded_side
from trainer.data.pixels import PixelScale
from trainer.model import EncoderConfig, TorchvisionEncoder, build_encoder
from trainer.run.directory import flat, number, read_config, read_encoder, read_summary
from weightserver.common.atomic_files import atomic_write, require_empty, sha256

LIBRARIES = ("torchvision", "timm", "detectron2")

_DETECTRON2 = {
    "resnet18": (18, 1, 64),
    "resnet34": (34, 1, 64),
    "resnet50": (50, 1, 64),
    "resnet101": (101, 1, 64),
    "resnet152": (152, 1, 64),
    "resnext50_32x4d": (50, 32, 4),
    "resnext101_32x8d": (101, 32, 8),
    "resnext101_64x4d": (101, 64, 4),
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
}
"""MODEL.RESNETS.DEPTH, NUM_GROUPS and WIDTH_PER_GROUP of what detectron2's build_resnet_backbone can build."""


@dataclass(frozen=True)
class LibraryEncoder:
    """An encoder as a library has it."""

    library: str
    name: str
    """The architecture, by the library's name; for detectron2 by torchvision's."""
    in_channels: int
    pixels: PixelScale
    """A number for each of in_channels."""
    tensors: dict[str, Tensor]
    """The library's keys, without a classifier."""
    last: str = ""
    """torchvision: the linear layer to put nn.Identity in place of."""


def export_encoder(
    run: Path, library: str, output: Path, *, checkpoint: str = "", licence: str = "unknown"
) -> list[Path]:
    """Writes a run's encoder, of its end or of a checkpoint, into the new directory `output`; returns the files.

    NAME-LIBRARY-xxxxxxxx.safetensors has the first digits of its SHA-256 in its name; beside it lie the whole of that,
    for `sha256sum -c`, and README.md, the model card; for timm config.json too, by which timm takes the directory for a
    model.

    Raises:
        ValueError: no run, no such checkpoint, an architecture that the library does not have, a directory in use.
        OSError: the files cannot be written.
    """
    settings = read_config(run)
    summary = {} if checkpoint else read_summary(run)
    encoder, config = read_encoder(run, checkpoint)
    converted = convert(encoder, config, library)
    require_empty(output)
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in converted.tensors.items()}
    unnamed = output / "encoder.safetensors"
    described = {"pixel_mean": json.dumps(converted.pixels.mean), "pixel_std": json.dumps(converted.pixels.std)}
    atomic_write(unnamed, lambda path: save_file(tensors, path, metadata={"format": "pt"} | described))
    digest = sha256(unnamed)
    weights = unnamed.rename(output / f"{converted.name}-{library}-{digest[:8]}.safetensors")
    checksum, card = weights.with_suffix(".sha256"), output / "README.md"
    text = model_card(
        converted, config, settings, summary, weights.name, digest, checkpoint=checkpoint, licence=licence
    )
    atomic_write(checksum, lambda path: path.write_text(f"{digest}  {weights.name}\n"))
    atomic_write(card, lambda path: path.write_text(text))
    if library != "timm":
        return [weights, checksum, card]
    fields = output / "config.json"
    content = json.dumps(_timm_config(converted, config), indent=2) + "\n"
    atomic_write(fields, lambda path: path.write_text(content))
    return [weights, checksum, card, fields]


def convert(encoder: nn.Module, config: EncoderConfig, library: str) -> LibraryEncoder:
    """The encoder in the library's keys; ValueError, in one line, where the library has no such model."""
    if library not in LIBRARIES:
        raise ValueError(f"library {library!r} is unknown: give {', '.join(LIBRARIES)}")
    family, _, name = config.name.rpartition(":")
    if config.name in ("small", "none"):
        raise ValueError(f"encoder {config.name!r} is this trainer's own, no library has it: use load_encoder")
    home, tensors = family or "torchvision", _library_tensors(encoder)
    in_channels = 3 if home == "torchvision" else config.in_channels
    pixels = config.pixels.channels(in_channels)
    last = encoder.last if isinstance(encoder, TorchvisionEncoder) else ""
    if library == home:
        return LibraryEncoder(library, name, in_channels, pixels, tensors, last)
    name = name.partition(".")[0]  # timm: without the tag of pretrained weights
    if library != "timm" and in_channels != 3:
        raise ValueError(f"{library}'s {name} takes colour images, this encoder grey ones: choose timm")
    if library == "detectron2":
        if name not in _DETECTRON2:
            raise ValueError(f"detectron2 has no counterpart of {config.name!r}: it has {', '.join(_DETECTRON2)}")
        renamed = {detectron2_key(key): tensors[key] for key in tensors}
        return LibraryEncoder(library, name, in_channels, pixels, renamed)
    counterpart = _counterpart(encoder, config, f"{library}:{name}", in_channels)
    last = counterpart.last if isinstance(counterpart, TorchvisionEncoder) else ""
    return LibraryEncoder(library, name, in_channels, pixels, tensors, last)


def detectron2_key(key: str) -> str:
    """detectron2's name of a torchvision ResNet's parameter or buffer."""
    key = key if key.startswith("layer") else f"stem.{key}"
    key = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", key)
    key = re.sub(r"\bbn(\d)", r"conv\1.norm", key)
    return key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


def _library_tensors(encoder: nn.Module) -> dict[str, Tensor]:
    """The weights under the library's own names."""
    library_model = encoder.classifier if isinstance(encoder, TorchvisionEncoder) else encoder
    return library_model.state_dict()


def _counterpart(encoder: nn.Module, config: EncoderConfig, name: str, in_channels: int) -> nn.Module:
    """The other library's model with the encoder's weights; ValueError where it is not the same function."""
    library = name.partition(":")[0]
    try:
        counterpart = build_encoder(replace(config, name=name, in_channels=in_channels)).eval()
    except ValueError as error:
        raise ValueError(f"{library} has no counterpart of {config.name!r}: {error}") from None
    model = counterpart.classifier if isinstance(counterpart, TorchvisionEncoder) else counterpart
    ours, theirs = _library_tensors(encoder), model.state_dict()
    differing = sorted(
        key
        for key in ours.keys() | theirs.keys()
        if key not in ours or key not in theirs or ours[key].shape != theirs[key].shape
    )
    if differing:
        raise ValueError(
            f"{library} has no counterpart of {config.name!r}: its model of that name has other parts, "
            f"{differing[0]} first"
        )
    model.load_state_dict(ours)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, config.in_channels, config.image_size, config.image_size, generator=generator) * 2 - 1
    with torch.no_grad():
        mine, other = encoder(images), counterpart(images.expand(-1, in_channels, -1, -1))
    if mine.shape != other.shape or not torch.allclose(mine, other, rtol=1e-4, atol=1e-5):
        raise ValueError(f"{library} has no counterpart of {config.name!r}: its model of that name computes otherwise")
    return counterpart


def model_card(
    converted: LibraryEncoder,
    config: EncoderConfig,
    settings: dict[str, Any],
    summary: dict[str, Any],
    file: str,
    digest: str,
    *,
    checkpoint: str,
    licence: str,
) -> str:
    """The card, Markdown with the header that model hubs read."""
    library, name = converted.library, converted.name
    dataset = settings.get("dataset", "unknown")
    state = f"checkpoint {checkpoint} of a run, not evaluated" if checkpoint else "the state at the end of its run"
    results = _table("result", {key: value for key, value in summary.items() if value is not None})
    chosen = {key: value for key, value in settings.items() if key not in RESUMABLE}
    grey = " Repeat a grey image three times." if config.in_channels < converted.in_channels else ""
    channels = "RGB" if converted.in_channels == 3 else "grey"
    weights_licence = "not stated by who exported it" if licence == "unknown" else licence
    return f"""---
license: {licence}
library_name: {library}
tags: [image-feature-extraction, self-supervised, parametric-instance-classification]
---

# {name}, trained on {dataset} by instance classification

An image encoder in the keys of {library}. It was trained without labels by Parametric Instance Classification (Cao et
al., NeurIPS 2020, arXiv 2006.14618): each image is a class of its own. This is {state}. It has no classifier; its
output is one feature vector an image, to be compared by cosine similarity or given to a linear layer.

## How to load it

{_loading(converted, config.image_size, file)}

Input: {channels} images float32 [B, {converted.in_channels}, H, W]: pixels in 0..1 less their mean
{_listed(converted.pixels.mean)}, divided by their standard deviation {_listed(converted.pixels.std)}; trained at
{config.image_size} px.{grey}

## Results

{results or "None: not evaluated."}

## Settings of the run

{_table("setting", flat(chosen))}

## Licence

Licence of the weights: {weights_licence}. What may be done with them may also depend on the images of {dataset}.

## File

`{file}`, {len(converted.tensors)} tensors, SHA-256 `{digest}`.
"""


def _timm_config(converted: LibraryEncoder, config: EncoderConfig) -> dict[str, Any]:
    """timm's description of a model, by whose pretrained_cfg its scripts prepare images."""
    return {
        "architecture": converted.name,
        "num_classes": 0,
        "model_args": {"in_chans": converted.in_channels},
        "pretrained_cfg": {
            "input_size": [converted.in_channels, config.image_size, config.image_size],
            "crop_pct": config.image_size / decoded_side(config.image_size),
            "interpolation": "bilinear",
            "mean": list(converted.pixels.mean),
            "std": list(converted.pixels.std),
            "num_classes": 0,
        },
    }


def _listed(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"


def _loading(converted: LibraryEncoder, image_size: int, file: str) -> str:
    if converted.library == "timm":
        return """```python
import timm
model = timm.create_model("local-dir:.", pretrained=True).eval()  # the path of this directory
preprocess = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```"""
    if converted.library == "torchvision":
        mean, std = map(_listed, converted.pixels)
        return f"""```python
import torch, torchvision
from safetensors.torch import load_file
from torchvision.transforms import v2
model = torchvision.models.get_model("{converted.name}", weights=None)
model.{_attribute(converted.last)} = torch.nn.Identity()
model.load_state_dict(load_file("{file}"))
model.eval()
preprocess = v2.Compose([v2.ToImage(), v2.RGB(), v2.Resize({decoded_side(image_size)}), v2.CenterCrop({image_size}),
                         v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std})])
```"""
    depth, groups, width = _DETECTRON2[converted.name]
    more = "\n    RES2_OUT_CHANNELS: 64" if depth < 50 else ""
    return f"""```python
import torch
from safetensors.torch import load_file
torch.save({{"model": load_file("{file}")}}, "encoder.pth")  # detectron2 reads no safetensors
```

```yaml
MODEL:
  WEIGHTS: encoder.pth
  PIXEL_MEAN: {_listed(tuple(255 * number for number in converted.pixels.mean))}
  PIXEL_STD: {_listed(tuple(255 * number for number in converted.pixels.std))}
  RESNETS:
    DEPTH: {depth}
    NUM_GROUPS: {groups}
    WIDTH_PER_GROUP: {width}
    STRIDE_IN_1X1: False
    NORM: SyncBN{more}
INPUT:
  FORMAT: RGB
```

The keys are those of the backbone, `model.backbone.bottom_up` where there is an FPN."""


def _attribute(path: str) -> str:
    """The path of a module as Python writes it: classifier.3 is classifier[3]."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def _table(title: str, values: dict[str, Any]) -> str:
    rows = [f"| {name} | {number(value)} |" for name, value in values.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows]) if rows else ""
