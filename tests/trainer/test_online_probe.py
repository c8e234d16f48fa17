"""The online linear probe: it learns, it is what torch's own layers compute, and the run does not notice it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.bars import write_bars
from tests.helpers.small_run import losses, small_run
from trainer.config import TrainConfig
from trainer.data.augment import AugmentationConfig
from trainer.loop import train
from trainer.model import EncoderConfig, PICModel, build_model, load_encoder
from trainer.online_probe import OnlineProbe
from trainer.run.checkpoint_file import file_path, saved_steps
from weightserver import LocalCluster, WeightClient
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_IMAGES, NUM_CLASSES = 160, 3
NAMES = {"counts"} | {
    f"{name}{state}" for name in ("weight", "bias") for state in ("", ".step", ".exp_avg", ".exp_avg_sq")
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("idx"), num_train=NUM_IMAGES)


def config(data_dir: Path, output: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "dataset": "idx",
        "num_images": None,
        "data_dir": data_dir,
        "window_size": 48,
        "window_stride": 16,
        "learning_rate": 0.05,
        "encoder": EncoderConfig(width=8, stem_stride=2, blocks=(1, 1)),
        "online_probe": True,
    }
    return small_run(output, **settings | changes)


def top1s(output: Path) -> list[float]:
    return [json.loads(line)["online_top1"] for line in (output / "metrics.jsonl").read_text().splitlines()]


class Case:
    """Features of a model of one layer for given steps of two parts, two views and a small crop.

    Each step has images of all classes, of none a third: otherwise a first gradient is 0, and Adam magnifies rounding.
    """

    batch_size, num_views, num_crops, feature_dim = 12, 2, 3, 5

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = 3 + torch.randn(4, 2, 3, 6, self.feature_dim, generator=generator)  # steps, A, V, B / A, d
        shares = torch.repeat_interleave(torch.tensor([7, 3, 2]))
        self.labels = torch.stack([shares[torch.randperm(12, generator=generator)] for _ in range(4)]).view(4, 2, 6)

    def probe(self, ranks: Ranks) -> tuple[PICModel, OnlineProbe]:
        mine = ranks.share(6)
        model = build_model(EncoderConfig(name="none"), 4, seed=0)
        model.feature_dim, model.head = self.feature_dim, nn.Sequential(nn.Linear(self.feature_dim, 4))
        probe = OnlineProbe(
            model,
            NUM_CLASSES,
            ranks,
            labels_of=lambda step: self.labels[step][:, mine],
            num_views=self.num_views,
            num_crops=self.num_crops,
            batch_size=self.batch_size,
        )
        return model, probe

    def learned(self, ranks: Ranks) -> dict[str, Tensor]:
        """The probe after all steps, by this rank's share of the images."""
        model, probe = self.probe(ranks)
        for step, parts in enumerate(self.features):
            for part in parts:
                for seen in part:
                    model.head(seen[ranks.share(6)].clone().requires_grad_())
            probe.learn(step)
        return {name: tensor.clone() for name, tensor in probe.tensors().items()}


def test_it_is_torchs_batch_norm_and_linear_layer_with_adam() -> None:
    case = Case()
    norm, linear = nn.BatchNorm1d(case.feature_dim, affine=False), nn.Linear(case.feature_dim, NUM_CLASSES)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.Adam(linear.parameters())
    correct = 0
    for features, labels in zip(case.features, case.labels, strict=True):
        optimizer.zero_grad()
        logits = torch.stack([linear(norm(features[part, view])) for part in (0, 1) for view in (0, 1)])
        own = labels.repeat_interleave(2, dim=0)
        F.cross_entropy(logits.flatten(0, 1), own.flatten()).backward()
        optimizer.step()
        correct += int((logits.argmax(dim=-1) == own).sum())
    found = case.learned(Ranks())
    assert found.keys() == NAMES
    torch.testing.assert_close(found["weight"], linear.weight.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["bias"], linear.bias.detach(), rtol=1e-4, atol=1e-6)
    assert found["counts"].tolist() == [correct, 4 * 24], "small crops are ignored"


