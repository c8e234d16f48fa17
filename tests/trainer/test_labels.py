"""Runs whose images share classes: --labels, --negatives and --margin."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.small_run import NUM_IMAGES, PowerLoss, losses, power_loss_at, small_run
from trainer.arguments import parse_config
from trainer.build import _warn_of_few_classes
from trainer.classes import RunClasses, classes_of
from trainer.config import TrainConfig
from trainer.data import DATASETS, Dataset
from trainer.data.augment import AugmentationConfig
from trainer.loop import train
from trainer.model import EncoderConfig, load_encoder
from trainer.run.run_images import RunImages
from weightserver.torch import ClassOrder, RangesOrder
from weightserver.torch.windows import RowOrder

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_CLASSES = 60


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """A class map of 60 classes of 5 images each."""
    np.save(tmp_path / "labels.npy", np.random.default_rng(0).permutation(np.arange(NUM_IMAGES) % NUM_CLASSES))
    return tmp_path / "labels.npy"


@pytest.mark.slow
def test_a_supervised_run_resumes_bit_for_bit_with_its_class_map(
    labels: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"labels": str(labels), "negatives": "both", "num_negatives": 40, "steps": 26}
    whole = small_run(tmp_path / "whole", **changes)
    train(whole)
    assert "some windows" not in caplog.text, "at least 20 of 60 classes, more than the 16 images of a batch"

    with pytest.raises(PowerLoss):
        train(small_run(tmp_path / "run", **changes), on_step=power_loss_at(20))
    moved = tmp_path / "moved.csv"
    moved.write_text("\n".join(map(str, np.load(labels))))
    np.save(tmp_path / "other.npy", np.load(labels)[::-1])
    np.save(tmp_path / "fewer.npy", np.load(labels)[:-1])
    for other, message in (
        (None, "the run has a class map: give its --labels"),
        ("other.npy", "the class map is not that of the run"),
        ("fewer.npy", "--labels .* has 299 labels for 300 images: give one label for each image"),
    ):
        changed = changes | {"labels": other and str(tmp_path / other)}
        with pytest.raises(ValueError, match=message):
            train(small_run(tmp_path / "run", **changed, resume=True))
    train(small_run(tmp_path / "run", **changes | {"labels": str(moved)}, resume=True))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    ours, theirs = (load_encoder(tmp_path / n / "encoder.safetensors")[0].state_dict() for n in ("run", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    exported = ["rows", str(whole.run.output), "--output", str(tmp_path / "rows"), "--format", "npz"]
    subprocess.run([sys.executable, "-m", "trainer.export", *exported], check=True, timeout=240)
    with np.load(next((tmp_path / "rows").iterdir())) as file:
        assert np.array_equal(file["class"], RowOrder(NUM_CLASSES, 0).images(np.arange(NUM_CLASSES)))


def test_a_run_knows_its_class_map() -> None:
    images = RunImages(10, 10, ("a",), "b")
    assert RunImages.from_json(images.to_json()) == images
    assert images.resumed([10], ["a"], "b", extend=False) == images
    for had, given, message in (
        ("b", "", "the run has a class map: give its --labels"),
        ("b", "c", "the class map is not that of the run, to which its rows belong: give the run's"),
        ("", "b", "the run has a class for each image: omit --labels, or start another run"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(images, classes=had).resumed([10], ["a"], given, extend=False)


@pytest.mark.guard
def test_the_data_sets_own_labels_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four textures, numbered 0, 1, 2 and 4: the loss falls far below chance, kNN finds them."""
    noise = torch.randint(0, 60, (400, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows, columns = torch.meshgrid(torch.arange(16) // 2 % 2, torch.arange(16) // 2 % 2, indexing="ij")
    textures = torch.stack([rows, columns, rows ^ columns, torch.zeros_like(rows)]).to(torch.uint8)
    kinds = torch.arange(400) % 4
    images, found = noise + 150 * textures[kinds][:, None], torch.where(kinds == 3, 4, kinds)
    dataset = Dataset(train_images=images, train_labels=found, test_images=images[:80], test_labels=found[:80])
    monkeypatch.setitem(DATASETS, "idx", lambda _: dataset)
    config = small_run(
        tmp_path / "run",
        dataset="idx",
        num_images=None,
        labels="classes",
        num_negatives=4,
        window_size=400,
        window_stride=400,
        steps=60,
        evaluate=True,
        margin="cosface",
        margin_size=0.05,
        augmentation=AugmentationConfig(min_scale=0.5, jitter_probability=0.0, blur_probability=0.0),
        encoder=EncoderConfig(in_channels=1, image_size=16, width=8, stem_stride=2, blocks=(1, 1)),
    )
    assert classes_of(config.sampling, dataset).number == 4
    result = train(config)
    assert np.mean(losses(config.run.output)[-10:]) < 0.7 * np.log(4) < losses(config.run.output)[0]
    assert result.summary["knn_top1"] > 90
    assert json.loads((config.run.output / "config.json").read_text())["labels"] == "classes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--margin-size", "0.3"], "--margin-size 0.3 is for --margin cosface, arcface or adaface: omit it"),
        (["--margin", "cosface", "--margin-size", "3"], "--margin-size of cosface must lie between 0 and 1, got 3"),
        (["--softmax", "plain", "--margin", "arcface"], "--margin arcface is for --softmax cosine: omit it"),
        (["--recent-share", "0.7"], "--recent-share 0.7 is for --negatives both: omit it"),
        (["--negatives", "both", "--recent-share", "1.5"], "--recent-share must lie between 0 and 1, got 1.5"),
        (["--labels", ""], "--labels is empty: give 'classes', or a file"),
        (["--labels", "classes", "--resume", "--extend"], "--extend adds images, but --labels has no rows"),
    ],
)
def test_options_without_effect_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(["fashion-mnist", *options]).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": "classes"}, "--labels classes: these images have no labels: give a file"),
        ({"labels": "/no/such/labels.npy"}, "--labels /no/such/labels.npy: cannot read .*: give a .npy file"),
        ({"num_negatives": 61}, "--num-negatives is 61, but there are only 60 classes: choose fewer"),
        ({"negatives": "uniform", "num_negatives": 18}, "leaves 2 rows to sample, less than a block of 5"),
        ({"negatives": "both", "num_negatives": 20}, "--num-negatives is 20, of which 10 are recent ones, but a batch"),
        ({"capacity": 50}, "--capacity is 50, but the 3 steps that are requested in advance need 60: raise"),
    ],
)
def test_bad_classes_are_refused(changes: dict[str, Any], message: str, labels: Path, tmp_path: Path) -> None:
    config = small_run(tmp_path / "run", **{"labels": str(labels), "num_negatives": 40} | changes)
    assert isinstance(config, TrainConfig)
    with pytest.raises(ValueError, match=message):
        train(config)


def test_a_window_of_few_classes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if one class alone fills a window."""

    def classes(*sizes: int) -> RunClasses:
        return RunClasses(ClassOrder(np.repeat(np.arange(len(sizes)), sizes), 0), RangesOrder([len(sizes)], 0))

    few = small_run(tmp_path / "run", labels="labels.npy")
    _warn_of_few_classes(few, classes(*[10] * 30))
    assert "some windows of 96 images have only 10 of 30 classes, fewer than a batch has images" in caplog.text
    assert "--window-size 300 --window-stride 300 visits all at random" in caplog.text
    _warn_of_few_classes(few, classes(100, *[1] * 200))
    assert "some windows of 96 images have only 1 of 201 classes" in caplog.text
    caplog.clear()
    _warn_of_few_classes(few, classes(*[5] * 60))
    _warn_of_few_classes(few.with_settings(window_size=300), classes(*[60] * 5))
    each = RangesOrder([NUM_IMAGES], 0)
    _warn_of_few_classes(few.with_settings(labels=None, window_size=10), RunClasses(each, each))
    assert not caplog.text
