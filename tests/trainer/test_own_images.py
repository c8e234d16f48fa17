"""`python -m trainer images`: one command for a folder of images."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trainer.own_images
from tests.helpers.image_tree import odd_tree, plain_tree
from trainer.arguments import parse
from trainer.config import TrainConfig
from trainer.data import load_dataset
from trainer.data.pack import PackOptions, pack
from trainer.own_images import problems_with
from trainer.presets import PRESETS
from trainer.settings import flag
from weightserver.common.logs import log_events

ROOT = Path(__file__).parents[2]


def images_config(*options: str, data_dir: str = "pictures") -> TrainConfig:
    """The settings of `pic train images` with options."""
    return trainer.own_images.images_config(parse(["images", "--data-dir", data_dir, "--device", "cpu", *options]))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return odd_tree(tmp_path / "pictures", 60)


def test_choices_are_printed_with_their_reasons_one_line_each(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config = images_config("--epochs", "3")
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == "pictures: 73 images, 3 classes, 48 px"
    choices = [line for line in lines if line.startswith("  --")]
    (broken,) = [line for line in lines if line.startswith("  broken: ")]
    assert broken.startswith("  broken: pictures/a/cut.jpg (not an image of a known format), pictures/b/text.jpg (not")
    assert broken.endswith(": training shows another image in place of each, up to 100 (--max-broken)")
    for name in ("batch_size", "num_negatives", "window_size", "window_stride", "encoder.name", "encoder.image_size"):
        (line,) = [line for line in choices if line.startswith(f"  {flag(name)} ")]
        assert re.search(r"\S  ?\S.{10,}$", line), "a value and a reason"
        assert len(line) <= 80
    assert [line.split() for line in choices if "--epochs" in line] == [["--epochs", "3.0", "as", "given"]]
    assert (config.run.output, config.data.dataset) == (Path("runs/pictures"), "folder")
    assert config.optimization.epochs == 3
    assert config.report.knn_every > 0
    config.check()
    same = images_config("--epochs", "3", "--steps", "None")
    assert same == config, "as without them"


def test_all_problems_are_reported_together(pictures: Path) -> None:
    """Settings that no images have, then those that these images cannot have."""
    out_of_range = ["--batch-size", "0", "--learning-rate", "-1", "--views", "0", "--temperature", "-2"]
    of_rows = ["--rows-per-block", "0", "--momentum", "2", "--init-std", "-1", "--weight-decay", "-3", "--dim", "0"]
    nested = dict.fromkeys(("--encoder.width", "--encoder.blocks", "--augmentation.min-scale"), "0")
    unfit = ["--window-size", "900", "--encoder.name", "resnet5000", "--evaluate"]
    for wrong, said in (
        ([*out_of_range, *unfit], ("--batch-size", "--learning-rate", "--views", "--temperature")),
        ([*of_rows, *sum(nested.items(), ()), *unfit], (*of_rows[::2], *nested)),
        (unfit, ("--window-size", "resnet5000", "no test images")),
    ):
        with pytest.raises(ValueError, match=said[0]) as caught:
            images_config(*wrong)
        lines = str(caught.value).splitlines()
        assert all(sum(words in line for line in lines) == 1 for words in said)
    for needed in ("pic train FOLDER", "its folder is ./images: pic train ./images"):  # a folder named as the preset is
        with pytest.raises(ValueError, match=f"a folder of images is needed: {needed}\n--views must be"):
            trainer.own_images.images_config(parse(["images", "--views", "0"]))
        Path("images").mkdir(exist_ok=True)
    (pictures / "nothing").mkdir()
    with pytest.raises(ValueError, match="no images in pictures/nothing"):
        images_config(data_dir="pictures/nothing")


def test_a_run_gets_its_own_directory_and_an_existing_one_is_not_overwritten(pictures: Path) -> None:
    for number in ("", "-2", "-3"):
        output = images_config().run.output
        assert output == Path(f"runs/pictures{number}")
        output.mkdir(parents=True)
        (output / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--output runs/pictures holds a run: give --resume to resume it, or another"):
        images_config("--output", "runs/pictures")
    with pytest.raises(ValueError, match=r"--output pictures/\.\. is the folder of the images: give another"):
        images_config("--output", "pictures/..", data_dir=str(pictures.parent))


def test_broken_images_are_counted_and_a_single_image_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = plain_tree(tmp_path / "pictures", 12)
    for number in range(5):
        (tree / f"a/text {number}.jpg").write_bytes(b"no image")
    images_config()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "broken" in line]
    assert line.count("pictures/a/text") == 3
    assert line.endswith(", and 2 more: training shows another image in place of each, up to 100 (--max-broken)")
    plain_tree(tmp_path / "single", 1)
    for others in (0, 1):
        with pytest.raises(ValueError, match=r"a single image that can be read, of .: give at least 2") as caught:
            images_config(data_dir="single")
        assert "\n" not in str(caught.value), others
        (tmp_path / "single/a/text.jpg").write_bytes(b"no image")


def test_too_many_broken_images_are_refused_before_the_run_or_allowed(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "pictures", 40)
    for number in range(110):
        (tree / f"a/{number}.jpg").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"about 110 of 150 images are broken .*, and 100 may be: .*--max-broken 220"):
        images_config("--broken-list", "refused.txt")
    assert len((tmp_path / "refused.txt").read_text().splitlines()) == 110
    config = images_config("--max-broken", "110", "--broken-list", "new/lists/broken.txt")
    images = load_dataset("folder", tree, options=config.data).train_images
    assert len(images[:]) == 150
    lines = (tmp_path / "new/lists/broken.txt").read_text().splitlines()
    assert sorted(lines) == sorted(f"{tree}/a/{number}.jpg\tnot an image of a known format" for number in range(110))


def test_images_that_are_all_cut_off_are_refused(tmp_path: Path) -> None:
    """However few they are: their headers say what they would be."""
    for path in plain_tree(tmp_path / "pictures", 40).rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match="none of 40 sampled images can be read, first pictures/a/0000"):
        images_config()


def test_pixels_of_12_bits_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        Image.fromarray(np.full((40, 40), 3_000 + number, np.uint16)).save(tmp_path / f"pictures/{number}.png")
    images_config()
    said = capsys.readouterr().err
    values = "\n  values: 3,000 to 3,003 of 65,535 in 4 of 4 sampled images of 16 bits or more"
    assert f"{values}, which are shown dark: --pixel-range 0 4095 uses their range\n" in said
    config = images_config("--pixel-range", "0", "4095")
    said = capsys.readouterr().err
    assert f"{values}\n" in said
    assert "--pixel-range 0.0 4095.0 " in said, "as it is given again"
    pixels = load_dataset("folder", tmp_path / "pictures", options=config.data).train_images[:]
    assert 186 <= int(pixels.min()) <= int(pixels.max()) <= 188


def test_images_of_one_class_have_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = plain_tree(tmp_path / "all", 36) / "a"
    (tmp_path / "pictures").mkdir()
    one.rename(tmp_path / "pictures/a")
    config = images_config()
    said = capsys.readouterr().err
    assert said.startswith("pictures: 12 images, no labels, 48 px\n")
    assert "12 images, all of one class, which is no label\n" in said
    assert (config.report.evaluate, config.report.knn_every) == (False, 0)
    dataset = load_dataset("folder", tmp_path / "pictures")
    assert not dataset.labelled
    with pytest.raises(ValueError, match="have no labels"):
        dataset.check_labelled()
    assert load_dataset("folder", tmp_path / "all").labelled, "two classes"


@pytest.mark.parametrize(("labels", "number"), [("classes", 3), ("labels.npy", 2)])
def test_the_choices_fit_the_classes_that_are_trained_on(labels: str, number: int, tmp_path: Path) -> None:
    """None of these images can be held out: all their labels are trained on."""
    plain_tree(tmp_path / "pictures", 120)
    np.save("labels.npy", np.arange(120) % 2)
    assert images_config().report.evaluate
    config = images_config("--labels", labels)
    assert (config.rows.num_negatives, config.report.evaluate) == (number, False)
    with pytest.raises(ValueError, match=r"^this data set has no test images: train with --no-evaluate"):
        images_config("--labels", labels, "--evaluate")
    with pytest.raises(ValueError, match=r"^--labels nosuch\.npy: "):
        images_config("--labels", "nosuch.npy")


def test_a_pack_is_advised_for_images_that_do_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two commands work."""
    plain_tree(tmp_path / "pictures", 24)
    images_config()
    assert "pic pack" not in capsys.readouterr().err
    monkeypatch.setattr("trainer.own_images.usable_memory", lambda: 40_000)
    config = images_config()
    assert (config.data.dataset, config.data.data_dir) == ("folder", Path("pictures"))
    assert "\n  faster from a pack, in which a window lies together: pic pack pictures PACK, then pic train PACK\n" in (
        capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="pictures holds no packed images: pack them by pic pack"):
        images_config("--dataset", "packed")
    pack(tmp_path / "pictures", tmp_path / "PACK", PackOptions())
    packed = images_config(data_dir="PACK")
    assert (packed.data.dataset, packed.data.data_dir, packed.run.output) == ("packed", Path("PACK"), Path("runs/PACK"))
    assert "pic pack" not in capsys.readouterr().err


