"""The report of a run."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import EVERY, NUM_STEPS, small_run
from trainer.__main__ import main
from trainer.data import Dataset, load_dataset
from trainer.loop import train
from trainer.model import EncoderConfig, build_encoder
from trainer.report.inspection import inspect_encoder
from trainer.run import checkpoint_file
from trainer.run.checkpoint_file import encoder_tensors
from trainer.run.result_names import in_words
from trainer.run.totals import Totals

pytestmark = pytest.mark.usefixtures("one_thread")


def report(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *map(str, arguments)])
    return stopped.value.code


@pytest.mark.slow
def test_a_run_on_real_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run <b>&"
    config = EncoderConfig(width=8, stem_stride=2, blocks=(1, 1))
    changes: dict[str, Any] = {"dataset": "fashion-mnist", "num_images": None, "rows_per_block": 63, "encoder": config}
    train(small_run(run, knn_every=0.005, **changes))
    summary = json.loads((run / "summary.json").read_text()) | {"knn_top1": 87.75}
    (run / "summary.json").write_text(json.dumps(summary))
    assert report(run, "--images", 500) == 0
    assert capsys.readouterr().out.endswith(f"wrote {run / 'report.html'}\n")
    text = (run / "report.html").read_text()
    assert "run &lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text, "it fetches and runs nothing"
    curves, *images = [
        Image.open(io.BytesIO(base64.b64decode(content))).size
        for content in re.findall(r'<img[^>]* src="data:image/png;base64,(.*?)"', text, re.DOTALL)
    ]
    assert min(curves) > 300
    assert images == [(28, 28)] * 12 * (1 + 7)
    assert "label sneaker" in text
    table = text.partition('<table id="results">')[2].partition("</table>")[0]
    found = dict(re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td></tr>', table))
    assert {html.unescape(name): html.unescape(value) for name, value in found.items()} == in_words(summary)
    assert found["accuracy of kNN, top-1"] == "87.75 %"
    assert text.count("<strong>Note:</strong>") == len(summary["warnings"]) > 0
    assert "No label was used in training." in text
    (run / "config.json").write_text(json.dumps(json.loads((run / "config.json").read_text()) | {"labels": "classes"}))
    assert report(run, "--images", 500) == 0
    assert "No label was used" not in (run / "report.html").read_text()


def test_results_have_names_and_units() -> None:
    results = {"peak_memory_bytes": 473_296_896, "seconds": 5400.0, "steps": 3195, "knn_top1": 58.0913, "other": 0.5}
    assert in_words(results) == {
        "accuracy of kNN, top-1": "58.09 %",
        "steps": "3,195",
        "time with evaluation": "90 min",
        "peak memory": "451 MiB",
        "other": "0.5",
    }
    every = dict.fromkeys(asdict(Totals()), 1.0) | dict.fromkeys(
        ["steps", "epochs", "loss", "mean_loss", "seconds"], 1.0
    )
    assert not [name for name in in_words(every) if "_" in name]


@pytest.mark.guard
def test_an_unfinished_run_shows_what_is_available(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    train(small_run(run, num_shards=1))  # generated images, no labels, no evaluation
    assert report(run, "--output", page) == 0
    text = page.read_text()
    assert f"<td>{NUM_STEPS}</td>" in text
    assert text.count('class="curves" src="data:image/png;base64,') == 1
    assert "the same label" not in text
    assert not (run / "report.html").exists()
    (run / "summary.json").unlink()
    (run / "encoder.safetensors").unlink()
    assert report(run, "--output", page) == 0
    text = page.read_text()
    assert f"not finished, {NUM_STEPS} steps so far" in text
    assert f"the encoder after {NUM_STEPS} steps (the newest checkpoint)" in text
    with pytest.MonkeyPatch.context() as patched:

        def deleted_meanwhile(directory: Path, name: str) -> dict[str, Tensor]:
            (directory / f"{name}.safetensors").unlink()
            patched.undo()
            return encoder_tensors(directory, name)

        patched.setattr(checkpoint_file, "encoder_tensors", deleted_meanwhile)
        assert report(run, "--output", page) == 0
    assert f"the encoder after {NUM_STEPS // EVERY * EVERY} steps (the newest checkpoint)" in page.read_text()
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    assert report(run, "--output", page) == 0
    assert "not shown: the run has neither ended nor saved a checkpoint" in page.read_text()
    assert not re.search(r"(src|href)=\"(?!data:|#)", page.read_text())


def test_what_cannot_be_shown_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(message: str) -> None:
        assert report(run) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (run / "report.html").exists()

    run = tmp_path / "run"
    fails("holds no run")
    run.mkdir()
    (run / "config.json").write_text(small_run(run).to_json())
    fails("give a run's metrics.jsonl")
    (run / "metrics.jsonl").write_text("")
    fails("has no records yet")
    (run / "metrics.jsonl").write_text("[1]\n\n")
    fails("line 1 is not a record")
    (run / "metrics.jsonl").write_text("no json\n{}\n")
    fails("line 1 is not JSON")


def test_missing_images_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_run(run, steps=2, rows="dense"))
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"dataset": "idx", "num_images": None, "data_dir": "/none"}))
    assert report(run) == 0
    assert "the training images are not available here (no such folder: /none" in (run / "report.html").read_text()


def test_neighbours_are_of_the_images_that_evaluation_uses(tmp_path: Path) -> None:
    """Files are decoded larger than the encoder's images, whose centres it takes; some encoders take no other size."""
    data = load_dataset("folder", plain_tree(tmp_path, 12), image_size=16)
    sides = list[torch.Size]()

    class Pixels(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            sides.append(images.shape[2:])
            return images.flatten(1)

    inspection = inspect_encoder(Pixels(), EncoderConfig(in_channels=3, image_size=16), data, bank=9)
    assert {tuple(side) for side in sides} == {(16, 16)}
    assert inspection.bank == 9
    seen = {one.index for image in inspection.images for one in (image.sample, *image.neighbours)}
    assert seen == {0, 1, 2, 4, 5, 6, 8, 9, 10}, "of all classes, which lie one after the other"


def test_an_image_and_its_copy_are_nearest() -> None:
    torch.manual_seed(0)
    config = EncoderConfig(width=8, blocks=(1,))
    images = torch.randint(0, 256, (10, 1, 28, 28), dtype=torch.uint8).repeat(2, 1, 1, 1)
    labels = torch.arange(10).repeat(2)
    data = Dataset(train_images=images, train_labels=labels, test_images=images[:0], test_labels=labels[:0])
    inspection = inspect_encoder(build_encoder(config), config, data, bank=20)
    for sample in inspection.images:
        nearest = sample.neighbours[0]
        assert nearest.index == (sample.sample.index + 10) % 20
        assert nearest.agrees
        assert nearest.similarity == pytest.approx(1, abs=1e-5)
        assert sample.neighbours[1].agrees is False
    some = replace(data, train_labels=torch.where(labels < 5, -1, labels))
    for sample in inspect_encoder(build_encoder(config), config, some, bank=20).images:
        assert sample.neighbours[0].agrees is (True if sample.sample.index % 10 >= 5 else None), "none is no label"
    named = inspect_encoder(build_encoder(config), config, replace(data, class_names=tuple("abcdefghij")), bank=20)
    assert all(image.sample.label == "abcdefghij"[image.sample.index % 10] for image in named.images)
    with pytest.raises(ValueError, match="1 images are too few"):
        inspect_encoder(build_encoder(config), config, data, bank=1)
    other = replace(config, in_channels=3)
    with pytest.raises(ValueError, match=r"takes 3-channel images, .* 1-channel ones: give the data set that it was"):
        inspect_encoder(build_encoder(other), other, data, bank=20)
