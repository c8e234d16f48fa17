"""The model card of an exported encoder: Markdown with the header that model hubs read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.config import RESUMABLE
from trainer.data.config import SourceOptions
from trainer.data.decode import decoded_side
from trainer.data.pixels import PixelScale
from trainer.run.directory import flat, number
from trainer.settings import settings_of

SMALL_IN_TIMM = "pic_small"
"""Name of the encoder "small" in timm, once the Python file of that name beside the weights is imported."""


@dataclass(frozen=True)
class LibraryEncoder:
    """An encoder in the form of a library."""

    library: str
    name: str
    """The architecture's name in the library."""
    in_channels: int
    pixels: PixelScale
    """One number for each of in_channels."""
    tensors: dict[str, Tensor]
    """Weights under the library's names, without a classifier."""
    last: str = ""
    """torchvision: the linear layer to replace by nn.Identity."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that an encoder comes from."""

    settings: dict[str, Any]
    summary: dict[str, Any]
    """Results; empty for a checkpoint."""
    num_images: int | None = None
    """Images that the run trained on; None if unknown."""
    checkpoint: str
    """Name of the checkpoint; empty for the end of the run."""
    licence: str

    @property
    def dataset(self) -> str:
        """Name of the data set, or of the folder with the images."""
        name, directory = str(self.settings.get("dataset", "unknown")), self.settings.get("data_dir")
        return Path(directory).name or name if name in ("folder", "packed") and directory else name

    @property
    def images(self) -> str:
        """How many images, if that is known."""
        return "images" if self.num_images is None else f"{self.num_images:,} images"

    @property
    def reading(self) -> str:
        """How the run read pixels of more than 8 bits and a fourth channel, if not as usual."""
        source, lines = settings_of(SourceOptions, self.settings), ""
        if source.pixel_range:
            black, white = source.pixel_range
            lines += f" Of pixels of more than 8 bits, {black:g} was read as 0 and {white:g} as 1 (--pixel-range)."
        if source.alpha == "ignore":
            lines += " A fourth channel was left out (--alpha ignore)."
        return lines


def model_card(
    encoder: LibraryEncoder, origin: Origin, *, image_size: int, is_grey: bool, file: str, digest: str
) -> str:
    """Renders the card of the encoder in `file` with the SHA-256 `digest`, trained on images of `image_size` pixels."""
    return "\n".join(
        [
            _introduction(encoder, origin),
            _input(encoder, origin.reading, image_size=image_size, is_grey=is_grey, file=file),
            _run(origin),
            f"## File\n\n`{file}`, {len(encoder.tensors)} tensors, SHA-256 `{digest}`.\n",
        ]
    )


def _introduction(encoder: LibraryEncoder, origin: Origin) -> str:
    state = (
        f"checkpoint {origin.checkpoint} of a run, not evaluated"
        if origin.checkpoint
        else "the state at the end of its run"
    )
    form = "as an ONNX graph" if encoder.library == "onnx" else f"in the keys of {encoder.library}"
    return f"""---
license: {origin.licence}
library_name: {encoder.library}
tags: [image-feature-extraction, self-supervised, parametric-instance-classification]
---

# {encoder.name}, trained on {origin.dataset} by instance classification

An image encoder {form}. It was trained on {origin.images}, without reading
labels, by Parametric Instance Classification (Cao et al., NeurIPS 2020, arXiv 2006.14618): each image is its own class.
This is {state}. It has no classifier; its output is one feature vector per image, to compare by cosine similarity or to
use as input of a linear layer.
"""


def _input(encoder: LibraryEncoder, reading: str, *, image_size: int, is_grey: bool, file: str) -> str:
    channels = "RGB" if encoder.in_channels == 3 else "grey"
    grey = " Repeat a grey image three times." if is_grey and encoder.in_channels == 3 else ""
    ways = {"timm": _by_timm, "torchvision": _by_torchvision, "onnx": _by_onnx}
    return f"""## How to load it

{ways[encoder.library](encoder, image_size, file)}

Input: {channels} images float32 [B, {encoder.in_channels}, H, W]: pixels in 0..1 minus their mean
{_listed(encoder.pixels.mean)}, divided by their standard deviation {_listed(encoder.pixels.std)}; trained at
{image_size} px.{grey}{reading}
"""


def _run(origin: Origin) -> str:
    results = _table("result", {key: value for key, value in flat(origin.summary).items() if value is not None})
    settings = flat({key: value for key, value in origin.settings.items() if key not in RESUMABLE})
    licence = "not stated by the exporter" if origin.licence == "unknown" else origin.licence
    return f"""## Results

{results or "None: not evaluated."}

## Settings of the run

{_table("setting", {name: value for name, value in settings.items() if value is not None})}

## Licence

Licence of the weights: {licence}. Permitted uses may also depend on the images of {origin.dataset}.
"""


def _by_timm(encoder: LibraryEncoder, image_size: int, file: str) -> str:
    registers = (
        f"import {encoder.name}  # {encoder.name}.py of this directory\n" if encoder.name == SMALL_IN_TIMM else ""
    )
    return f"""```python
import timm
{registers}model = timm.create_model("local-dir:.", pretrained=True).eval()  # the path of this directory
preprocess = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```"""


def _by_onnx(encoder: LibraryEncoder, image_size: int, file: str) -> str:
    return f"""```python
import onnxruntime
session = onnxruntime.InferenceSession("{file}")
(features,) = session.run(None, {{"images": images}})  # NumPy, prepared as below; any number of images
```"""


def _by_torchvision(encoder: LibraryEncoder, image_size: int, file: str) -> str:
    mean, std = map(_listed, encoder.pixels)
    return f"""```python
import torch, torchvision
from safetensors.torch import load_file
from torchvision.transforms import v2
model = torchvision.models.get_model("{encoder.name}", weights=None)
model.{_attribute(encoder.last)} = torch.nn.Identity()
model.load_state_dict(load_file("{file}"))
model.eval()
preprocess = v2.Compose([v2.ToImage(), v2.RGB(), v2.Resize({decoded_side(image_size)}), v2.CenterCrop({image_size}),
                         v2.ToDtype(torch.float32, scale=True), v2.Normalize({mean}, {std})])
```"""


def _listed(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"


def _attribute(path: str) -> str:
    """The path of a module in Python syntax: classifier.3 is classifier[3]."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


def _table(title: str, values: dict[str, Any]) -> str:
    rows = [f"| {name} | {number(value)} |" for name, value in values.items()]
    return "\n".join([f"| {title} | |", "|---|---|", *rows]) if rows else ""
