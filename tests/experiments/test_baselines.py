"""Other methods in the trainer's harness: their losses, their settings, and runs that are killed and resumed."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from experiments import run_cell
from experiments.baselines.loop import schedule, train_baseline
from experiments.baselines.methods import Diet, MemoryBank, Method, MoCoV2, SimCLR, Supervised, Task
from experiments.cells import PIXELS, UNTRAINED, Cell
from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import NUM_STEPS, losses, small_run
from trainer.config import TrainConfig
from trainer.data import Dataset, load_dataset
from trainer.evaluate.features import encoder_features, pixel_features, untrained_encoder
from trainer.evaluate.table import evaluate_features
from trainer.model import EncoderConfig, PICModel, build_model

ROOT = Path(__file__).parents[2]
SMALL = EncoderConfig(width=8, stem_stride=2, blocks=(1,), image_size=8)
N, B, D = 20, 6, 4
LIGHTLY = pytest.mark.skipif(
    importlib.util.find_spec("lightly") is None,
    reason="needs lightly: pip install -c constraints.txt '.[trainer,experiments]'",
)
OF_LIGHTLY = ("simclr", "mocov2")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def task() -> Task:
    """Random images of three classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(N) % 3
    dataset = Dataset(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    return Task(dataset, batch_size=B, dim=D)


def model_of() -> PICModel:
    return build_model(SMALL, D, seed=1)


def batch(num_views: int) -> tuple[list[Tensor], Tensor]:
    """Views of images 3, 4, ..., and these numbers."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(B, 1, 8, 8, generator=generator) for _ in range(num_views)], torch.arange(3, 3 + B)


def step(method: Method, views: list[Tensor], images: Tensor) -> float:
    """One update; returns the loss."""
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1)
    loss: Tensor = method(views, images)
    loss.backward()
    optimizer.step()
    method.finish_update()
    return loss.item()


def test_the_memory_bank_is_a_softmax_over_all_images(task: Task) -> None:
    """Only the batch's embeddings move, each to the mean of old and new."""
    views, images = batch(1)
    method = MemoryBank(model_of(), task, temperature=0.5)
    before = method.bank.clone()
    embeddings = F.normalize(copy.deepcopy(method.model)(views[0])).detach()  # (B, D)
    logits = embeddings @ before.T / 0.5
    expected = (logits.logsumexp(dim=1) - logits[torch.arange(B), images]).mean().item()
    assert step(method, views, images) == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(method.bank[images], F.normalize(0.5 * (before[images] + embeddings)), atol=1e-6)
    others = torch.ones(N, dtype=torch.bool).index_fill(0, images, False)
    assert torch.equal(method.bank[others], before[others])
    assert method.bank.norm(dim=1).sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("smoothing", [0.0, 0.8])
def test_diet_is_a_plain_softmax_over_all_images(task: Task, smoothing: float) -> None:
    """It classifies features, without a projection head, and moves encoder and classifier."""
    views, images = batch(1)
    method = Diet(model_of(), task, label_smoothing=smoothing)
    started = copy.deepcopy(method)
    features = started.model.encoder(views[0])
    log_shares = (features @ started.classifier.weight.T).log_softmax(dim=1)  # (B, N)
    targets = torch.full((B, N), smoothing / N)
    targets[torch.arange(B), images] += 1 - smoothing
    expected = -(targets * log_shares).sum(dim=1).mean().item()
    assert step(method, views, images) == pytest.approx(expected, rel=1e-5)
    assert "classifier.bias" not in method.state_dict()
    for name in ("classifier.weight", "model.encoder.stages.0.weight"):
        assert not torch.equal(method.get_parameter(name), started.get_parameter(name))


def test_supervised_learning_takes_the_labels_of_the_images(task: Task) -> None:
    views, images = batch(1)
    method = Supervised(model_of(), task)
    logits = copy.deepcopy(method)
    expected = F.cross_entropy(logits.classifier(logits.model.encoder(views[0])), images % 3).item()
    assert step(method, views, images) == pytest.approx(expected, rel=1e-5)
    assert method.num_choices == 3


@LIGHTLY
@pytest.mark.guard
def test_simclr_tells_the_other_view_from_those_of_other_images(task: Task) -> None:
    views, images = batch(2)
    method = SimCLR(model_of(), task, temperature=0.5)
    unit = F.normalize(copy.deepcopy(method.model)(torch.cat(views)).detach())  # (2B, D)
    logits = (unit @ unit.T / 0.5).fill_diagonal_(-torch.inf)
    other = torch.arange(2 * B).roll(B)
    assert step(method, views, images) == pytest.approx(F.cross_entropy(logits, other).item(), rel=1e-5)


@LIGHTLY
@pytest.mark.guard
def test_moco_follows_with_its_key_encoder_and_queues_keys(task: Task) -> None:
    views, images = batch(2)
    method = MoCoV2(model_of(), task, queue_size=8, momentum=0.75, batch_norm_size=B)
    started, queue = copy.deepcopy(method.model), method.state_dict()["queue"].clone()
    assert queue.shape == (8, D)
    queries = F.normalize(copy.deepcopy(started)(views[0])).detach()
    keys = F.normalize(copy.deepcopy(started)(views[1])).detach()  # the key encoder starts as the trained one
    logits = torch.cat([(queries * keys).sum(dim=1, keepdim=True), queries @ queue.T], dim=1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(B, dtype=torch.int64)).item()
    assert step(method, views, images) == pytest.approx(expected, rel=1e-5)
    state = method.state_dict()
    assert torch.allclose(state["queue"][:B], keys, atol=1e-6)
    assert torch.equal(state["queue"][B:], queue[B:])
    assert state["queue_position"].item() == B
    trained = copy.deepcopy(method.model)
    step(method, views, images)
    for key, first, second in zip(*(net.parameters() for net in (method.key_model, started, trained)), strict=True):
        assert key.grad is None
        assert torch.allclose(key, 0.75 * first + 0.25 * second, atol=1e-6)
    last = "head.2.weight"
    assert not torch.allclose(trained.get_parameter(last), started.get_parameter(last))


@pytest.mark.parametrize(("views", "expected"), [(1, 20), (2, 40)])
def test_updates_count_views(views: int, expected: int) -> None:
    """Two views of each image in an update: half as many updates as PIC with a single view, the same learning rates."""
    config = small_run(Path("unused"), views=views, warmup_fraction=0.1)
    num_steps, rates = schedule(config, 300, 2)
    assert num_steps == len(rates) == expected
    assert rates.argmax() == round(0.1 * expected)
    assert rates.max() == pytest.approx(config.optimization.learning_rate)
    assert rates[0] == pytest.approx(config.optimization.learning_rate / 100)


@LIGHTLY
@pytest.mark.guard
def test_moco_normalises_queries_and_keys_in_parts(task: Task) -> None:
    views, images = batch(2)
    method = MoCoV2(model_of(), task)  # one part would make shuffling change nothing
    seen: dict[Any, list[Tensor]] = {method.model: [], method.key_model: []}
    for network in seen:
        network.register_forward_pre_hook(lambda network, inputs: seen[network].append(inputs[0].clone()))
    torch.manual_seed(1)
    step(method, views, images)
    assert [[len(part) for part in parts] for parts in seen.values()] == [[B // 2] * 2] * 2
    queries, keys = (torch.cat(parts) for parts in seen.values())
    assert torch.equal(queries, views[0])
    assert not torch.equal(keys, views[1]), "keys are shuffled"
    assert torch.equal(keys.flatten(1).sort(dim=0).values, views[1].flatten(1).sort(dim=0).values)


def test_unlabelled_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="images have no labels"):
        train_baseline("supervised", baseline(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def baseline(output: Path, **changes: Any) -> TrainConfig:
    """A small run, as cells have: begun or resumed."""
    return small_run(output, resume="auto", **changes)


def test_a_run_that_has_ended_returns_its_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = train_baseline("memory-bank", baseline(run, steps=4))
    encoder = (run / "encoder.safetensors").read_bytes()
    assert summary == json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["views"] == 4 * 16
    assert train_baseline("memory-bank", baseline(run, steps=4)) == summary
    assert (run / "encoder.safetensors").read_bytes() == encoder
    with pytest.raises(ValueError, match=r"whose --learning-rate is 0\.2, not 0\.1: give the same settings"):
        train_baseline("memory-bank", baseline(run, steps=4, learning_rate=0.1))


def labelled(tmp_path: Path, **changes: Any) -> TrainConfig:
    """A run on pieces of photographs in three classes, half of them to test on."""
    plain_tree(tmp_path / "images/train", 60)
    plain_tree(tmp_path / "images/test", 30, first=60)
    changes = {"dataset": "folder", "data_dir": tmp_path / "images", "num_images": None, "steps": 12, **changes}
    return baseline(tmp_path / "run", window_size=32, window_stride=8, num_negatives=16, **changes)


@pytest.mark.guard
def test_what_is_not_trained_is_evaluated_as_runs_are(tmp_path: Path) -> None:
    """With the labels of the images that these are trained on."""
    config = labelled(tmp_path)
    dataset = load_dataset("folder", config.data.data_dir, image_size=16)
    mean, std = dataset.pixels
    encoder = replace(config.model.encoder, pixel_mean=mean, pixel_std=std)
    features = {
        PIXELS: pixel_features(dataset),
        UNTRAINED: encoder_features(untrained_encoder(encoder, dataset, config.sampling.seed), dataset, encoder.pixels),
    }
    (tmp_path / "run").mkdir()
    for method, found in features.items():
        measures = run_cell._trained(Cell(name="", method=method), config)["measures"]
        assert measures == {f"{protocol}_top1": result.top1 for protocol, result in evaluate_features(found).items()}
        few = replace(
            dataset, whole=dataset, train_images=dataset.train_images[:9], train_labels=dataset.train_labels[:9]
        )
        if method == PIXELS:
            assert len(run_cell._features(method, config, few).train) == 9


@pytest.mark.guard
def test_a_run_has_the_files_of_the_trainers(tmp_path: Path) -> None:
    """kNN over time in metrics.jsonl, the same number of evaluations for one view and two."""
    config = labelled(tmp_path, steps=48, knn_every=4.0)
    methods = ["supervised", *(["simclr"] if importlib.util.find_spec("lightly") else [])]
    for method in methods:
        summary = train_baseline(method, config.with_settings(output=tmp_path / method))
        assert summary.keys() == {"loss", "steps", "epochs", "views", "train_seconds"}
        records = [json.loads(line) for line in (tmp_path / method / "metrics.jsonl").read_text().splitlines()]
        assert len(records) == summary["steps"] == (48 if method == "supervised" else 24)
        assert sum("knn_top1" in record for record in records) == 4  # 12.8 epochs, and the last step
        assert "initial_knn_top1" in records[0]
        assert all(record["seconds"] > 0 for record in records)
        assert (tmp_path / method / "encoder.safetensors").exists()
    losses_of = losses(tmp_path / "supervised")
    assert sum(losses_of[-5:]) < sum(losses_of[:5])


@pytest.mark.guard
@pytest.mark.parametrize(
    "method",
    [
        "memory-bank",
        pytest.param("diet", marks=pytest.mark.slow),
        pytest.param("simclr", marks=[LIGHTLY, pytest.mark.slow]),
        pytest.param("mocov2", marks=[LIGHTLY, pytest.mark.slow]),
    ],
)
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, method: str) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_baseline(method, baseline(whole))
    num_steps = NUM_STEPS // 2 if method in OF_LIGHTLY else NUM_STEPS
    command = [sys.executable, "-m", "tests.helpers.dying_baseline", method, str(killed), str(num_steps - 3)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert [path.name for path in (killed / "checkpoints").iterdir()] == [
        f"step-{(num_steps - 3) // 13 * 13:012d}.safetensors"
    ]
    train_baseline(method, baseline(killed))
    weights, expected = load_file(killed / "encoder.safetensors"), load_file(whole / "encoder.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert losses(killed) == losses(whole)
    assert len(losses(whole)) == num_steps
    if method in ("memory-bank", "simclr"):  # MoCo's queue starts as noise, which is easy; DIET's loss hardly moves yet
        assert losses(whole)[-1] < losses(whole)[0]
