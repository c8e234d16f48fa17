"""The scale of pixels: measured or known, stored with the encoder, equal in training and evaluation; old runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.bars import write_bars
from tests.helpers.small_run import losses, small_run
from trainer.config import TrainConfig
from trainer.data import load_dataset
from trainer.data.pixels import IMAGENET, MINUS_ONE_TO_ONE, PixelScale, measured, normalise
from trainer.evaluate.__main__ import main as evaluate
from trainer.loop import train
from trainer.model import EncoderConfig, load_encoder
from trainer.presets import PRESETS
from trainer.torchvision_schemas import import_module

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EncoderConfig(width=8, stem_stride=2, blocks=(1,))
SCALE = ("pixel_mean", "pixel_std")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("idx"), num_train=120)


def a_run(data_dir: Path, output: Path, **changes: Any) -> TrainConfig:
    settings = {"dataset": "idx", "data_dir": data_dir, "num_images": None, "encoder": SMALL, "rows": "dense"}
    return small_run(output, **settings | changes)


def test_pixels_are_scaled_as_by_torchvision() -> None:
    images = torch.randint(0, 256, (3, 3, 9, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = import_module("torchvision.transforms.functional").normalize(images / 255, *map(list, IMAGENET))
    torch.testing.assert_close(normalise(images, IMAGENET), expected, rtol=0, atol=1e-6)
    assert torch.equal(normalise(images), images.float() / 127.5 - 1)  # every bit, as before there was a choice


def test_images_in_memory_are_measured() -> None:
    images = torch.randint(0, 200, (11, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, pixels = measured(images), images.double() / 255
    np.testing.assert_allclose(found.mean, pixels.mean(dim=(0, 2, 3)), atol=6e-5)
    np.testing.assert_allclose(found.std, pixels.std(dim=(0, 2, 3), correction=0), atol=6e-5)
    assert measured(torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)) == PixelScale((0.2,), (round(1 / 255, 4),))


def test_each_data_set_has_a_scale() -> None:
    assert load_dataset("fashion-mnist").pixels == PixelScale((0.286,), (0.353,))
    assert load_dataset("synthetic", num_images=10).pixels == MINUS_ONE_TO_ONE
    assert all(
        config.model.encoder.pixel_mean is None for _, config in PRESETS.values()
    )  # that of the images, whichever
    colour: dict[str, Any] = {"in_channels": 3, "image_size": 16, "name": "none"}
    assert EncoderConfig(**colour, pixel_mean=IMAGENET.mean, pixel_std=IMAGENET.std).pixels == IMAGENET


def test_training_and_evaluation_use_the_images_own_scale(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(data_dir, tmp_path / "run", steps=8, evaluate=True)
    result = train(run)
    scale = load_dataset("idx", data_dir).pixels
    assert 0.1 < scale.mean[0] < 0.4
    stored = json.loads((run.run.output / "config.json").read_text())["encoder"]
    assert PixelScale(*(tuple(stored[name]) for name in SCALE)) == scale
    assert load_encoder(run.run.output / "encoder.safetensors")[1].pixels == scale == result.model.config.pixels
    step = json.loads((run.run.output / "summary.json").read_text())
    assert evaluate(["linear-cached", "--run", str(run.run.output)]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == step["linear_top1"]
    same, other = (
        a_run(data_dir, tmp_path / name, steps=8, encoder=replace(SMALL, pixel_mean=mean, pixel_std=std))
        for name, mean, std in (("same", *scale), ("other", (0.5,), (0.5,)))
    )
    train(same)
    train(other)
    assert losses(same.run.output) == losses(run.run.output)
    assert losses(other.run.output) != losses(run.run.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pixel_mean": (0.5,)}, "give both or neither"),
        ({"pixel_mean": (0.5, 0.5), "pixel_std": (0.5,)}, "do not match 1 channels"),
        ({"pixel_mean": (), "pixel_std": (0.5,)}, "do not match 1 channels"),
        ({"pixel_mean": (0.5,), "pixel_std": (0.0,)}, "deviations above 0"),
        ({"pixel_mean": (127.5,), "pixel_std": (127.5,)}, "means of 0 to 1"),
        ({"pixel_mean": (float("nan"),), "pixel_std": (0.5,)}, "means of 0 to 1"),
    ],
)
def test_impossible_scales(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**options).check()
