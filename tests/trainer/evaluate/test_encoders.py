"""What is evaluated: runs, also while they train, files, models by name, raw pixels, and wrong combinations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import EVERY, NUM_IMAGES, NUM_STEPS, small_run
from trainer.data.config import DataConfig, SourceOptions
from trainer.data.pack import PackOptions, pack
from trainer.evaluate import encoders
from trainer.evaluate.encoders import LoadedEncoder, encoder_of
from trainer.evaluate.options import EncoderOptions
from trainer.export.encoders import export_encoder
from trainer.loop import train
from trainer.model import EncoderConfig, build_model, load_encoder, save_encoder
from trainer.run.checkpoint_file import checkpoint_name, encoder_tensors, saved_steps

NEWEST = 3 * EVERY
OF_RUN = {"format": 5, "order_seed": 0, "seed": 0, "dim": 8, "background": "white", "dataset": "idx"}
"""Settings in a run's config.json."""
SMALL = EncoderConfig(name="resnet18", in_channels=3, image_size=32, pixel_mean=(0.4,), pixel_std=(0.2,))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "a"
    train(small_run(run, keep_checkpoints=4, num_shards=1))
    return run


@pytest.fixture
def training(trained: Path, tmp_path: Path) -> Path:
    """A run that has checkpoints and has not ended."""
    ends = ("servers", "encoder.safetensors", "summary.json", f"{checkpoint_name(NUM_STEPS)}.safetensors")
    return shutil.copytree(trained, tmp_path / "training", ignore=shutil.ignore_patterns(*ends))


def assert_equal(found: LoadedEncoder, expected: dict[str, Tensor]) -> None:
    assert found.module is not None
    assert not found.module.training
    weights = found.module.state_dict()
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(weights[key], tensor), key


