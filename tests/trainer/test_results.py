"""Results of a run that was made in several parts, and what is printed at its end."""

from __future__ import annotations

import io
import json
import shutil
import signal
import tarfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import trainer.results
from tests.helpers.bars import write_bars
from tests.helpers.image_tree import encoded, piece, plain_tree
from tests.helpers.small_run import EVERY, NUM_STEPS, ONLY_ROWS, PowerLoss, losses, power_loss_at, small_run
from tests.trainer.test_train import config as of_bars
from trainer.arguments import parse_config
from trainer.command_line import pic
from trainer.config import TrainConfig
from trainer.config_file import to_toml
from trainer.coverage import coverage_warnings
from trainer.data import Dataset, load_dataset
from trainer.evaluate.features import encoder_features
from trainer.evaluate.protocol import with_held_out
from trainer.evaluate.table import evaluate_features
from trainer.loop import train
from trainer.model import EncoderConfig, build_model
from trainer.results import TrainResult, finish, next_commands, warnings_of, write_results
from trainer.run.checkpoint_file import file_path, read_metadata, saved_steps
from trainer.run.directory import read_encoder
from trainer.run.plot import draw_training
from trainer.run.totals import Totals
from trainer.schedule import learning_rates
from trainer.stopping import Interrupted
from weightserver import LocalCluster, WeightClient
from weightserver.torch import margin_of

pytestmark = pytest.mark.usefixtures("one_thread")

K = 64
ROOT = Path(__file__).parents[2]


def remote(output: Path, **changes: Any) -> TrainConfig:
    """A run whose every step fetches and pushes K rows."""
    return small_run(output, **{"rows": "remote", "encoder": ONLY_ROWS} | changes)


def summary_of(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "summary.json").read_text()))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("ended") / "run"
    train(remote(output))
    return output


@pytest.mark.guard
def test_the_summary_adds_up_over_all_parts(ended: Path, tmp_path: Path) -> None:
    """Killed in step 20 and 30, and resumed from steps 13 and 26: repeated steps do not count twice."""
    output = tmp_path / "run"
    for resume, at in ((False, 20), (True, 30)):
        with pytest.raises(PowerLoss):
            train(remote(output, resume=resume), on_step=power_loss_at(at))
    train(remote(output, resume=True))
    undisturbed, summary = summary_of(ended), summary_of(output)
    assert undisturbed["parts"] == 1
    assert summary["parts"] == 3
    assert undisturbed["fetched_rows"] == summary["fetched_rows"] == K * NUM_STEPS
    assert undisturbed["pushed_rows"] == summary["pushed_rows"] == K * NUM_STEPS
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert summary["train_seconds"] > sum(record["seconds"] for record in records)
    assert summary["seconds"] >= summary["train_seconds"]


@pytest.mark.guard
def test_a_run_that_has_ended_stays_as_it_is(ended: Path, tmp_path: Path) -> None:
    """It keeps its last checkpoint, so that nothing is trained again; if killed in its evaluation, evaluated."""
    output = shutil.copytree(ended, tmp_path / "run")
    assert saved_steps(output / "checkpoints")[-1] == NUM_STEPS
    files = ("summary.json", "encoder.safetensors", "metrics.jsonl")
    before = [(output / name).read_bytes() for name in files]
    result = train(remote(output, resume=True), on_step=power_loss_at(NUM_STEPS - 1))
    assert result.summary == summary_of(ended)
    assert [(output / name).read_bytes() for name in files] == before
    assert not list((output / "checkpoints").glob("set-aside-*"))
    (output / "summary.json").unlink()
    (output / "encoder.safetensors").unlink()
    train(remote(output, resume=True), on_step=power_loss_at(NUM_STEPS - 1))
    assert (output / "encoder.safetensors").exists()
    same = ("steps", "loss", "fetched_rows", "pushed_rows")
    assert {name: summary_of(output)[name] for name in same} == {name: summary_of(ended)[name] for name in same}
    totals = json.loads(read_metadata(file_path(ended / "checkpoints", NUM_STEPS))["totals"])
    assert summary_of(output)["train_seconds"] > totals["train_seconds"]


def rates(num_steps: int) -> np.ndarray:
    return learning_rates(num_steps=num_steps, base=0.2, warmup_steps=round(0.1 * num_steps))


