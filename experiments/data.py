"""What cells need and has to be made when one first needs it: a rendered data set."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from experiments.glyphs import CHARACTERS, MANIFEST, SPLITS, make_glyphs
from trainer.config import TrainConfig
from trainer.data.config import SIZES as ALL_IMAGES

GLYPHS, FEW_GLYPHS = "{glyphs}", "{few-glyphs}"
"""In settings, for data_dir: where `with_data` has the glyphs, so that a cell's identity names no place."""
_SIZES = {GLYPHS: SPLITS, FEW_GLYPHS: {"train": 55, "test": 20}}
"""Images of each character."""


def num_images(config: TrainConfig) -> int:
    """N of a cell's settings."""
    sizes = _SIZES.get(str(config.data.data_dir))
    return sizes["train"] * len(CHARACTERS) if sizes else config.data.num_images or ALL_IMAGES[config.data.dataset]


def with_data(config: TrainConfig, folder: Path = Path("data")) -> TrainConfig:
    """The settings with the place of their data set, which is made in `folder` unless it is there; processes that need
    it at the same time wait for the first of them.

    Raises:
        ValueError: it cannot be made, or another one is in its place.
    """
    if config.data.dataset == "cifar-10" and (folder / "cifar-10").is_dir():
        return config.with_settings(data_dir=folder / "cifar-10")  # otherwise torchvision's download
    sizes = _SIZES.get(str(config.data.data_dir))
    if sizes is None:
        return config
    output = folder / str(config.data.data_dir).strip("{}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{output.name}-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / MANIFEST).exists():
            make_glyphs(output, sizes)
        found = json.loads((output / MANIFEST).read_text())
    if (found["images_of_each_character"], found["seed"]) != (sizes, 0):
        raise ValueError(f"{output} has other glyphs than the tables': move it elsewhere")
    return config.with_settings(data_dir=output)
