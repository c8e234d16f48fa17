"""A frozen encoder, and the batches of whole images to evaluate it on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor, nn

from trainer.data import TrainImages
from trainer.data.pixels import PixelScale, normalise
from weightserver.common.background import computed_ahead
from weightserver.torch import to_device


class Frozen:
    """An encoder in eval mode whose state nothing changes."""

    def __init__(self, encoder: nn.Module, pixels: PixelScale, device: torch.device, *, bfloat16: bool = False) -> None:
        self._encoder = encoder.to(device).eval()
        self._before = {name: value.clone() for name, value in encoder.state_dict().items()}
        self._bfloat16 = bfloat16
        self.pixels, self.device = pixels, device
        self._is_finite = torch.ones((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features float32 [B, d] of normalised images."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            features: Tensor = self._encoder(images.contiguous(memory_format=torch.channels_last))
        features = features.float().flatten(1)
        self._is_finite &= features.isfinite().all()  # read in `check`, since that waits for the GPU
        return features

    def of_pixels(self, images: Tensor) -> Tensor:
        """Features float32 [B, d] of images uint8 [B, C, H, W]."""
        return self(normalise(to_device(images, self.device), self.pixels))

    def check(self) -> None:
        """Raises RuntimeError if a parameter or a BatchNorm buffer has changed, ValueError for infinite features."""
        for name, value in self._encoder.state_dict().items():
            if not torch.equal(value.nan_to_num(), self._before[name].nan_to_num()):
                raise RuntimeError(f"{name} of the frozen encoder has changed: its evaluation is void")
        if not self._is_finite:
            raise ValueError("the encoder's features are not all finite: are its weights damaged?")


def centres(images: TrainImages, side: int | None, ids: Tensor, batch_size: int) -> Iterator[Tensor]:
    """Batches uint8 [b, C, side, side] of the centre squares of images `ids` (int64 [n]), whole images for side None.

    The next batch is decoded while the caller uses the last one.
    """
    edge = 0 if side is None else (images.shape[-1] - side) // 2
    inner = slice(edge, None if side is None else edge + side)
    batches = map(images.__getitem__, torch.split(ids, batch_size))
    with closing(computed_ahead(batches, ahead=1, name="batches")) as decoded:
        for batch in decoded:
            yield batch[..., inner, inner]