@pytest.mark.guard
def test_a_run_is_made_longer(ended: Path, tmp_path: Path) -> None:
    """From then on with the learning rates of the longer run; stopped and resumed again on the way."""
    output, longer = shutil.copytree(ended, tmp_path / "run"), NUM_STEPS + 2 * EVERY
    with pytest.raises(PowerLoss):
        train(remote(output, resume=True, steps=longer), on_step=power_loss_at(longer - 5))
    assert not (output / "summary.json").exists()
    train(parse_config(["--resume", "--output", str(output)]))
    assert losses(output)[:NUM_STEPS] == losses(ended)
    expected = np.concatenate([rates(NUM_STEPS), rates(longer)[NUM_STEPS:]])
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert np.array_equal(np.array([record["learning_rate"] for record in records], np.float32), expected)
    with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
        assert np.array_equal(client.learning_rates(), expected)
    summary, before = summary_of(output), summary_of(ended)
    assert (summary["steps"], summary["parts"], summary["fetched_rows"]) == (longer, 3, K * longer)
    assert summary["train_seconds"] > before["train_seconds"]
    assert json.loads((output / "config.json").read_text())["steps"] == longer
    with pytest.raises(ValueError, match=rf"a length of {longer} updates, not {NUM_STEPS}: it can become longer"):
        train(remote(output, resume=True))
    again = shutil.copytree(output, tmp_path / "again")
    train(remote(again, resume=True, resume_step=4 * EVERY, steps=longer))
    assert losses(again) == losses(output)


def test_resume_alone_takes_all_settings_of_the_run(ended: Path, tmp_path: Path) -> None:
    output = shutil.copytree(ended, tmp_path / "run")
    expected = remote(output, resume=True).with_settings(warmup_fraction=0.1)
    expected = expected.with_settings(encoder=parse_config(["--resume", "--output", str(output)]).model.encoder)
    assert parse_config(["--resume", "--output", str(output)]) == expected
    auto = parse_config(["imagenet-1k", "--output", str(output), "--resume", "auto"])
    assert auto == expected.with_settings(resume="auto")
    longer = parse_config(["--resume", "--output", str(output), "--epochs", "7", "--log-every", "3"])
    assert longer == expected.with_settings(epochs=7.0, steps=None, log_every=3)
    assert expected.model.encoder == replace(
        ONLY_ROWS, pixel_mean=expected.model.encoder.pixel_mean, pixel_std=expected.model.encoder.pixel_std
    )


def test_settings_of_one_start_are_kept_in_no_file(tmp_path: Path) -> None:
    """A resumed run that took its servers over again, unasked, would end a live one."""
    config = parse_config(["demo", "--servers", "127.0.0.1:1", "--take-over", "--output", str(tmp_path)])
    assert config.servers.take_over
    assert "take_over" not in to_toml(config, "demo")
    for earlier in ({}, {"take_over": True, "extend": True}):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json()) | earlier))
        resumed = parse_config(["--resume", "--output", str(tmp_path)])
        assert resumed == config.with_settings(take_over=False, resume=True, warmup_fraction=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_size": 100, "window_stride": 10, "batch_size": 10, "steps": 60}, "visits only 150 of 300 images"),
        ({"window_size": 100, "window_stride": 40, "batch_size": 10, "steps": 60}, "no row returns to the window"),
        ({"window_size": 100, "window_stride": 41, "batch_size": 10, "steps": 60}, ""),
        ({"window_size": 100, "window_stride": 40, "batch_size": 10, "steps": 55}, "visits only 280 of 300 images"),
        ({"window_size": 100, "window_stride": 100, "batch_size": 10, "steps": 25}, "visits only 250 of 300 images"),
        ({"window_size": 300, "window_stride": 300, "batch_size": 10, "steps": 30}, "no row returns to the window"),
        ({"window_size": 300, "window_stride": 300, "batch_size": 10, "steps": 31}, ""),
        ({"window_size": 300, "window_stride": 300, "batch_size": 10, "steps": 9}, "visits only 90 of 300 images"),
    ],
)
def test_a_run_that_cannot_visit_all_images_says_so(settings: dict[str, int], message: str, tmp_path: Path) -> None:
    config = small_run(tmp_path, **settings)
    warnings = " ".join(coverage_warnings(config, 300))
    assert (message in warnings) if message else (warnings == "")
    met = np.unique([config.sampling.visit_schedule(300).visits(0, settings["steps"] * 10)])
    assert (len(met) < 300) == ("visits only" in message)
    assert "no row returns" not in " ".join(coverage_warnings(config.with_settings(labels="shared.npy"), 300))


