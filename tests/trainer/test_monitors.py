"""Monitors of a run against values computed by hand, by NumPy and on one rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer.monitors
from tests.helpers.small_run import small_run
from trainer.loop import train
from trainer.loss import LossConfig
from trainer.monitors import Monitors, Update, gradient_norm, is_own_class_first, rankme
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = {"instance_top1", "rankme", "feature_std", "mean_cosine", "gradient_norm", "row_norm"}


def test_an_image_is_recognised_if_its_own_class_is_above_all_others() -> None:
    classes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]])  # the last is padding
    embeddings = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 1.0], [-1.0, -2.0]])
    labels = torch.tensor([0, 1, 0, 0])
    found = is_own_class_first(embeddings, classes, labels, 2, Ranks())
    assert found.tolist() == [True, False, False, True], "equal logits do not recognise it"


@pytest.mark.parametrize("softmax", ["cosine", "plain"])
def test_all_monitors_of_a_batch(softmax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against NumPy, with two parts of a batch and a window of two steps."""
    monkeypatch.setattr(trainer.monitors, "RANKME_WINDOW", 12)
    generator = torch.Generator().manual_seed(0)
    encoder = nn.Linear(3, 2)
    encoder.weight.grad, encoder.bias.grad = torch.full((2, 3), 2.0), torch.ones(2)
    monitors = Monitors(encoder, LossConfig(softmax=softmax), Ranks(), batch_size=6)
    steps = [torch.randn(2, 3, 5, generator=generator) for _ in range(3)]
    classes, labels = torch.randn(9, 5, generator=generator), torch.tensor([0, 3, 2, 6, 5, 4])
    found = {}
    monitors.measure_gradient()
    for number, embeddings in enumerate(steps):
        monitors.keep(embeddings)
        found = monitors.measure(Update(torch.tensor(0.0), embeddings, classes, labels), num_rows=7)
        assert ("rankme" in found) == (number > 0), "until the window is full"
    batch = steps[2].flatten(0, 1).double().numpy()
    rows = classes[:7].double().numpy()
    lengths = np.linalg.norm(rows, axis=1)
    logits = batch @ (rows / lengths[:, None] if softmax == "cosine" else rows).T
    normalised = batch / np.linalg.norm(batch, axis=1, keepdims=True)
    cosines = normalised @ normalised.T
    window = np.concatenate([step.flatten(0, 1).double().numpy() for step in steps[1:]])
    singular = np.linalg.svd(window / np.linalg.norm(window, axis=1, keepdims=True), compute_uv=False)
    share = singular / singular.sum()
    assert found == pytest.approx(
        {
            "instance_top1": 100 * (logits.argmax(axis=1) == labels.numpy()).mean(),
            "rankme": np.exp(-(share * np.log(share)).sum()),
            "feature_std": normalised.std(axis=0).mean(),
            "mean_cosine": cosines[~np.eye(6, dtype=bool)].mean(),
            "gradient_norm": math.sqrt(6 * 4 + 2),
            "row_norm": lengths.mean(),
        },
        rel=1e-5,
    )


def test_rankme_of_fewer_embeddings_than_dimensions() -> None:
    """It has a singular value for each embedding: further ones, of 0, would each count as ε and take long."""
    wide = torch.randn(8, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert rankme(wide) == pytest.approx(rankme(wide.T), rel=1e-9)


def test_what_overflowed_is_left_out() -> None:
    encoder = nn.Linear(1, 1)
    encoder.weight.grad = torch.full((1, 1), math.inf)
    monitors = Monitors(encoder, LossConfig(), Ranks(), batch_size=1)
    monitors.keep(torch.ones(1, 1, 4))
    monitors.measure_gradient()
    update = Update(torch.tensor(0.0), torch.ones(1, 1, 4), torch.ones(2, 4), torch.tensor([0]))
    assert monitors.measure(update, num_rows=2).keys() == {"instance_top1", "feature_std", "row_norm"}


def test_a_run_records_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of generated images, which have no labels; with two views and parts, at logged steps only."""
    monkeypatch.setattr(trainer.monitors, "RANKME_WINDOW", 32)
    run = small_run(tmp_path / "run", rows="dense", steps=12, log_every=4, views=2, accumulate=2)
    model = train(run).model
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3
    for record in records:
        assert record.keys() >= NAMES
        assert 0 < record["feature_std"] < 1 / math.sqrt(16)
        assert 1 <= record["rankme"] <= 16
    assert records[-1]["gradient_norm"] == gradient_norm(model.encoder.parameters())


def test_the_gradient_is_measured_before_an_optimizer_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LARS and LAMB of timm before 1.0.31 do."""

    step = torch.optim.SGD.step

    def changing(optimizer: torch.optim.SGD) -> None:
        step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()

    monkeypatch.setattr(torch.optim.SGD, "step", changing)
    train(small_run(tmp_path / "run", rows="dense", steps=1))
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert record["gradient_norm"] > 0