def saved(path: Path, config: EncoderConfig = SMALL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_encoder(build_model(config, seed=1).encoder, config, path)
    return path


def test_the_end_of_a_run_and_an_older_checkpoint(trained: Path) -> None:
    name = checkpoint_name(EVERY)
    older = encoder_of(EncoderOptions(run=trained, checkpoint=name))
    assert_equal(older, encoder_tensors(trained / "checkpoints", name))
    assert older.name == f"{trained}, {name}"
    found = encoder_of(EncoderOptions(run=trained))
    encoder, config = load_encoder(trained / "encoder.safetensors")
    assert_equal(found, encoder.state_dict())
    assert (found.name, found.directory, found.config) == (str(trained), trained, config)
    assert found.images.dataset == "synthetic"
    with pytest.raises(ValueError, match="was trained on generated images, which have no labels: give another"):
        found.data(None, None)
    assert found.data("idx", None) == ("idx", None)


def test_the_newest_checkpoint_of_a_run_that_trains(training: Path) -> None:
    found = encoder_of(EncoderOptions(run=training))
    assert_equal(found, encoder_tensors(training / "checkpoints", checkpoint_name(NEWEST)))
    assert (found.name, found.directory) == (f"{training}, {checkpoint_name(NEWEST)}", training)
    assert found.config is not None
    assert found.config.pixel_mean is not None  # as in config.json


def test_a_checkpoint_that_the_run_deletes_meanwhile(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest one at listing is gone at reading, twice; then the run ends, and its encoder is there."""
    listed: list[int] = []

    def listing(directory: Path) -> list[int]:
        steps = saved_steps(directory)
        listed.append(steps[-1])
        (directory / f"{checkpoint_name(steps[-1])}.safetensors").unlink()
        if len(listed) == 2:
            saved(training / "encoder.safetensors")
            return []
        return steps

    monkeypatch.setattr(encoders, "saved_steps", listing)
    found = encoder_of(EncoderOptions(run=training))
    assert listed == [NEWEST, 2 * EVERY]
    assert (found.name, found.config) == (str(training), SMALL)


def test_a_damaged_checkpoint_is_an_error(training: Path) -> None:
    (training / "checkpoints" / f"{checkpoint_name(NEWEST)}.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        encoder_of(EncoderOptions(run=training))


def test_the_data_of_a_run(tmp_path: Path) -> None:
    saved(tmp_path / "encoder.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OF_RUN | {"dataset": "folder", "data_dir": "/images"}))
    found = encoder_of(EncoderOptions(run=tmp_path))
    assert found.data(None, None) == ("folder", Path("/images"))
    assert found.data(None, Path("/more")) == ("folder", Path("/more"))
    assert found.data("cifar10", None) == ("cifar10", None)


def test_a_runs_images_are_found_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("there", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    saved(tmp_path / "encoder.safetensors")
    reading = {"dataset": "folder", "data_dir": Path("images"), "label_column": "kind"}
    (tmp_path / "config.json").write_text(small_run(tmp_path, encoder=SMALL, **reading).to_json())
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = encoder_of(EncoderOptions(run=tmp_path))
    images = tmp_path / "there" / "images"
    assert found.data(None, None) == ("folder", images)
    assert found.reading_of(images).label_column == "kind"
    in_bucket = small_run(tmp_path, dataset="packed", data_dir=Path("s3://bucket/packed"))
    assert json.loads(in_bucket.to_json())["data_dir"] == "s3://bucket/packed"


def test_images_of_a_runs_pack_are_read_as_the_pack_and_the_run_say(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        plain_tree(tmp_path / "set" / folder, 3)
    pack(tmp_path / "set", tmp_path / "packed", PackOptions(source=SourceOptions(split="a:b")))
    images = DataConfig(dataset="packed", data_dir=tmp_path / "packed", alpha="ignore")
    found = LoadedEncoder(name="a", module=None, config=None, images=images)
    for source, name, split in (("set", "folder", "a:b"), ("packed", "packed", None), ("set/a", "folder", None)):
        assert found.data(None, tmp_path / source) == (name, tmp_path / source)
        reading = found.reading_of(tmp_path / source)
        assert (reading.split, reading.alpha) == (split, "ignore"), source


def test_an_encoder_that_saw_white_sees_no_other_packs_background(tmp_path: Path) -> None:
    images = DataConfig.of_metadata(DataConfig().metadata(knows_labels=False))
    found = LoadedEncoder(name="a", module=None, config=None, images=images)
    reading = found.reading_of(tmp_path).of_pack(tmp_path, SourceOptions(background="black"))
    assert reading.rendering() == SourceOptions(background="white").rendering()


def test_the_file_of_a_run_says_whether_it_trained_on_labels(trained: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.arange(NUM_IMAGES) % 80)
    train(small_run(tmp_path / "run", steps=2, rows="dense", labels=str(tmp_path / "labels.npy")))
    files = [run / "encoder.safetensors" for run in (trained, tmp_path / "run")]
    assert [encoder_of(EncoderOptions(encoder=file)).knows_labels for file in files] == [False, True]


def test_an_encoder_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "moco.safetensors")
    found = encoder_of(EncoderOptions(encoder=path))
    assert_equal(found, build_model(SMALL, seed=1).encoder.state_dict())
    assert (found.name, found.directory, found.config) == (str(path), tmp_path / "moco", SMALL)
    assert found.data(None, None) == ("fashion-mnist", None)
    (tmp_path / "config.json").touch()
    found = encoder_of(EncoderOptions(encoder=saved(tmp_path / "encoder.safetensors")))
    assert found.directory == tmp_path  # that of its run
    found = encoder_of(EncoderOptions(encoder=saved(tmp_path / "no_suffix")))
    assert found.directory == tmp_path / "no_suffix-results"


def test_an_export(tmp_path: Path) -> None:
    run, exported = tmp_path / "run", tmp_path / "exported"
    saved(run / "encoder.safetensors")
    (run / "config.json").write_text(small_run(run, encoder=SMALL).to_json())
    (file, *_) = export_encoder(run, "torchvision", exported)
    expected = build_model(SMALL, seed=1).encoder.state_dict()
    for given, directory in ((exported, exported), (file, exported / file.stem)):
        found = encoder_of(EncoderOptions(encoder=given))
        assert_equal(found, expected)
        assert found.directory == directory
        assert found.config is not None
        assert (found.config.name, found.config.image_size) == (SMALL.name, 32)
        assert found.config.pixels == SMALL.pixels


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of --run, --encoder, --pixels, got none"),
        ({"run": Path("a"), "pixels": True}, "got --run and --pixels"),
        ({"checkpoint": "step-1", "pixels": True}, "--checkpoint is for --run: omit it"),
        ({"run": "{trained}", "checkpoint": "step-7"}, "has no checkpoint 'step-7': it has step-"),
        ({"run": "{tmp}"}, "has neither encoder.safetensors nor a checkpoint yet"),
        ({"run": "{export}"}, "holds no run: give the --output of one, or an encoder's file or export by --encoder"),
        ({"run": "{damaged}"}, "config.json is not a run's config.json: restore it"),
        ({"encoder": Path("/no/such/file")}, "cannot read encoder file /no/such/file"),
        ({"encoder": "{trained}"}, "is a run's directory: give --run"),
        ({"encoder": "{tmp}"}, "has 0 safetensors files, not one"),
        ({"encoder": "{tmp}/other.pth"}, "is no encoder file of this trainer: give weights of others to 'pic export"),
    ],
)
def test_refuses_in_one_line(tmp_path: Path, trained: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OF_RUN))
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pth")
    for name, content in (("export", '{"architecture": "resnet18"}'), ("damaged", "null")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    places = {"tmp": tmp_path, "trained": trained, "export": tmp_path / "export", "damaged": tmp_path / "damaged"}
    filled: dict[str, Any] = {
        name: Path(value.format(**places)) if isinstance(value, str) and "{" in value else value
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=r".") as refused:
        encoder_of(EncoderOptions(**filled))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