def test_top1_is_that_of_the_steps_since_the_last_record() -> None:
    case = Case()
    model, probe = case.probe(Ranks())
    right: list[float] = []
    for _ in range(400):
        for seen in case.features[0].flatten(0, 1):
            model.head(seen)
        probe.learn(0)
        right.append(probe.take_top1())
    assert right[0] == pytest.approx(100 * (case.labels[0] == 0).double().mean().item()), "untrained, it says 0"
    assert right[-1] > right[0]
    assert probe.tensors()["counts"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"views": 2, "accumulate": 2, "small_crops": 1, "small_crop_size": 12, "precision": "bfloat16"},
            id="views, parts, crops and bfloat16",
            marks=pytest.mark.guard,
        ),
    ],
)
def test_the_run_is_the_same_without_it(
    changes: dict[str, Any], data_dir: Path, tmp_path: Path, cluster: LocalCluster, client: WeightClient
) -> None:
    """Losses, encoder and rows, bit for bit, with kNN evaluations too."""
    ends = []
    for name, watched in (("without", {"online_probe": False}), ("with", {"knn_every": 0.5})):
        client.drop_table()
        settings = {"steps": 12, "servers": ",".join(cluster.addresses)} | changes | watched
        train(config(data_dir, tmp_path / name, **settings))
        state = client.fetch_state(range(NUM_IMAGES), step=12)
        encoder = load_encoder(tmp_path / name / "encoder.safetensors")[0].state_dict()
        ends.append((losses(tmp_path / name), [torch.from_numpy(state.weight.copy()), *encoder.values()]))
    (without, tensors), (with_it, others) = ends
    assert without == with_it
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, others, strict=True))


def test_it_learns(data_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    easy = AugmentationConfig(strong=False, min_scale=0.8)
    encoder = EncoderConfig(width=8, stem_stride=2, blocks=(1, 1), pool_size=3)
    train(config(data_dir, output, rows="dense", steps=100, log_every=25, augmentation=easy, encoder=encoder))
    found = top1s(output)
    assert found[0] < found[-1]
    assert found[-1] > 40, "chance is 10 %"
    summary = json.loads((output / "summary.json").read_text())
    assert summary.keys().isdisjoint({"online_top1"})


@pytest.mark.guard
def test_a_resumed_run_has_the_same_probe(data_dir: Path, tmp_path: Path) -> None:
    """From a checkpoint between two records."""

    def stop(step: int) -> None:
        if step == 22:
            raise OSError("the power went out")

    options: dict[str, Any] = {"log_every": 10, "steps": 39, "checkpoint_every": 13, "rows_per_block": 63}
    train(config(data_dir, tmp_path / "whole", **options))
    with pytest.raises(OSError, match="power"):
        train(config(data_dir, tmp_path / "parts", **options), on_step=stop)
    train(config(data_dir, tmp_path / "parts", resume=True, **options))
    assert top1s(tmp_path / "parts") == top1s(tmp_path / "whole")
    whole, parts = (load_file(file_path(tmp_path / name / "checkpoints", 26)) for name in ("whole", "parts"))
    assert {name.removeprefix("probe.") for name in whole if name.startswith("probe.")} == NAMES
    differing = {name for name, tensor in whole.items() if not torch.equal(tensor, parts[name])}
    assert differing == {"head._extra_state"}, "which names the servers' own checkpoint"


@pytest.mark.guard
def test_a_checkpoint_without_it_starts_a_new_one(
    data_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    output = tmp_path / "run"
    train(config(data_dir, output, steps=10, checkpoint_every=8, online_probe=False))
    train(config(data_dir, output, steps=10, checkpoint_every=9, resume=True, resume_step=8))
    assert caplog.text.count("the online probe in the checkpoint is missing: a new one starts untrained") == 1
    assert len(losses(output)) == 10
    assert "online_top1" in (output / "metrics.jsonl").read_text().splitlines()[-1]
    assert saved_steps(output / "checkpoints")[-2:] == [9, 10]


def test_the_probe_of_other_labels_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    _, probe = Case().probe(Ranks())
    probe.restore({"weight": torch.ones(4, 5), "bias": torch.ones(4), "counts": torch.ones(2, dtype=torch.int64)})
    assert "the online probe in the checkpoint is for 4 x 5 weights: a new one starts untrained" in caplog.text
    assert not probe.tensors()["weight"].any()


def test_images_without_labels_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^generated images have no labels: [^\n]*$"):
        train(small_run(tmp_path / "run", online_probe=True))
