"""Runs that earlier versions began are resumed with their settings, though defaults have changed since."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import ONLY_ROWS, losses, small_run
from trainer.config import TrainConfig, parse_config
from trainer.data import load_dataset
from trainer.loop import train
from trainer.run.history import ImageHistory
from trainer.run.resume import check_same_run, update_settings
from trainer.schedule import learning_rates

GOLDEN = Path(__file__).parent.parent / "golden"
CONFIGS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "configs_0.1.json").read_text())
"""Command line to the config.json that version 0.1 wrote for it."""
NUM_IMAGES = 1_281_167

pytestmark = pytest.mark.usefixtures("one_thread")


def resumed(command: str, output: Path, *more: str) -> TrainConfig:
    """The config of the same command with --resume, with the config.json that it wrote."""
    (output / "config.json").write_text(json.dumps(CONFIGS[command] | {"output": str(output)}))
    return parse_config([*command.split(), "--output", str(output), "--resume", *more])


@pytest.mark.guard
@pytest.mark.parametrize("command", CONFIGS)
def test_the_same_command_resumes_the_same_run(command: str, tmp_path: Path) -> None:
    config, was = resumed(command, tmp_path), CONFIGS[command]
    config.check()
    check_same_run(config)
    update_settings(config)
    check_same_run(resumed(command, tmp_path))  # also from then on
    num_steps = config.num_steps(NUM_IMAGES)
    assert num_steps == was["steps"] or num_steps == round(was["epochs"] * NUM_IMAGES / was["batch_size"])
    warmup_steps = round(was["warmup_fraction"] * num_steps)
    expected = learning_rates(num_steps=num_steps, base=was["learning_rate"], warmup_steps=warmup_steps)
    assert np.array_equal(ImageHistory(((0, NUM_IMAGES),)).learning_rates(config), expected)
    views, crops = config.augmentations()[: config.views], config.augmentations()[config.views :]
    assert json.loads(json.dumps(asdict(views[0].config))).items() >= was["augmentation"].items()
    for crop in crops:
        assert [crop.config.min_scale, crop.config.max_scale] == was["small_crop_scale"]


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("imagenet-1k --data-dir packed", ["--warmup-epochs", "5"], "whose warmup_epochs is None, not 5.0: give the"),
        ("imagenet-1k --data-dir packed", ["--warmup-fraction", "0.1"], "whose warmup_fraction is 0.025, not 0.1"),
        ("imagenet-11k --data-dir packed", ["--epochs", "100"], "whose epochs is 200.0, not 100.0"),
        ("imagenet-1k --data-dir packed", ["--small-crops", "3"], "whose small_crops is 0, not 3"),
        ("fashion-mnist", ["--correction", "paper"], "whose correction is exact, not paper"),
    ],
)
def test_resume_rejects_other_settings(command: str, more: list[str], message: str, tmp_path: Path) -> None:
    config = resumed(command, tmp_path, *more)
    with pytest.raises(ValueError, match=message):
        check_same_run(config)


@pytest.mark.guard
def test_a_resumed_run_of_an_earlier_version_trains_as_it_did(tmp_path: Path) -> None:
    """It resumes with 0.1's config.json to the end of an undisturbed run, bit for bit on a CPU."""
    run = small_run(tmp_path / "run", steps=12, checkpoint_every=8, encoder=ONLY_ROWS)
    train(run)
    before = losses(run.output)
    settings = json.loads((run.output / "config.json").read_text())
    was = {name: value for name, value in settings.items() if name in CONFIGS["fashion-mnist"]}
    assert len(was) == len(CONFIGS["fashion-mnist"])
    assert was["warmup_fraction"] == 0.1
    (run.output / "config.json").write_text(json.dumps(was | {"correction": True, "small_crop_scale": [0.05, 0.14]}))
    train(replace(run, resume=True))  # again from step 8 on
    assert losses(run.output) == before


def test_new_runs_write_defaults_as_numbers(tmp_path: Path) -> None:
    """A config.json has numbers where the command line has defaults, and the next version need not know these."""
    (tmp_path / "config.json").write_text(parse_config(["fashion-mnist"]).to_json())
    assert json.loads((tmp_path / "config.json").read_text())["warmup_fraction"] == 0.1
    arguments = ["fashion-mnist", "--output", str(tmp_path), "--resume"]
    check_same_run(parse_config(arguments))
    check_same_run(parse_config([*arguments, "--warmup-fraction", "0.1"]))
    with pytest.raises(ValueError, match=r"whose warmup_epochs is None, not 2\.0"):
        check_same_run(parse_config([*arguments, "--warmup-epochs", "2"]))


# ---- folders that earlier versions listed with every link, empty file and empty folder


@pytest.fixture
def tree_with_links(tmp_path: Path) -> Path:
    tree = plain_tree(tmp_path / "pictures", 24)
    (tree / "a/link.jpg").symlink_to("0000.jpg")
    (tree / "a/missing.jpg").symlink_to("nothing.jpg")
    (tree / "b/empty.jpg").touch()
    (tree / "0-empty").mkdir()
    (tree / "d").symlink_to("a")
    return tree


def test_a_folder_is_listed_as_by_earlier_versions(tree_with_links: Path) -> None:
    in_a = [*(f"{number:04d}.jpg" for number in range(0, 24, 3)), "link.jpg", "missing.jpg"]
    paths = [f"a/{name}" for name in in_a]
    paths += [f"b/{number:04d}.jpg" for number in range(1, 24, 3)] + ["b/empty.jpg"]
    paths += [f"c/{number:04d}.jpg" for number in range(2, 24, 3)] + [f"d/{name}" for name in in_a]
    labels = {"a": 1, "b": 2, "c": 3, "d": 4}  # 0 is the empty folder
    lines = "".join(f"{labels[path[0]]}\t-1\t-1\t{path}\t\n" for path in paths)
    dataset = load_dataset("folder", tree_with_links, every_file=True)
    assert dataset.digests == (hashlib.sha256(lines.encode()).hexdigest(),)
    assert len(load_dataset("folder", tree_with_links).train_images) == 24


@pytest.mark.guard
def test_a_run_on_such_a_folder_is_resumed(
    tree_with_links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"window_size": 24, "window_stride": 8, "num_negatives": 16, "batch_size": 8}
    config = small_run(tmp_path / "run", dataset="folder", num_images=None, data_dir=tree_with_links, steps=4, **shape)
    with monkeypatch.context() as earlier:
        earlier.setattr("trainer.loop.load_dataset", partial(load_dataset_as_earlier, load_dataset))
        train(config)
    train(replace(config, resume=True, steps=8))
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 8
    (line,) = [record.getMessage() for record in caplog.records if "is listed as by the version" in record.getMessage()]
    assert str(tree_with_links) in line


def load_dataset_as_earlier(load: Any, *arguments: Any, **options: Any) -> Any:
    return load(*arguments, **options | {"every_file": True})
