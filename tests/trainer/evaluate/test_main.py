"""The command line `python -m trainer.evaluate`."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.image_tree import plain_tree
from trainer.evaluate.__main__ import main
from trainer.model import EncoderConfig, build_model, save_encoder

CONFIG = EncoderConfig(width=4, blocks=(1, 1), stem_stride=2)


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


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    save_encoder(build_model(CONFIG, seed=0).encoder, CONFIG, directory / "encoder.safetensors")
    (directory / "config.json").write_text(json.dumps({"dataset": "idx"}))
    return directory


@pytest.mark.parametrize("protocol", ["knn", "linear"])
def test_prints_one_json_object(
    protocol: str, run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([protocol, "--run", str(run_dir), "--data-dir", str(data_dir)]) == 0
    of_run = json.loads(capsys.readouterr().out)
    (run_dir / "config.json").write_text(json.dumps({"dataset": "idx", "data_dir": str(data_dir)}))
    assert main([protocol, "--run", str(run_dir)]) == 0
    assert json.loads(capsys.readouterr().out) == of_run
    encoder = str(run_dir / "encoder.safetensors")
    assert main([protocol, "--encoder", encoder, "--dataset", "idx", "--data-dir", str(data_dir)]) == 0
    assert json.loads(capsys.readouterr().out) == of_run
    assert main([protocol, "--pixels", "--dataset", "idx", "--data-dir", str(data_dir)]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] >= 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["knn", "--run", "/no/such/run", "--dataset", "idx"], "cannot read encoder file /no/such/run/encoder"),
        (["linear", "--encoder", "{data}/t10k-images-idx3-ubyte.gz", "--dataset", "idx"], "cannot read encoder file"),
        (["knn", "--pixels", "--data-dir", "/no/such/folder"], "no such folder: /no/such/folder"),
        (["knn", "--run", "{run}", "--data-dir", "/no/such/folder"], "no such folder: /no/such/folder"),
        (["knn", "--encoder", "{colour}", "--dataset", "idx"], "is for 3-channel 28 px images"),
        (["knn", "--pixels", "--dataset", "folder", "--data-dir", "{tree}"], "has no test images"),
        (["knn", "--encoder", "{colour}", "--dataset", "folder", "--data-dir", "{tree}"], "has no test images"),
    ],
)
def test_bad_input_gives_one_line_and_status_2(
    arguments: list[str],
    message: str,
    run_dir: Path,
    data_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    colour = tmp_path / "colour.safetensors"
    config = EncoderConfig(width=4, blocks=(1,), in_channels=3)
    save_encoder(build_model(config, seed=0).encoder, config, colour)
    tree = plain_tree(tmp_path / "tree", 3)
    filled = [argument.format(run=run_dir, data=data_dir, colour=colour, tree=tree) for argument in arguments]
    if "--data-dir" not in filled:
        filled += ["--data-dir", str(data_dir)]
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_run_on_generated_images_needs_another_data_set(
    run_dir: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "config.json").write_text(json.dumps({"dataset": "synthetic"}))
    assert main(["knn", "--run", str(run_dir)]) == 2
    assert "was trained on generated images, which have no labels" in capsys.readouterr().err
    assert main(["knn", "--run", str(run_dir), "--dataset", "idx", "--data-dir", str(data_dir)]) == 0


@pytest.mark.parametrize("arguments", [[], ["knn"], ["svm", "--pixels"], ["knn", "--pixels", "--run", "x"]])
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "error:" in capsys.readouterr().err
