"""The model card of an exported encoder: Markdown with the header that model hubs read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from trainer.config import RESUMABLE
from trainer.data.config import SourceOptions
from trainer.data.pixels import PixelScale
from trainer.encoder_config import OF_SMALL
from trainer.run.directory import flat, number
from trainer.run.result_names import in_words
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
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the library's model."""


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
    def had_labels(self) -> bool:
        """Whether the run trained on labels."""
        return self.settings.get("labels") is not None

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
    encoder: LibraryEncoder, origin: Origin, *, image_size: int, resized: int, is_grey: bool, file: str, digest: str
) -> str:
    """Renders the card of the encoder in `file` with the SHA-256 `digest`, trained on images of `image_size` pixels and
    evaluated on the centres of images whose shorter side has `resized` pixels."""
    settings = flat({name: value for name, value in origin.settings.items() if name not in RESUMABLE})
    unused = {f"encoder.{name}" for name in OF_SMALL if settings.get("encoder.name") != "small"}
    return _TEMPLATES.get_template("model_card.md.jinja").render(
        encoder=encoder,
        origin=origin,
        small=SMALL_IN_TIMM,
        image_size=image_size,
        resized=resized,
        is_grey=is_grey,
        file=file,
        digest=digest,
        results=in_words(origin.summary),
        settings={name: value for name, value in settings.items() if value is not None and name not in unused},
    )


def _listed(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{number:.6g}" for number in numbers) + "]"


def _attribute(path: str) -> str:
    """The path of a module in Python syntax: classifier.3 is classifier[3]."""
    return re.sub(r"\.(\d+)", r"[\1]", path)


_TEMPLATES = Environment(
    loader=PackageLoader("trainer.export", "."),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # Markdown
)
_TEMPLATES.filters |= {"listed": _listed, "attribute": _attribute, "number": number, "repr": repr}
