"""The command line `python -m trainer.evaluate`."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.helpers.evaluations import evaluate
from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import PowerLoss
from tests.helpers.torchrun import torchrun
from trainer.data.config import DataConfig, SourceOptions
from trainer.data.pack import PackOptions, pack
from trainer.evaluate import knn as knn_module
from trainer.evaluate.command import parse
from trainer.evaluate.encoders import LoadedEncoder
from trainer.evaluate.features import Frozen
from trainer.evaluate.protocols import PROTOCOLS
from trainer.evaluate.run import _images, _reading
from trainer.model import EncoderConfig, build_model, save_encoder

CONFIG = EncoderConfig(width=4, blocks=(1, 1), stem_stride=2)
COLOUR = replace(CONFIG, in_channels=3, image_size=16)
OF_RUN = {"format": 5, "order_seed": 0, "seed": 0, "dim": 8, "background": "white", "dataset": "idx"}
"""Settings in a run's config.json."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two classes told apart by which half is bright."""
    directory = tmp_path / "images"
    directory.mkdir()
    random = np.random.default_rng(0)
    for kind, count in (("train", 400), ("t10k", 100)):
        labels = random.integers(0, 2, count, dtype=np.uint8)
        images = random.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        images[labels == 1, :, :14] += 100
        for name, array in ((f"{kind}-images-idx3-ubyte", images), (f"{kind}-labels-idx1-ubyte", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            (directory / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return directory


def relabel(data_dir: Path, label: int | None) -> None:
    """Gives the last test image this label, or another one."""
    path = data_dir / "t10k-labels-idx1-ubyte.gz"
    *others, last = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(bytes([*others, last ^ 1 if label is None else label])))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    save_encoder(build_model(CONFIG, seed=0).encoder, CONFIG, directory / "encoder.safetensors")
    (directory / "config.json").write_text(json.dumps(OF_RUN))
    return directory


SHORT = {
    "knn": ["--k", "10,20"],
    "linear": ["--epochs", "2", "--batch-size", "50", "--learning-rates", "1,3"],
    "linear-cached": [],
    "semi-supervised": ["--labels", "0.5", "--epochs", "2", "--batch-size", "40", "--learning-rates=0.1,0.3"],
    "fine-tune": ["--epochs", "2", "--batch-size", "50", "--learning-rates", "0.05"],
}
"""Options that make each protocol short."""


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The result on stdout without what differs between equal evaluations."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    for name in ("seconds", "subject", "data_dir"):
        del result[name]
    return result


@pytest.mark.parametrize("arguments", [["--help-all"], ["knn", "--help-all"]])
def test_the_long_help_needs_no_protocol(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(arguments) == 0
    assert ("--pixels" if arguments[1:] else "linear-cached") in capsys.readouterr().out


@pytest.mark.parametrize("spelled", ["tree/../tree", "linked", None])
def test_images_are_read_as_in_the_run_however_their_folder_is_spelled(spelled: str | None, tmp_path: Path) -> None:
    plain_tree(tmp_path / "tree/bus", 6)
    plain_tree(tmp_path / "tree/train", 6)
    (tmp_path / "linked").symlink_to(tmp_path / "tree")
    images = DataConfig(dataset="folder", data_dir=tmp_path / "tree", split="train", alpha="ignore")
    encoder = LoadedEncoder(name="a", module=None, config=None, images=images)
    given = ["knn", "--pixels", "--data-dir", str(tmp_path / (spelled or "other")), "--pixel-range", "0", "4095"]
    command = parse(given)
    with pytest.raises(ValueError, match="--pixel-range: idx is read in one way only"):
        _reading(command, encoder, "idx", None)
    reading = _reading(command, encoder, "folder", Path(given[3]))
    assert (reading.split, reading.alpha) == ("train" if spelled else None, "ignore")
    assert reading.given["pixel_range"] == (0, 4095)


@pytest.mark.parametrize("given", [{}, {"alpha": "show"}, {"background": "black"}])
def test_results_on_a_pack_say_how_its_pixels_were_read(given: dict[str, str], tmp_path: Path) -> None:
    for split in ("train", "test"):
        plain_tree(tmp_path / "tree" / split, 6)
    pack(tmp_path / "tree", tmp_path / "packed", PackOptions(source=SourceOptions(alpha="ignore")))
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    command = parse(["knn", "--pixels", "--dataset", "packed", "--data-dir", str(tmp_path / "packed"), *words])
    images, _ = _images(command, LoadedEncoder(name="a", module=None, config=None))
    assert images["pixels"] == {"alpha": "ignore", "background": "white"} | given


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_writes_and_prints_the_result(
    protocol: str, run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [protocol, *SHORT[protocol]]
    assert evaluate([*short, "--run", str(run_dir), "--data-dir", str(data_dir)]) == 0
    output = capsys.readouterr()
    written = json.loads((run_dir / "evaluation" / f"{protocol}.json").read_text())
    assert written == json.loads(output.out)
    assert written["subject"] == str(run_dir)
    assert 0 <= written["top1"] <= written["top5"] == 100, "there are two classes"
    assert (written["ranks"], written["device"]) == (1, "cpu")
    assert f"{written['top1']:.2f}" in output.err, "the table"
    assert sorted(path.name for path in (run_dir / "evaluation").iterdir()) == [f"{protocol}.json"], "no state is left"

    (run_dir / "config.json").write_text(json.dumps(OF_RUN | {"data_dir": str(data_dir)}))
    assert evaluate([*short, "--run", str(run_dir)]) == 0
    of_run = printed(capsys)
    assert {name: of_run[name] for name in ("top1", "chosen", "settings", "weights")} == {
        name: written[name] for name in ("top1", "chosen", "settings", "weights")
    }
    encoder = str(run_dir / "encoder.safetensors")
    of_data = ["--dataset", "idx", "--data-dir", str(data_dir)]
    assert evaluate([*short, "--encoder", encoder, *of_data, "--name", "b", "--output", str(run_dir / "c")]) == 0
    assert printed(capsys) == of_run
    assert (run_dir / "c" / "b.json").exists()


def test_without_test_images_a_tenth_of_the_training_images_is_held_out(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_encoder(build_model(COLOUR, seed=0).encoder, COLOUR, run_dir / "encoder.safetensors")
    tree = plain_tree(tmp_path / "tree", 120)
    settings = OF_RUN | {"dataset": "folder", "data_dir": str(tree)}
    (run_dir / "config.json").write_text(json.dumps(settings))
    assert evaluate(["knn", "--k", "1", "--run", str(run_dir)]) == 0
    output = capsys.readouterr()
    assert "no test images: 12 of 120 training images, drawn by class, stand for them" in output.err
    images = json.loads(output.out)
    assert (images["train_images"], images["test_images"], images["held_out"]) == (108, 12, True)
    (run_dir / "config.json").write_text(json.dumps(settings | {"labels": "classes"}))
    assert evaluate(["knn", "--k", "1", "--run", str(run_dir)]) == 2, "the run learned the labels of all"
    own_images, file = ["--dataset", "folder", "--data-dir", str(tree)], tmp_path / "encoder.safetensors"
    for knows_labels in (False, True):
        metadata = DataConfig().metadata(knows_labels=knows_labels)
        save_encoder(build_model(COLOUR, seed=0).encoder, COLOUR, file, metadata)
        assert evaluate(["knn", "--k", "1", "--encoder", str(file), *own_images]) == 2 * knows_labels


def test_links_say_whose_labels_are_used(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_encoder(build_model(COLOUR, seed=0).encoder, COLOUR, run_dir / "encoder.safetensors")
    train, few = plain_tree(tmp_path / "all/train", 30), tmp_path / "few"
    for path in sorted(train.rglob("*.jpg"))[::2]:
        (few / "train" / path.parent.name).mkdir(parents=True, exist_ok=True)
        (few / "train" / path.parent.name / path.name).symlink_to(path)
    (few / "val").symlink_to(plain_tree(tmp_path / "all/val", 12))
    command = ["semi-supervised", *SHORT["semi-supervised"], "--labels", "1", "--batch-size", "5"]
    place = ["--dataset", "folder", "--data-dir", str(few)]
    assert evaluate([*command, "--encoder", str(run_dir / "encoder.safetensors"), *place]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["labelled_images"], result["test_images"]) == (15, 12)


@pytest.mark.parametrize("options", [["knn"], ["linear-cached", "--folds", "3"]])
def test_raw_pixels(options: list[str], data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--dataset", "idx", "--data-dir", str(data_dir), "--output", str(tmp_path)]
    assert evaluate([*options, "--pixels", *place]) == 0
    result = printed(capsys)
    assert result["top1"] >= 90
    assert ("the other 2 parts" in json.dumps(result)) == ("--folds" in options)


def test_a_result_says_that_each_of_few_images_was_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_tree(tmp_path / "train", 9)
    plain_tree(tmp_path / "test", 6, first=9)
    place = ["--dataset", "folder", "--data-dir", str(tmp_path), "--output", str(tmp_path / "results")]
    assert evaluate(["linear-cached", "--pixels", *place]) == 0
    assert printed(capsys)["chosen"]["on"].endswith("by a probe that was fitted to the other 8 parts")


def interrupted(patch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Runs the command, interrupted when its features are stored."""

    def stop(*_: object, **__: object) -> None:
        raise PowerLoss

    with patch.context() as only_now:
        only_now.setattr(knn_module, "nearest", stop)
        with pytest.raises(PowerLoss):
            evaluate(arguments)


def states(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "evaluation").glob("*.partial"))


def test_continues_only_the_same_evaluation(
    run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["knn", "--k", "5", "--run", str(run_dir), "--data-dir", str(data_dir)]
    interrupted(monkeypatch, command)
    (state,) = states(run_dir)
    assert evaluate(command) == 0
    assert printed(capsys)["resumed"] is True
    assert not states(run_dir)

    interrupted(monkeypatch, command)
    for other in (["--k", "7"], ["--bfloat16"]):
        assert evaluate([*command, *other]) == 0
        assert printed(capsys)["resumed"] is False
        assert states(run_dir) == [state], "the interrupted one can still be continued"
    assert evaluate([*command, "--data-dir", "/no/such/folder"]) == 2
    assert states(run_dir) == [state]
    relabel(data_dir, None)
    capsys.readouterr()
    assert evaluate(command) == 0
    assert printed(capsys)["resumed"] is False, "an image has another label"


def test_one_evaluation_of_a_name_at_a_time(
    run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["knn", "--k", "5", "--run", str(run_dir), "--data-dir", str(data_dir)]

    def meanwhile(*_: object, **__: object) -> None:
        assert evaluate(command) == 2
        assert "is being written by another process: wait for it to end" in capsys.readouterr().err
        raise PowerLoss

    with monkeypatch.context() as patch:
        patch.setattr(knn_module, "nearest", meanwhile)
        with pytest.raises(PowerLoss):
            evaluate(command)
    assert evaluate(command) == 0


def test_a_broken_test_image_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for name, part in (("a", "train"), ("b", "train"), ("a", "test"), ("b", "test")):
        folder = tmp_path / "images" / part / name
        folder.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    command = ["knn", "--k", "3", "--pixels", "--dataset", "folder", "--data-dir", str(tmp_path / "images")]
    command += ["--output", str(tmp_path)]
    broken = tmp_path / "images/train/b/5.png"
    broken.write_bytes(broken.read_bytes()[:200])
    assert evaluate(command) == 0
    assert f"broken image: {broken} (" in capsys.readouterr().err, "replaced, as in training"
    broken = tmp_path / "images/test/b/5.png"
    broken.write_bytes(broken.read_bytes()[:200])
    assert evaluate(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"trainer.evaluate: broken image: {broken} (")
    assert error.endswith("an evaluation counts every test image; repair it, or remove it from the data set")


def test_damaged_weights_and_unknown_classes_are_refused(
    run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    relabel(data_dir, 9)
    assert evaluate(["knn", "--run", str(run_dir), "--data-dir", str(data_dir)]) == 2
    assert "1 classes of the test images, such as 9, have no training image" in capsys.readouterr().err
    relabel(data_dir, 0)
    encoder = build_model(CONFIG, seed=0).encoder
    next(encoder.parameters()).data[0] = float("nan")
    save_encoder(encoder, CONFIG, run_dir / "encoder.safetensors")
    assert evaluate(["fine-tune", "--run", str(run_dir), "--data-dir", str(data_dir)]) == 2
    assert "is not finite: the weights are damaged, give others" in capsys.readouterr().err


@pytest.mark.guard
def test_the_documented_command_of_two_ranks(run_dir: Path, data_dir: Path) -> None:
    """torchrun takes options that it knows, or could mean, for its own unless -- precedes the module's name."""
    options = ["linear", *SHORT["linear"], "--run", run_dir, "--data-dir", data_dir]
    done = torchrun("--", "trainer.evaluate", *options)
    assert json.loads(done.stdout)["ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["knn", "--run", "/no/such/run", "--dataset", "idx"], "/no/such/run holds no run"),
        ([], "the protocol is missing: give one of knn, linear, linear-cached, semi-supervised, fine-tune; detect and"),
        (["--run", "{run}", "knn"], "the protocol is missing before the options: give one of knn"),
        (["segment"], "unknown protocol 'segment': give one of knn, linear, linear-cached, semi-supervised, fine-tune"),
        (["detect"], "; detect and segment are of python -m experiments.paper"),
        (["lineer", "--pixels"], "unknown protocol 'lineer': did you mean linear?"),
        (["knn", "--pixels", "--k", "0"], "--k is (0,): give one or more numbers, at least 1"),
        (["linear-cached", "--pixels", "--folds", "1"], "--folds must be at least 2, got 1"),
        (
            ["linear-cached", "--pixels", "--dataset", "idx", "--folds", "1000"],
            "training images are too few for 1000 folds: each needs one\n",
        ),
        (["knn", "--pixels", "--name", "a/b"], "--name 'a/b' is not a file's name"),
        (["knn", "--pixels", "--dataset", "synthetic"], "--dataset 'synthetic' is unknown or has no labels"),
        (["knn", "--pixels", "--device", "tpu"], "--device 'tpu' is unknown: give cpu, cuda or cuda:N"),
        (["fine-tune", "--pixels"], "fine-tune needs an encoder, not raw pixels"),
        (["knn", "--run", "{run}", "--data-dir", "/no/such/folder"], "no such folder: /no/such/folder"),
        (["knn", "--encoder", "{colour}", "--dataset", "idx"], "is for 3-channel 28 px images"),
        (["knn", "--pixels", "--dataset", "folder", "--data-dir", "{tree}"], "has no test images"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(
    arguments: list[str],
    message: str,
    run_dir: Path,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before features are computed."""
    monkeypatch.setattr(Frozen, "of_images", lambda *_: pytest.fail("features were computed"))
    colour = tmp_path / "colour.safetensors"
    config = replace(COLOUR, image_size=28)
    save_encoder(build_model(config, seed=0).encoder, config, colour)
    tree = plain_tree(tmp_path / "tree", 3)
    filled = [argument.format(run=run_dir, data=data_dir, colour=colour, tree=tree) for argument in arguments]
    if filled and "--data-dir" not in filled:
        filled += ["--data-dir", str(data_dir)]
    assert evaluate(filled) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("trainer.evaluate: ")
    assert error.count("\n") == 1
