"""kNN evaluations during training: of a balanced sample."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainer.evaluate.knn_probe
from tests.helpers.bars import write_bars
from tests.helpers.small_run import PowerLoss, power_loss_at, small_run
from trainer.build import model_of
from trainer.data import load_dataset
from trainer.data.pixels import MINUS_ONE_TO_ONE
from trainer.evaluate.features import encode
from trainer.evaluate.knn import leave_one_out_knn_top1
from trainer.evaluate.knn_probe import KnnProbe, balanced_sample
from trainer.loop import train
from trainer.model import EncoderConfig, build_model
from trainer.run.resume import run_settings
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EncoderConfig(width=8, stem_stride=2, blocks=(1, 1))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("idx"), num_train=300)


def run_with_knn(
    data_dir: Path, output: Path, on_step: Callable[[int], None] = lambda step: None, **changes: Any
) -> list[dict[str, Any]]:
    """The records of a run that would evaluate at every step."""
    settings: dict[str, Any] = {"dataset": "idx", "num_images": None, "data_dir": data_dir, "encoder": SMALL}
    settings |= {"rows": "dense", "steps": 8, "knn_every": 0.01} | changes
    train(small_run(output, **settings), on_step=on_step)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_each_class_has_as_many_images_as_any_other() -> None:
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([1000, 50, 3, 200]))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    chosen = balanced_sample(labels, 93, seed=1)
    assert len(chosen.unique()) == 93
    assert labels[chosen].bincount().tolist() == [30, 30, 3, 30]
    assert torch.equal(chosen, balanced_sample(labels, 93, seed=1))
    other = balanced_sample(labels, 93, seed=2)
    assert len(set(chosen.tolist()) & set(other.tolist())) < 60
    assert sorted(labels[balanced_sample(labels, 94, seed=1)].bincount().tolist()) == [3, 30, 30, 31]


def test_of_many_classes_some_are_taken_with_ten_images_each() -> None:
    """With an image of each, none would have a neighbour of its class."""
    labels = torch.arange(300).repeat(20)
    chosen = balanced_sample(labels, 100, seed=1)
    assert labels[chosen].unique(return_counts=True)[1].tolist() == [10] * 10
    assert len(chosen.unique()) == 100
    assert leave_one_out_knn_top1(torch.eye(300)[labels[chosen]], labels[chosen]) == 100
    others = [labels[balanced_sample(labels, 100, seed=seed)].unique().tolist() for seed in (1, 2)]
    assert others[0] == labels[chosen].unique().tolist() != others[1]
    labels = torch.cat([torch.arange(5_000), torch.arange(400).repeat(2)])  # 400 of three images, the others of one
    of_class = labels[balanced_sample(labels, 100, seed=1)].unique(return_counts=True)[1]
    assert of_class.sum() == 100
    assert of_class.min() > 1, "an only image has no neighbour of its class"
    assert len(balanced_sample(torch.arange(200), 100, seed=1)) == 100


def test_a_small_set_is_taken_whole() -> None:
    labels = torch.tensor([4, 4, 0, 2, 2, 2])  # classes without images too
    assert balanced_sample(labels, 10_000, seed=0).sort().values.tolist() == list(range(6))
    assert len(balanced_sample(torch.arange(90), 100, seed=0)) == 90, "of however many classes"


def test_the_same_images_are_evaluated_each_time(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of 128, with the result of all at once."""
    monkeypatch.setattr(trainer.evaluate.knn_probe, "NUM_IMAGES", 200)
    dataset, model = load_dataset("idx", data_dir), build_model(SMALL, seed=0)
    encoder = model.encoder.train()
    probe, sizes = KnnProbe(model, dataset, Ranks(), seed=0), list[int]()
    encoder.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    found = [probe.observe(due=True) for _ in range(2)]
    assert sizes == [128, 72] * 2
    assert encoder.training
    chosen = balanced_sample(dataset.train_labels, 200, seed=0)
    features = encode(encoder, dataset.train_images[chosen], None, MINUS_ONE_TO_ONE)
    expected = {"knn_top1": leave_one_out_knn_top1(features, dataset.train_labels[chosen])}
    assert found == [expected] * 2
    assert probe.observe(due=False) == {}


def test_the_first_record_says_what_the_untrained_encoder_reaches(data_dir: Path, tmp_path: Path) -> None:
    records = run_with_knn(data_dir, tmp_path / "run")
    assert ["initial_knn_top1" in record for record in records] == [True] + [False] * 7
    untrained = model_of(run_settings(tmp_path / "run"), Ranks())
    probe = KnnProbe(untrained, load_dataset("idx", data_dir), Ranks(), seed=0)
    assert records[0]["initial_knn_top1"] == probe.observe(due=True)["knn_top1"]


def test_a_run_that_is_killed_before_its_first_record_has_that_too(data_dir: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes: dict[str, Any] = {"rows": "resident", "log_every": 4, "checkpoint_every": 2}
    expected = run_with_knn(data_dir, whole, **changes)
    with pytest.raises(PowerLoss):
        run_with_knn(data_dir, killed, power_loss_at(3), **changes)
    records = run_with_knn(data_dir, killed, **changes, resume=True)
    assert "initial_knn_top1" in expected[0]
    for name in ("initial_knn_top1", "knn_top1", "loss"):
        assert [record.get(name) for record in records] == [record.get(name) for record in expected], name


@pytest.mark.guard  # seconds
def test_their_time_is_that_of_no_step(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, passed = time.perf_counter, 0.0

    def slow(features: Tensor, labels: Tensor) -> float:
        nonlocal passed
        passed += 1e4
        return 50.0

    for clock in ("time.perf_counter", "weightserver.common.stages.perf_counter"):
        monkeypatch.setattr(clock, lambda: now() + passed)
    monkeypatch.setattr(trainer.evaluate.knn_probe, "leave_one_out_knn_top1", slow)
    records = run_with_knn(data_dir, tmp_path / "run")
    assert passed > 1e4
    assert all(record["seconds"] < 1e4 for record in records), "each evaluation took 10,000 s"
    for record in records:
        assert record["images_per_second"] == pytest.approx(16 / record["seconds"])
        stages = sum(
            record[f"{name}_seconds"] for name in ("data", "rows", "forward", "backward", "optimizer", "other")
        )
        assert stages == pytest.approx(record["seconds"], rel=0.05, abs=2e-3)