def test_the_advice_visits_all_images(tmp_path: Path) -> None:
    config = small_run(tmp_path, window_size=100, window_stride=10, batch_size=10, steps=60)
    (warning,) = coverage_warnings(config, 300)
    assert "--window-stride 40, or --steps 210" in warning
    (other,) = coverage_warnings(config.with_settings(steps=None, epochs=2.0), 300)
    assert "--window-stride 40, or --epochs 7" in other
    (whole,) = coverage_warnings(config.with_settings(window_size=300, window_stride=300, steps=9), 300)
    assert whole.endswith("To visit all: --steps 30")
    batches = config.with_settings(window_size=90, window_stride=90, batch_size=64, steps=None, epochs=1.0)
    assert coverage_warnings(batches, 90)[0].endswith("To visit all: --epochs 1.5")
    assert "visits only" not in " ".join(coverage_warnings(batches.with_settings(epochs=1.5), 90))
    assert "visits only" not in " ".join(coverage_warnings(config.with_settings(window_stride=40), 300))
    assert "visits only" in " ".join(coverage_warnings(config.with_settings(window_stride=39), 300))
    assert coverage_warnings(config.with_settings(steps=None, epochs=7.0), 300) != [warning]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """The result of a run on labelled images."""
    root = tmp_path_factory.mktemp("labelled")
    return train(of_bars(write_bars(root, num_train=160), root / "run", steps=30, evaluate=True))


