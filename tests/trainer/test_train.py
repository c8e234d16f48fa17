"""Whole runs on a small generated image set: their files, and what they refuse."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from tests.helpers.bars import write_bars
from tests.helpers.secure_shards import served
from tests.helpers.small_run import ONLY_ROWS, losses, small_run
from trainer.__main__ import main
from trainer.config import TrainConfig
from trainer.data import load_dataset
from trainer.data.augment import AugmentationConfig
from trainer.evaluate.features import encoder_features
from trainer.evaluate.table import evaluate_features
from trainer.loop import train
from trainer.model import EncoderConfig, load_encoder
from trainer.results import finish
from trainer.run.claim import DirectoryClaim
from trainer.run.directory import read_settings
from trainer.run.recorder import lines_of
from weightserver import LocalCluster, ShardUnavailableError, WeightClient
from weightserver.operations.certificates import write_certificates

NUM_IMAGES = 160


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("idx"), num_train=NUM_IMAGES)


def config(data_dir: Path, output: Path, **changes: Any) -> TrainConfig:
    """A small run on the images in `data_dir`."""
    settings: dict[str, Any] = {
        "dataset": "idx",
        "num_images": None,
        "data_dir": data_dir,
        "steps": 50,
        "window_size": 48,
        "window_stride": 16,
        "checkpoint_every": 1_000,
        "encoder": EncoderConfig(width=8, stem_stride=2, blocks=(1, 1)),
        "augmentation": AugmentationConfig(strong=False, min_scale=0.6),
    }
    return small_run(output, **settings | changes)


def test_training_is_the_same_with_any_row_store(data_dir: Path, tmp_path: Path) -> None:
    for rows in ("dense", "remote", "resident"):
        train(config(data_dir, tmp_path / rows, rows=rows))
    dense, remote, resident = (np.array(losses(tmp_path / rows)) for rows in ("dense", "remote", "resident"))
    assert len(dense) == 50
    assert dense[-5:].mean() < dense[:5].mean() - 0.1, "nothing was learned: this shows nothing"
    assert np.abs(remote / dense - 1).max() <= 1e-4
    assert np.array_equal(remote, resident)
    ours, theirs = (
        load_encoder(tmp_path / rows / "encoder.safetensors")[0].state_dict() for rows in ("resident", "dense")
    )
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.guard
def test_a_run_on_some_images_is_evaluated_on_all(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(config(data_dir, tmp_path / "run", num_images=64, rows="dense", steps=2, evaluate=True))
    whole = load_dataset("idx", data_dir)
    features = encoder_features(result.model.encoder, whole, result.model.config.pixels)
    assert len(features.train) == NUM_IMAGES
    assert result.results == evaluate_features(features)
    finish(result)
    assert "Trained on 64 images without labels; both probes use all 160 and their labels." in capsys.readouterr().out


@pytest.mark.guard
def test_generated_images_in_any_number(tmp_path: Path) -> None:
    """A table of a billion rows stores only the visited ones."""
    train(small_run(tmp_path / "run", num_images=10**9, steps=20, rows_per_block=63, encoder=ONLY_ROWS))
    with LocalCluster(2, tmp_path / "run" / "servers") as cluster, WeightClient(cluster.addresses) as client:
        info = client.describe()
    assert info.spec.num_rows == 10**9
    assert 64 < info.rows_stored < 500


def test_a_seed_is_a_run(data_dir: Path, tmp_path: Path) -> None:
    for name, changes in (("a", {}), ("b", {}), ("seed", {"seed": 1}), ("order", {"order_seed": 1})):
        train(config(data_dir, tmp_path / name, rows="dense", steps=8, **changes))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "seed")
    assert losses(tmp_path / "a") != losses(tmp_path / "order")


def test_a_run_that_ends_within_its_warm_up_says_so(
    data_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs, highest in ((1.0, 10), (3.0, 19)):
        output = tmp_path / str(epochs)
        train(config(data_dir, output, rows="dense", steps=20, warmup_epochs=epochs))
        rates = [json.loads(line)["learning_rate"] for line in (output / "metrics.jsonl").read_text().splitlines()]
        assert int(np.argmax(rates)) == highest
    assert caplog.text.count("the run's 20 steps end within its warm-up of 30: give fewer --warmup-epochs") == 1


def test_files_of_a_run(data_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    knn = {"knn_every": 1.0}
    result = train(config(data_dir, output, steps=25, log_every=10, **knn, evaluate=True, rows="remote"))
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [9, 19, 24]
    assert [("knn_top1" in record) for record in records] == [True, True, True]
    for record, num_steps in zip(records, (10, 10, 5), strict=True):
        assert record["images_per_second"] > 0
        assert record["pushed_bytes"] <= (num_steps + 1) * 64 * 16 * 4  # the one of the step before may be counted late
        assert record["fetched_bytes"] == num_steps * 64 * 16 * 4
        assert 0 <= record["row_wait_seconds"] <= record["seconds"]
    assert json.loads((output / "config.json").read_text())["num_negatives"] == 64
    summary = json.loads((output / "summary.json").read_text())
    assert summary == result.summary
    assert summary["steps"] == 25
    assert summary["loss"] == records[-1]["loss"]
    assert summary["mean_loss"] == records[-1]["loss"], "a tenth of three records"
    assert summary["knn_top1"] == result.results["knn"].top1
    assert summary["linear_top1"] == result.results["linear"].top1
    assert summary["peak_memory_bytes"] > 1e6
    assert any((output / "tensorboard").iterdir())
    with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
        info = client.describe()  # every update reached the disk
        assert (info.clock, info.run) == (25, "run")
    encoder, encoder_config = load_encoder(output / "encoder.safetensors")
    assert encoder_config.width == 8
    assert encoder(torch.zeros(2, 1, 28, 28)).shape == (2, 16)


def test_a_run_in_the_current_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(small_run(Path("."), steps=2, encoder=ONLY_ROWS, num_shards=1))
    with LocalCluster(1, tmp_path / "servers") as cluster, WeightClient(cluster.addresses) as client:
        assert client.describe().run == tmp_path.name


def test_a_used_directory_is_refused(data_dir: Path, tmp_path: Path) -> None:
    train(config(data_dir, tmp_path / "run", rows="dense", steps=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="holds another run"):
        train(config(data_dir, tmp_path / "run", rows="dense", steps=2))
    with pytest.raises(ValueError, match="holds a run with --rows dense, which saves no checkpoints"):
        train(config(data_dir, tmp_path / "run", steps=2, resume=True))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_directory_on_a_full_disk_is_not_claimed(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command starts the run once there is space."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match=r"cannot be used .*choose another directory"):
            train(config(data_dir, tmp_path / "run", rows="dense", steps=1))
    assert train(config(data_dir, tmp_path / "run", rows="dense", steps=1)).summary["steps"] == 1


def test_a_full_disk_is_one_line_with_the_path(tmp_path: Path) -> None:
    full = tmp_path / "metrics.jsonl"
    full.symlink_to("/dev/full")
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(OSError, match=r"metrics.jsonl cannot be written \(No space left on devi"),
    ):
        lines_of(full, stack)({"step": 0})


@pytest.mark.parametrize("links", [True, False], ids=["a disk", "a file system without links"])
def test_a_directory_is_claimed_as_a_whole(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it writes its settings has claimed nothing; nobody claims a directory twice."""

    output, claimed, write = tmp_path / "run", [], Path.write_text

    def watched(path: Path, text: str) -> int:
        claimed.append((output / "config.json").exists())
        return write(path, text)

    def no_links(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "write_text", watched)
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    for expected in (contextlib.nullcontext(), pytest.raises(ValueError, match="holds another run")):
        with expected, DirectoryClaim(small_run(output), 300, is_first=True) as claim:
            claim.keep()
    assert claimed == [False, True]
    assert [path.name for path in output.iterdir()] == ["config.json"]
    assert read_settings(output)["dim"] == 16


