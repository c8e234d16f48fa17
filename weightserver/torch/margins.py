"""Margins of a cosine softmax: an image's own classes must win by more than a hair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weightserver.core.arrays import checked_number
from weightserver.core.errors import ArgumentError

MarginKind = Literal["none", "cosface", "arcface", "adaface"]
MARGINS: tuple[MarginKind, ...] = ("none", "cosface", "arcface", "adaface")
DEFAULT_SIZES: dict[MarginKind, float] = {"none": 0.0, "cosface": 0.35, "arcface": 0.5, "adaface": 0.4}
"""Margins of the papers' large experiments."""

_SMALLEST_SQUARED_SINE = 1e-7
"""Below it, within 0.02° of 0 or π, sin θ is constant: its slope −cos θ / sin θ would be infinite at cos θ = ±1."""
_CONCENTRATION = 0.333
"""h of AdaFace: about two thirds of the images have a quality within ±h."""
_LEAST_NORM, _GREATEST_NORM = 1e-3, 100.0
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True)
class Margin:
    """A margin m on the cosines of an image's own classes; other classes keep theirs.

    cosface: cos θ − m (Wang et al., CVPR 2018, Equation 4). arcface: cos(θ + m) (Deng et al., CVPR 2019, Equation 3);
    where θ + m would exceed π, cos θ − m·sin m, which decreases in θ as well, as in the authors' implementation.
    adaface: cos(θ − m·q) − m·(1 + q) (Kim et al., CVPR 2022, Equation 15), for an image of quality q (`quality_of`):
    that of cosface for the average image, nearly that of arcface for the worst; θ − m·q stays between 0 and π.

    Raises:
        ValueError: an unknown kind, or a size outside 0 < m < 1 (cosface) or 0 < m < π/2 (arcface, adaface).
    """

    kind: MarginKind
    size: float
    """m: of the cosine (cosface), of the angle in radians (arcface), or of both (adaface)."""

    def __post_init__(self) -> None:
        if self.kind not in MARGINS:
            raise ValueError(f"margin must be {', '.join(MARGINS[:-1])} or {MARGINS[-1]}, got {self.kind}")
        checked_number(self.size, "margin_size")
        largest = {"none": 0.0, "cosface": 1.0, "arcface": math.pi / 2, "adaface": math.pi / 2}[self.kind]
        if self.kind != "none" and not 0 < self.size < largest:
            raise ArgumentError(
                "margin_size",
                f"of {self.kind} must lie between 0 and {largest:.4g}, got {self.size:g}: "
                f"the usual one is {DEFAULT_SIZES[self.kind]}",
            )
        if self.kind == "none" and self.size:
            raise ArgumentError(
                "margin_size", f"{self.size:g} is for margin {', '.join(MARGINS[1:])}: omit it, or choose one"
            )

    @property
    def lowest_cosine(self) -> float:
        """The least value that a cosine can become."""
        sizes = {"arcface": self.size * math.sin(self.size), "adaface": 2 * self.size}
        return -1.0 - sizes.get(self.kind, self.size)

    def of(self, cosines: Tensor, quality: Tensor | None = None) -> Tensor:
        """Cosines (B, P) of own classes with the margin; at most the cosines themselves.

        Args:
            quality: (B,), of the images, for adaface; without it all are average.
        """
        if self.kind == "none":
            return cosines
        if self.kind == "cosface":
            return cosines - self.size
        if self.kind == "adaface":
            of_images = cosines.new_zeros(()) if quality is None else quality[:, None]
            return _turned(cosines, -self.size * of_images) - self.size * (1 + of_images)
        added = cosines * math.cos(self.size) - _sines(cosines) * math.sin(self.size)
        beyond = cosines <= math.cos(math.pi - self.size)
        return torch.where(beyond, cosines - self.size * math.sin(self.size), added)


def _sines(cosines: Tensor) -> Tensor:
    squared = (1 - cosines) * (1 + cosines)  # accurate near ±1
    return squared.clamp(min=_SMALLEST_SQUARED_SINE).sqrt()


def _turned(cosines: Tensor, angles: Tensor) -> Tensor:
    """cos(θ + angle), with θ + angle held between 0 and π; angles between −π/2 and π/2."""
    turned = cosines * angles.cos() - _sines(cosines) * angles.sin()
    turned = torch.where((angles < 0) & (cosines > angles.cos()), 1.0, turned)
    return torch.where((angles > 0) & (cosines < -angles.cos()), -1.0, turned)


def quality_of(norms: Tensor) -> Tensor:
    """AdaFace's quality of the images of a batch, from the norms (B,) of their embeddings: in −1..1, 0 on average.

    (norm − mean) / standard deviation · h, with the mean and deviation of this batch, so that the loss has no state.
    Kim et al. (Equation 14) take moving averages. Their program gives the newest batch `t_alpha` of the weight: 0.01 by
    default in training, which averages about a hundred batches; 1 is what this does.
    """
    if len(norms) < 2:
        return torch.zeros_like(norms)
    norms = norms.clamp(_LEAST_NORM, _GREATEST_NORM)
    deviation = norms.std() + _LEAST_DEVIATION
    return ((norms - norms.mean()) / deviation * _CONCENTRATION).clamp(-1, 1)


def margin_of(kind: MarginKind, size: float | None) -> Margin:
    """The margin of a kind and a size; without a size, the kind's usual one."""
    return Margin(kind, DEFAULT_SIZES.get(kind, 0.0) if size is None else size)


def with_margin(cosines: Tensor, labels: Tensor, margin: Margin, quality: Tensor | None = None) -> Tensor:
    """Replaces the cosines of own classes: (B, K), of labels int64 (B, P) with -1 for none, distinct. Quality: (B,)."""
    if margin.kind == "none" or not cosines.shape[1]:
        return cosines
    own, is_own = own_values(cosines, labels)
    return cosines.scatter_add(1, labels.clamp(min=0), torch.where(is_own, margin.of(own, quality) - own, 0.0))


def own_values(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each image's values at its labels, 0 for none, and where there are any: of (B, K) and (B, P), twice (B, P)."""
    is_own = labels >= 0
    if not values.shape[1]:
        return values.sum(dim=1, keepdim=True).expand(labels.shape), is_own
    return torch.where(is_own, values.gather(1, labels.clamp(min=0)), 0.0), is_own


def distinct(labels: Tensor) -> Tensor:
    """Labels (B, P) with -1 for those that an image has already, in ascending order."""
    ordered = labels.sort(dim=1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1)