def test_references_are_bounded_by_images_and_by_pixels() -> None:
    images, labels = torch.zeros(7, 3, 32, 32, dtype=torch.uint8), torch.arange(7)
    dataset = Dataset(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    assert trainer.results._most_compared(dataset) == {"untrained encoder": 100_000, "raw pixels": 16_276}


def of_folder(data_dir: Path, output: Path, **changes: Any) -> TrainConfig:
    """Three steps on a few images."""
    settings: dict[str, Any] = {"dataset": "folder", "num_images": None, "data_dir": data_dir, "evaluate": True}
    settings |= {"window_size": 24, "window_stride": 8, "num_negatives": 16, "steps": 3}
    return small_run(output, **settings | changes)


@pytest.mark.parametrize("labels", [(0, 1), (5, 10**15)])
def test_a_run_of_few_labels_has_its_results(
    labels: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight labelled training images beside test images: none is a tenth of them. Labels are any numbers."""
    for split, number in (("train", 40), ("test", 10)):
        with tarfile.open(tmp_path / f"{split}-0000.tar", "w") as tar:
            for image in range(number):
                members = {f"{image:03d}.jpg": encoded(piece(image))}
                if split == "test" or image < 8:
                    members[f"{image:03d}.cls"] = b"%d" % labels[image % 2]
                for name, content in members.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    finish(train(of_folder(tmp_path, tmp_path / "run", rows="dense", knn_every=1.0)))
    assert {"knn_top1", "linear_top1"} <= summary_of(tmp_path / "run").keys()
    assert "Top-1 on the test images" in capsys.readouterr().out


@pytest.mark.guard  # a run, and its resumption
def test_a_broken_test_image_leaves_out_the_results_until_it_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other image is counted in its place, as in evaluations."""
    plain_tree(tmp_path / "images/train", 24)
    plain_tree(tmp_path / "images/test", 6)
    (broken := tmp_path / "images/test/b/broken.jpg").write_bytes(b"<html>")
    config = of_folder(tmp_path / "images", tmp_path / "run")
    finish(train(config))
    said = capsys.readouterr().err
    for name in ("trained encoder", "untrained encoder", "raw pixels"):
        assert f"no results of the {name}: broken image: {broken} (not an image of a known format): " in said
    assert "knn_top1" not in summary_of(tmp_path / "run")
    broken.write_bytes(encoded(piece(30)))
    finish(train(config.with_settings(resume=True)))
    assert {"knn_top1", "linear_top1"} <= summary_of(tmp_path / "run").keys()
    assert all(json.loads((tmp_path / "run/comparison.json").read_text()).values())


def test_a_run_of_too_many_broken_images_is_refused_before_its_first_step(tmp_path: Path) -> None:
    """By a preset too, not only by `pic train FOLDER`; unless so many may be."""
    tree = plain_tree(tmp_path / "tree", 40)
    for number in range(110):
        (tree / f"a/{number}.jpg").write_bytes(b"<html>")
    config = of_folder(tree, tmp_path / "run", rows="dense", encoder=ONLY_ROWS, evaluate=False)
    with pytest.raises(ValueError, match=r"about 110 of 150 images are broken .*, and 100 may be: .*--max-broken 220"):
        train(config, on_step=lambda step: pytest.fail("a step began"))
    assert not (tmp_path / "run").exists()
    train(config.with_settings(max_broken=150))


@pytest.mark.guard  # seconds
def test_the_ending_says_whether_it_was_worth_it(
    labelled: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also compared with another run: a line of the table, the losses, and the gaps of the rows that came back."""
    output = shutil.copytree(labelled.config.run.output, tmp_path / "a")
    (output / "comparison.json").unlink(missing_ok=True)
    run = replace(labelled, config=labelled.config.with_settings(output=output))
    other = run.config.with_settings(output=tmp_path / "b", correction="none")
    train(other)
    others = {"without correction": other.run.output}
    finish(run, others)
    lines = capsys.readouterr().out
    printed = " ".join(lines.split())  # wherever lines are broken
    compared = json.loads((output / "comparison.json").read_text())
    assert list(compared) == ["trained encoder", "without correction", "untrained encoder", "raw pixels"]
    for name, row in compared.items():
        knn, linear = row["knn"], row["linear"]
        cells = f"{knn['top1']:.2f} │ {knn['setting']:g} │ {linear['top1']:.2f} │ {linear['setting']:g}"
        assert f"│ {name} │ {cells} │" in printed
    found = encoder_features(read_encoder(other.run.output)[0], run.dataset, read_encoder(other.run.output)[1].pixels)
    expected = {protocol: result.top1 for protocol, result in evaluate_features(found).items()}
    assert {protocol: result["top1"] for protocol, result in compared["without correction"].items()} == expected
    gain = compared["trained encoder"]["linear"]["top1"] - expected["linear"]
    assert f"linear probe {gain:+.1f} points)" in printed
    gain = compared["trained encoder"]["knn"]["top1"] - compared["untrained encoder"]["knn"]["top1"]
    assert f"{gain:+.1f} points over untrained encoder" in printed
    assert "over without correction" not in printed
    tenths = [found[-(len(found) // 10) :] for found in map(losses, (output, other.run.output))]
    last = [sum(tenth) / len(tenth) for tenth in tenths]
    assert last[0] != last[1]
    assert f"The loss ends at {last[0]:.2f}; without correction at {last[1]:.2f}" in printed
    summary = run.summary
    assert summary["corrected_rows"] > 0
    assert summary_of(other.run.output)["corrected_rows"] == 0
    mean = f"{summary['missed_steps'] / summary['corrected_rows']:,.0f}"
    assert f"{summary['corrected_rows']:,} rows were corrected when they came back, for gaps of {mean} steps" in printed
    assert f"and {summary['largest_gap']} at most." in printed
    for name in ("encoder.safetensors", "summary.json", "training.png", "metrics.jsonl"):
        assert name in printed
        assert (output / name).exists()
    commands = next_commands(run.config)
    assert f"{pic()} export encoder {output} --format timm --output {output}/exported" in commands
    assert lines.endswith("Next:\n" + "".join(f"  {command}\n" for command in commands))
    (output / "comparison.json").unlink()  # as if it had been interrupted, and resumed
    finish(replace(run, results={}), others)
    assert capsys.readouterr().out == lines
    unevaluated = run.config.with_settings(evaluate=False)
    finish(replace(run, results={}, config=unevaluated), others)
    assert f"without correction at {last[1]:.2f}.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([4.15] * 30, ["the loss ended at 4.15, which is chance (4.16)"]),
        ([4.1] * 30, []),
        ([5.0 - step / 60 for step in range(30)], ["which is above chance (4.16)", "still falling: more --steps"]),
        ([4.6] * 30, ["which is above chance (4.16)", "smaller"]),
    ],
)
def test_a_run_that_has_learnt_nothing_says_so(found: list[float], said: list[str], tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(found)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    notes = [note for note in warnings_of(untrained(small_run(tmp_path))) if "loss ended" in note]
    assert len(notes) == bool(said)
    assert all(text in note for note in notes for text in said)


def untrained(config: TrainConfig) -> TrainResult:
    return TrainResult(config, load_dataset("synthetic", num_images=300, image_size=16), build_model(EncoderConfig()))


@pytest.mark.parametrize("margin", ["cosface", "arcface", "adaface"])
def test_a_margin_is_no_reason_to_say_that_a_run_has_learnt_nothing(
    margin: Literal["cosface", "arcface", "adaface"], tmp_path: Path
) -> None:
    """It adds to the loss, of which chance is that of a collapse: all cosines are 1."""
    config = small_run(tmp_path, margin=margin, temperature=0.03)
    cosines = torch.ones(1, config.rows.num_negatives, dtype=torch.float64)
    cosines[:, :1] = margin_of(margin, None).of(cosines[:, :1])
    chance = F.cross_entropy(cosines / 0.03, torch.tensor([0])).item()
    assert config.loss.chance(config.rows.num_negatives) == pytest.approx(chance)
    assert replace(config.loss, temperature=1e-4).chance(num_negatives=1) == 0.0
    for loss, said in ((np.log(64) + 3, []), (chance, [f"the loss ended at {chance:.2f}, which is chance"])):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": loss}) + "\n")
        notes = [note for note in warnings_of(untrained(config)) if "chance" in note]
        assert [note.partition(" (")[0] for note in notes] == said


@pytest.mark.guard
@pytest.mark.parametrize(("features", "left"), [("encoder_features", 1), ("pixel_features", 2)])
def test_ctrl_c_leaves_out_the_references_that_are_missing(
    labelled: Any,
    features: str,
    left: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is there is printed and drawn, and the command goes on; the next one computes the others."""
    output = shutil.copytree(labelled.config.run.output, tmp_path / "run")
    for name in ("comparison.json", "training.png"):
        (output / name).unlink(missing_ok=True)
    run = replace(labelled, config=labelled.config.with_settings(output=output))
    with monkeypatch.context() as patched:
        patched.setattr(trainer.results, features, lambda *_: signal.raise_signal(signal.SIGINT))
        finish(run)
    printed = capsys.readouterr()
    names = ["trained encoder", "untrained encoder", "raw pixels"]
    for number, name in enumerate(names):
        assert (f"│ {name} " in printed.out) == (number < left)
    assert "interrupted: the comparison is left out from here on; --resume makes it\n" in printed.err
    assert (output / "training.png").exists()
    assert "\nNext:\n  " in printed.out
    assert list(json.loads((output / "comparison.json").read_text())) == names[:left]
    finish(run)
    assert list(json.loads((output / "comparison.json").read_text())) == names


@pytest.mark.guard
def test_an_interrupted_ending_says_how_to_go_on(
    labelled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    output = labelled.config.run.output
    monkeypatch.setattr(trainer.results, "draw_training", interrupted)
    with pytest.raises(Interrupted, match="training, which is complete and saved") as stopped:
        finish(labelled)
    assert stopped.value.exit_status == 130
    assert str(stopped.value).endswith(f"{pic()} train --resume --output {output}")
    monkeypatch.setattr(trainer.results, "encoder_features", interrupted)
    config = labelled.config.with_settings(rows="dense", output=tmp_path)
    with pytest.raises(Interrupted, match=r"pic evaluate knn --run"):
        write_results(config, labelled.dataset, labelled.model, Totals())
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.guard
def test_without_test_images_a_tenth_of_the_training_images_is_held_out(
    labelled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a reference is of a part of the others, which a line says."""
    source = labelled.dataset
    dataset = replace(source, test_images=source.test_images[:0], test_labels=source.test_labels[:0])
    dataset.check_evaluated(trained_on_labels=False)
    with pytest.raises(ValueError, match="train with --no-evaluate"):
        dataset.check_evaluated(trained_on_labels=True)
    with pytest.raises(ValueError, match="other classes: train with --no-evaluate"):
        replace(dataset, untested="other classes").check_evaluated(trained_on_labels=False)
    shutil.copytree(labelled.config.run.output, output := tmp_path / "run")
    (output / "comparison.json").unlink(missing_ok=True)
    run = replace(labelled, config=labelled.config.with_settings(output=output), dataset=dataset, results={})
    monkeypatch.setattr(trainer.results, "_MOST_UNTRAINED", 100)
    drawn = list[dict[str, Any]]()

    def recorded(metrics: Path, **content: Any) -> bytes:
        drawn.append(content)
        return draw_training(metrics, **content)

    monkeypatch.setattr(trainer.results, "draw_training", recorded)
    finish(run)
    printed = " ".join(capsys.readouterr().out.split())
    assert "Top-1 on 16 training images, held out by class (%)" in printed
    assert "Untrained encoder: of 100 of the 160 training images, to save minutes." in printed
    part, pixels = trainer.results._part(with_held_out(dataset), 100), run.config.model.encoder.pixels
    assert (len(part.train_images), len(part.test_images)) == (100, 16)
    found = evaluate_features(encoder_features(trainer.results._untrained(run), part, pixels))
    compared = json.loads((output / "comparison.json").read_text())
    assert compared["untrained encoder"] == {name: asdict(result) for name, result in found.items()}
    for name, results in compared.items():
        figures = "".join(f" │ {one['top1']:.2f} │ {one['setting']:g}" for one in map(results.get, ("knn", "linear")))
        assert f"│ {name}{figures} │" in printed
    assert drawn[0]["references"].keys() == {f"held-out images: {name}" for name in compared}