@pytest.mark.guard  # seconds
def test_an_unavailable_shard_stops_the_run(data_dir: Path, tmp_path: Path) -> None:
    with LocalCluster(2) as cluster:
        run = config(data_dir, tmp_path / "run", servers=",".join(cluster.addresses), retry_seconds=1)
        with pytest.raises(ShardUnavailableError, match=r"shard 1 at .* did not answer for .* s .*check that it runs"):
            train(run, on_step=lambda step: cluster.processes[1].kill())


@pytest.mark.guard
def test_a_run_can_be_watched(data_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The announced metrics page agrees with metrics.jsonl."""
    pages = []

    def scrape(step: int) -> None:
        if step == 20:
            (address,) = re.findall(r"metrics on (http://\S+)", capfd.readouterr().out)
            pages.append(urllib.request.urlopen(address).read().decode())

    train(config(data_dir, tmp_path / "run", steps=21, metrics_port=0), on_step=scrape)
    seen = {
        name: float(value) for name, value in re.findall(r"^(pic_trainer_\w+)\{.*\} (\S+)$", pages[0], re.MULTILINE)
    }
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "learning_rate", "active_rows"):
        assert seen[f"pic_trainer_{name}"] in [record[name] for record in records], name
    assert 0 < seen["pic_trainer_steps_total"] <= 20


@pytest.mark.guard
def test_training_over_tls_with_a_token(data_dir: Path, tmp_path: Path) -> None:
    """It equals training with local shards, and the run's directory contains no token."""
    certificates = tmp_path / "certificates"
    write_certificates(certificates, ["127.0.0.1"])
    options = ["--tls-cert", f"{certificates}/server.pem", "--tls-key", f"{certificates}/server-key.pem"]
    options += ["--tls-client-ca", f"{certificates}/ca.pem", "--token-file", f"{certificates}/token"]
    security = {
        "tls_ca": certificates / "ca.pem",
        "tls_cert": certificates / "client.pem",
        "tls_key": certificates / "client-key.pem",
        "token_file": certificates / "token",
    }
    with served({"secure": options}) as shards:
        settings = {"servers": shards["secure"].address, "steps": 20, "retry_seconds": 5}
        with pytest.raises(ShardUnavailableError, match=r"check the address, .* TLS options of both sides"):
            train(config(data_dir, tmp_path / "without", **settings, wait_for_servers=1))
        train(config(data_dir, tmp_path / "secure", **settings, **security))
    train(config(data_dir, tmp_path / "own", steps=20))
    assert losses(tmp_path / "secure") == losses(tmp_path / "own")
    token = (certificates / "token").read_bytes().strip()
    for path in (tmp_path / "secure").rglob("*"):
        assert path.is_dir() or token not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tls-cert client.pem", r"--tls-cert and --tls-key belong together: give both or none"),
        (
            "--servers 10.0.0.1:1 --tls-ca no-such.pem",
            r"--tls-ca no-such\.pem cannot be read: No such file or directory",
        ),
        ("--data-dir no/such/folder", r"no such folder: no/such/folder"),
        ("--window-stride 65", r"^trainer: --window-stride must lie in 1\.\.64, the window size, got 65"),
        (
            "--rows-per-block 2048 --dim 65536",
            r"^trainer: --rows-per-block is 2048, but a block of so many rows of 65536 numbers takes \d+ bytes, more",
        ),
        ("--encoder.blocks 0", r"^trainer: --encoder\.blocks is \(0,\): give at least one"),
        ("--device abacus", r"--device 'abacus' is unknown: give cpu, cuda"),
        ("--steps 1000000000000", r"would take 1e\+12 steps, at most 33,554,432 are possible"),
        ("--steps None --epochs 1e308", r"would take inf steps, at most 33,554,432 are possible"),
        ("--seed 99999999999999999999", r"--seed must lie in 0\.\.2\^64-1, got 9{20}"),
        (
            "--capacity 79",
            r"^trainer: --capacity is 79, but the \d steps that are requested in advance need 112: raise it, or",
        ),
        ("--num-images 161", r"--num-images must lie in 1\.\.160, .* got 161"),
        (
            "--dataset synthetic --data-dir None --num-images 9999 --encoder.in-channels 3",
            r"generated images have no labels: train without evaluations",
        ),
        ("--encoder.in-channels 3", r"encoder takes 3-channel images, .* have 1: give --encoder.in-chan"),
        (f"--output {__file__}", r"--output .* cannot be used \(Not a directory\): choose another directory"),
    ],
)
def test_bad_command_lines(
    arguments: str, message: str, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = ["--data-dir", str(data_dir), "--dataset", "idx", "--output", str(tmp_path / "run"), "--steps", "2"]
    defaults += ["--num-negatives", "64", "--window-size", "64", "--window-stride", "16", "--batch-size", "16"]
    with pytest.raises(SystemExit) as stopped:
        main(["fashion-mnist", *defaults, *arguments.split()])
    assert stopped.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("trainer: ")
    assert re.search(message, lines[0]), lines[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
