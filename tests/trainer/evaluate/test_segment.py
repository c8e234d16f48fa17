"""Cityscapes by a small ResNet: coloured regions are learned, resumption, ranks, and damaged data.

As a script (under torchrun) this file is one rank: it segments the data set in a folder, and prints its result.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.made_cityscapes import file_names, make_cityscapes
from trainer.data.pixels import IMAGENET
from trainer.distributed import process_group
from trainer.evaluate.progress import Advance, Progress
from trainer.evaluate.segment import SegmentConfig, SegmentResult, segment
from trainer.model import EncoderConfig, TorchvisionEncoder
from trainer.torchvision_schemas import import_module
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
ENCODER_CONFIG = EncoderConfig(
    name="resnet10", in_channels=3, image_size=64, pixel_mean=IMAGENET.mean, pixel_std=IMAGENET.std
)
CONFIG = SegmentConfig(iterations=3, batch_size=3, crop_size=33, learning_rate=0.05)


def small_resnet() -> nn.Module:
    """A torchvision ResNet of one block in each stage."""
    resnet = import_module("torchvision.models.resnet")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TorchvisionEncoder(resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])).eval()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_cityscapes(tmp_path)


def segmented(directory: Path, config: SegmentConfig = CONFIG, **options: object) -> SegmentResult:
    return segment(small_resnet(), ENCODER_CONFIG, directory, config, **options)  # type: ignore[arg-type]


@pytest.mark.guard
def test_learns_regions_by_their_colour_except_from_a_dead_encoder(directory: Path) -> None:
    config = replace(CONFIG, iterations=12, batch_size=4, crop_size=65)
    encoder = small_resnet()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    result = segment(encoder, ENCODER_CONFIG, directory, config)
    assert result.miou > 65
    assert {name for name, value in result.iou.items() if value} >= {"road", "sky", "car"}
    assert (result.num_train_images, result.num_val_images) == (6, 3)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items()), "it is copied"
    for parameter in encoder.parameters():
        nn.init.zeros_(parameter)
    assert segment(encoder, ENCODER_CONFIG, directory, config).miou < 40


def interrupted_after(num_iterations: int) -> Progress:
    @contextmanager
    def progress(description: str, total: int) -> Iterator[Advance]:
        done = 0

        def advance(n: int = 1, **shown: Tensor) -> None:
            nonlocal done
            done += n
            if description == "training" and done == num_iterations:
                raise OSError("out of power")

        yield advance

    return progress


@pytest.mark.guard
def test_a_resumed_training_equals_an_uninterrupted_one(directory: Path) -> None:
    whole, other = directory / "whole.safetensors", directory / "other.safetensors"
    config = replace(CONFIG, iterations=5, checkpoint_every=2)
    result = segmented(directory, config, state_file=whole)
    with pytest.raises(OSError, match="out of power"):
        segmented(directory, config, state_file=other, progress=interrupted_after(3))
    assert segmented(directory, config, state_file=other) == result
    resumed, expected = load_file(other), load_file(whole)  # the order of a file's metadata is random
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())
    assert segmented(directory, replace(config, checkpoint_every=1), state_file=other) == result, "only validation"
    with pytest.raises(ValueError, match=r"other.safetensors is the state of other settings, images or weights: remo"):
        segmented(directory, replace(config, learning_rate=0.1), state_file=other)
    other.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cannot read the state .*other.safetensors \(.*\): remove it to start over"):
        segmented(directory, config, state_file=other)


def test_a_diverging_training_ends(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"the loss is nan in iteration \d: give a lower --learning-rate"):
        segmented(directory, replace(CONFIG, learning_rate=1e30))


def test_rejects_settings() -> None:
    for options, message in [
        ({"iterations": 0}, "--iterations must be at least 1, got 0"),
        ({"crop_size": 0}, "--crop-size must be at least 1"),
        ({"learning_rate": float("nan")}, "--learning-rate must be positive and finite"),
        ({"min_scale": 3.0}, "--min-scale 3.0 is above --max-scale 2.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            SegmentConfig(**options).check()  # type: ignore[arg-type]
    assert SegmentConfig() == SegmentConfig(
        iterations=60_000, batch_size=8, crop_size=769, min_scale=0.5, max_scale=2.0, learning_rate=0.01
    )


# ---- what is damaged is found before the training


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def relabelled(path: Path) -> None:
    ids = np.array(Image.open(path))
    ids[5, 7] = 34
    Image.fromarray(ids).save(path)


def smaller(path: Path) -> None:
    Image.fromarray(np.array(Image.open(path))[:, 1:]).save(path)


def coloured(path: Path) -> None:
    Image.open(path).convert("RGB").save(path)


IMAGE, LABEL = 0, 1


@pytest.mark.parametrize(
    ("split", "kind", "damage", "message"),
    [
        (
            "val",
            IMAGE,
            truncated,
            r"ulm_000001_000019_leftImg8bit.png is not a complete PNG image \(image file is trunc",
        ),
        ("val", LABEL, truncated, r"ulm_000001_000019_gtFine_labelIds.png is not a complete PNG image \("),
        ("train", LABEL, truncated, r"ulm_000001_000019_gtFine_labelIds.png is not a complete PNG image \("),
        ("train", IMAGE, lambda path: path.write_bytes(b""), r"leftImg8bit.png is not a complete PNG image \("),
        ("val", LABEL, relabelled, "labelIds.png has the label id 34, but Cityscapes has 0..33: restore it"),
        ("train", LABEL, smaller, "labelIds.png has 95×64 pixels, but its image has 96×64: restore both from"),
        ("val", IMAGE, smaller, "labelIds.png has 96×64 pixels, but its image has 95×64: restore both from"),
        ("train", LABEL, coloured, "labelIds.png has pixels of mode RGB, not label ids of 8 bits: restore it"),
        ("val", LABEL, Path.unlink, "leftImg8bit.png has no labels ulm/ulm_000001_000019_gtFine_labelIds.png in .*val"),
        ("val", IMAGE, Path.unlink, "labelIds.png has no image ulm/ulm_000001_000019_leftImg8bit.png in .*/val: add"),
    ],
)
def test_rejects_damaged_data(
    directory: Path, split: str, kind: int, damage: Callable[[Path], object], message: str
) -> None:
    damage(file_names(directory, split, 1)[kind])
    with pytest.raises(ValueError, match=message) as caught:
        segmented(directory, progress=interrupted_after(0))
    assert "\n" not in str(caught.value)


def test_rejects_missing_folders(directory: Path) -> None:
    (directory / "gtFine/val").rename(directory / "gtFine/other")
    with pytest.raises(ValueError, match=r"gtFine/val is missing: extract Cityscapes' gtFine_trainvaltest.zip in"):
        segmented(directory)
    (directory / "gtFine/val/ulm").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"gtFine/val has no CITY/\*_gtFine_labelIds.png: extract Cityscapes' gtFine"):
        segmented(directory)
    with pytest.raises(ValueError, match="leftImg8bit/train is missing"):
        segmented(directory / "nowhere")


def test_a_truncated_training_image_ends_the_training(directory: Path) -> None:
    truncated(file_names(directory, "train", 1)[IMAGE])
    with pytest.raises(ValueError, match=re.escape("ulm_000001_000019_leftImg8bit.png is not a complete PNG image")):
        segmented(directory)


def test_rejects_more_ranks_than_images_of_a_batch(directory: Path) -> None:
    with pytest.raises(ValueError, match="--batch-size 3 leaves some of 4 ranks without images"):
        segmented(directory, ranks=Ranks(world_size=4))


# ---- ranks


@pytest.mark.guard
def test_two_ranks_have_the_result_of_one(directory: Path) -> None:
    """Three images a batch and three validation images: the ranks have unequal parts."""
    state = directory / "one.safetensors"
    result = segmented(directory, state_file=state)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.trainer.evaluate.test_segment", str(directory)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found == [found[0]] * 2
    assert found[0]["miou"] == pytest.approx(result.miou, abs=0.1)
    weights, expected = load_file(directory / "ranks.safetensors"), load_file(state)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        difference = (value.double() - expected[name].double()).norm()
        assert difference <= 1e-3 * expected[name].double().norm(), name


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with process_group(torch.device("cpu")) as ranks:
        result = segmented(folder, ranks=ranks, state_file=folder / "ranks.safetensors")
        sys.stdout.write(json.dumps(asdict(result)) + "\n")  # at once: ranks share the pipe
