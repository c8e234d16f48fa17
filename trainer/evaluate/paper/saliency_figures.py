"""Figures of saliency maps: images beside their maps, and the similarity of two encoders' maps (paper, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from weightserver.common.atomic_files import atomic_write

_INCHES = 2.2
_DPI = 150


class Picture(NamedTuple):
    """One row of the figure of maps."""

    title: str
    image: Tensor
    """uint8 [C, H, W], C is 1 or 3."""
    maps: Sequence[Tensor]
    """The map of each encoder, float32 [h, w]."""


def draw_maps(pictures: Sequence[Picture], names: Sequence[str], output: Path) -> None:
    """Draws each image beside its maps into the PNG `output` (figure 3a); names are those of the encoders.

    Saliency is drawn as a multiple of that of a uniform map, so that maps of different sizes can be compared; the maps
    of a row share their scale, from 0 to the largest value.
    """
    columns = 1 + len(names)
    figure = Figure(figsize=(_INCHES * columns, _INCHES * len(pictures)), layout="constrained")
    axes = figure.subplots(len(pictures), columns, squeeze=False)
    for picture, row in zip(pictures, axes, strict=True):
        image = picture.image.permute(1, 2, 0).numpy()
        row[0].imshow(image if image.shape[2] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
        row[0].set_title(picture.title, fontsize="small")
        maps = [values * values.numel() for values in picture.maps]
        largest = max(float(values.max()) for values in maps)
        for cell, values, name in zip(row[1:], maps, names, strict=True):
            cell.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=largest)
            cell.set_title(name, fontsize="small")
        for cell in row:
            cell.set_axis_off()
    _save(figure, output)


def draw_similarities(histogram: Sequence[int], accuracy: Sequence[float | None] | None, output: Path) -> None:
    """Draws the number of images by similarity, and the accuracy in percent by similarity (figures 3b and 3c)."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    width = 1 / len(histogram)
    centres = [(number + 0.5) * width for number in range(len(histogram))]
    panels: list[Axes] = list(figure.subplots(1, 1 if accuracy is None else 2, squeeze=False)[0])
    panels[0].bar(centres, histogram, width=width)
    panels[0].set_ylabel("images")
    if accuracy is not None:
        known = [(centre, value) for centre, value in zip(centres, accuracy, strict=True) if value is not None]
        panels[1].plot([centre for centre, _ in known], [value for _, value in known], marker="o")
        panels[1].set_ylabel("kNN top-1 (%)")
    for panel in panels:
        panel.set_xlim(0, 1)
        panel.set_xlabel("similarity of the saliency maps")
    _save(figure, output)


def _save(figure: Figure, output: Path) -> None:
    atomic_write(output, lambda path: figure.savefig(path, format="png", dpi=_DPI))
