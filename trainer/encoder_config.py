"""Settings of the encoder and the projection head; `trainer.model` builds them."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trainer.data.pixels import MINUS_ONE_TO_ONE, PixelScale
from trainer.settings import Settings, check_of_table, named_by_flags
from weightserver.core.errors import ArgumentError

Norm = Literal["batch", "group"]
NORMS: tuple[Norm, ...] = get_args(Norm)
OF_SMALL = ("width", "blocks", "stem_stride", "pool_size", "norm")
"""Settings of an encoder that only "small" has."""
_INSTEAD = {"img_size": "give --encoder.image-size", "in_chans": "give --encoder.in-channels"}
_SET_BY_TRAINER = {
    *("num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
    *("weights", "weights_backbone", "model_name", "name"),
    *_INSTEAD,
}
"""Keywords of the libraries that are no options: the trainer chooses them, or they would load other weights."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """All that is needed to build an encoder; encoder files contain it."""

    name: str = "small"
    """"small", "timm:NAME", "torchvision:NAME" or just a torchvision NAME; "none" to measure all but the encoder."""
    in_channels: int = 1
    """Channels of an image, 1 or 3. torchvision's models need 3; grey images are repeated for them."""
    image_size: int = 28
    """Side of an image, in pixels."""
    options: tuple[str, ...] = ()
    """Keyword arguments NAME=VALUE of timm's or torchvision's model, as zero_init_last=False drop_path_rate=0.1. Values
    are Python literals, otherwise texts."""
    width: int = 32
    """Channels of the first stage of "small"; each further stage doubles them."""
    blocks: tuple[int, ...] = (1, 1, 1)
    """Residual blocks in each stage of "small"; each stage after the first halves the side."""
    stem_stride: int = 1
    """Stride of the first convolution of "small": 2 is four times as fast and loses detail."""
    pool_size: int = 1
    """Features of "small" are averages over a grid of pool_size × pool_size parts of the image; 1: over the whole."""
    norm: Norm = "batch"
    """Normalisation in "small": BatchNorm, or GroupNorm, with which an image's features depend on no other image."""
    pixel_mean: tuple[float, ...] | None = None
    """Mean that is subtracted from pixels in 0..1, one number for each channel or one for all. None: that of the
    training images (for decoded images, ImageNet's). Encoders of versions without this setting have 0.5."""
    pixel_std: tuple[float, ...] | None = None
    """Standard deviation by which pixels are then divided; needs --encoder.pixel-mean."""

    def check(self) -> None:
        """Raises ArgumentError for a value out of range, or for values that contradict each other."""
        if self.in_channels not in (1, 3):
            raise ArgumentError("in_channels", f"is {self.in_channels}: give 1 (grey) or 3 (colour)")
        for name in ("image_size", "width", "stem_stride", "pool_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, f"is {getattr(self, name)}: give at least 1")
        if not self.blocks or min(self.blocks) < 1:
            raise ArgumentError(
                "blocks", f"is {self.blocks}: give at least one stage, and at least one block per stage"
            )
        if self.norm not in NORMS:
            raise ArgumentError("norm", f"is {self.norm!r}: give {' or '.join(NORMS)}")
        if self.norm != "batch" and self.name not in ("small", "none"):
            raise ArgumentError("norm", f"is {self.norm!r}, but {self.name!r} has its own: choose small for it")
        self.keywords()
        mean, std = self.pixel_mean, self.pixel_std
        if (mean is None) != (std is None):
            raise ArgumentError("pixel_mean", f"is {mean} and the standard deviation {std}: give both or neither")
        if mean is None or std is None:
            return
        if not {len(mean), len(std)} <= {1, self.in_channels}:
            raise ArgumentError(
                "pixel_mean",
                f"{mean} and the standard deviation {std} do not match {self.in_channels} channels: "
                "give one number for each channel, or one for all",
            )
        if not all(0 <= number <= 1 for number in mean) or not all(0 < number < math.inf for number in std):
            raise ArgumentError(
                "pixel_mean", f"is {mean} and the standard deviation {std}: give means of 0 to 1 and deviations above 0"
            )

    def keywords(self) -> dict[str, Any]:
        """The `options` by name.

        Raises:
            ArgumentError: one that is not NAME=VALUE, is given twice or is the trainer's, or an encoder without any.
        """
        found: dict[str, Any] = {}
        for option in self.options:
            name, is_assigned, text = option.partition("=")
            if self.name in ("small", "none"):
                raise ArgumentError("options", f"{option} is for models of timm and torchvision, not for {self.name}")
            if not is_assigned or not name.isidentifier():
                raise ArgumentError("options", f"{option} is not NAME=VALUE: give zero_init_last=False, for example")
            if name in _SET_BY_TRAINER:
                raise ArgumentError("options", f"{option} sets what the trainer sets: {_INSTEAD.get(name, 'omit it')}")
            if name in found:
                raise ArgumentError("options", f"{option} sets {name} again: give it once")
            if text in ("true", "false", "none"):
                raise ArgumentError("options", f"{option} would be a text: give {name}={text.title()}")
            found[name] = _literal(text)
        return found

    @property
    def pixels(self) -> PixelScale:
        """The scale of the encoder's input."""
        if self.pixel_mean is None or self.pixel_std is None:
            return MINUS_ONE_TO_ONE
        return PixelScale(self.pixel_mean, self.pixel_std)


def _literal(text: str) -> Any:
    """A Python literal that JSON can hold, as exports do; otherwise the text."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Encoder and projection head."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """The network to be trained."""
    head_layers: Literal[1, 2] = 2
    """Layers of the projection head: two with a ReLU between them, or one linear layer (compared in Table 1)."""
    dim: int = 128
    """D, length of an embedding and of a row."""
    embedding_norm: Literal["none", "batch"] = "none"
    """batch: each value of the embeddings is centred and scaled by a batch's mean and variance over all ranks, without
    parameters. New rows then turn apart, not towards the direction that embeddings share at first."""

    def check(self) -> None:
        check_of_table(self, "dim")
        with named_by_flags("encoder"):
            self.encoder.check()