def test_choices_are_one_event_of_a_json_log(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_events("json")
    config = images_config("--log-format", "json", "--epochs", "3")
    *_, line = capsys.readouterr().err.splitlines()  # after what is left out, which a process logs once
    event = json.loads(line)
    assert (event["event"], event["images"], event["classes"]) == ("settings chosen", 73, 3)
    assert event["settings"]["batch_size"] == config.optimization.batch_size
    assert event["settings"].keys() == event["reasons"].keys()
    assert event["given"]["epochs"] == 3
    assert len(event["broken"]) == 4


def test_what_would_end_a_run_of_a_preset_is_found_too(pictures: Path) -> None:
    dataset = load_dataset("folder", pictures)
    _, preset = PRESETS["imagenet-1k"]
    problems = problems_with(preset, dataset)
    assert [problem.split(" ")[0] for problem in problems] == ["--window-size", "--num-negatives"]


@pytest.mark.guard  # a run, and its resumption
def test_a_resumed_run_keeps_the_choices_of_its_beginning(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = images_config("--batch-size", "12")
    began.run.output.mkdir(parents=True)
    (began.run.output / "config.json").write_text(began.to_json())
    plain_tree(pictures, 2_100, first=100)  # for which other settings would be chosen
    monkeypatch.setattr("trainer.own_images.usable_cores", lambda: 64)
    capsys.readouterr()
    resumed = images_config("--resume")
    assert (resumed.run.output, resumed.run.resume) == (began.run.output, True)
    assert resumed.with_settings(resume=False).to_json() == began.to_json()
    assert capsys.readouterr().err == ""
