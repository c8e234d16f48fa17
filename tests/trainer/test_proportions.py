"""The dimensionless numbers of a run: the paper's, and turns as gradients and dense SGD make them."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.small_run import NUM_IMAGES, small_run
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.presets import PRESETS
from trainer.proportions import MEANINGS, proportions
from trainer.report.rendering import render_report
from trainer.run.run_images import RunImages

IMAGENET = 1_281_167


def test_the_papers_numbers() -> None:
    found = proportions(PRESETS["imagenet-1k"][1], IMAGENET)
    assert asdict(found) == pytest.approx(
        {
            "first_turn": 0.0952,
            "total_turn": 65.4,
            "learning_per_pass": 150,
            "decay": 1.5,
            "visits_per_row": 200,
            "negatives_of_rows": 0.0512,
            "negatives_of_batch": 128,
            "window_of_images": 0.102,
            "window_of_batch": 256,
            "stride_of_window": 0.125,
            "warmup_of_steps": 0.025,
        },
        rel=5e-3,
    )


def test_the_first_turn_is_that_of_the_losss_gradient() -> None:
    """Equation (1) with an embedding across the row and all others, and SGD that then lets its momentum run out."""
    settings = {"batch_size": 8, "learning_rate": 0.05, "warmup_fraction": 0.0, "epochs": 100.0, "momentum": 0.8}
    config = TrainConfig().with_settings(**settings, temperature=0.3, dim=64, init_std=0.5, weight_decay=0.0)
    num_rows = 30
    axes = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    weight = torch.nn.Parameter(axes[:num_rows] * 0.5 * math.sqrt(64))
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.8)
    logits = F.normalize(axes[num_rows][None]) @ F.normalize(weight).T / 0.3  # (1, N)
    (F.cross_entropy(logits, torch.tensor([3])) / 8).backward()
    for _ in range(200):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    wrong = 1 - 1 / num_rows  # the probability of the other rows, which all are equally near
    assert tangent(before[3], weight.detach()[3]) == pytest.approx(
        wrong * (proportions(config, num_rows).first_turn or 0), rel=1e-6
    )


def tangent(one: Tensor, other: Tensor) -> float:
    across = other - (other @ one) / (one @ one) * one
    return float(across.norm() / (other @ one) * one.norm())


@pytest.mark.parametrize(
    "changes", [{}, {"init_std": 0.1}, {"weight_decay": 0.0}, {"row_momentum": 0.5}, {"row_learning_rate": 3.0}]
)
def test_the_total_turn_is_that_of_dense_sgd(changes: dict[str, float]) -> None:
    """A row of many values that each visit pulls across its direction, as strongly as the loss can."""
    settings = {"num_images": 200, "batch_size": 4, "epochs": 60.0, "learning_rate": 0.1, "weight_decay": 2e-3}
    config = TrainConfig().with_settings(**settings | {"dim": 128, "init_std": 0.05} | changes)
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(config.rows.init_std * torch.randn(128, generator=generator, dtype=torch.float64))
    momentum = config.rows.row_momentum or 0.9
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, weight_decay=config.optimization.weight_decay)
    turned, direction = 0.0, F.normalize(weight.detach(), dim=0)
    for step, rate in enumerate(RunImages(200, 200).learning_rates(config.optimization)):
        weight.grad = torch.zeros_like(weight)
        now = F.normalize(weight.detach(), dim=0)
        if step % 50 == 25:
            turned += float(torch.arccos((now @ direction).clamp(-1, 1)))
            direction = now
            pull = torch.randn(128, generator=generator, dtype=torch.float64)
            pull = F.normalize(pull - (pull @ now) * now, dim=0)
            weight.grad = -pull / (config.loss.temperature * 4 * float(weight.detach().norm()))
        optimizer.param_groups[0]["lr"] = config.rows.row_learning_rate * float(rate)
        optimizer.step()
    assert proportions(config, 200).total_turn == pytest.approx(turned, rel=0.05)


@pytest.mark.parametrize(
    "changes", [{"init_std": 0.0}, {"weight_decay": 0.3, "row_learning_rate": 10.0}, {"row_momentum": 1 - 1e-12}]
)
def test_rows_that_begin_at_zero_or_decay_to_it_turn_by_right_angles(changes: dict[str, float]) -> None:
    config = PRESETS["imagenet-1k"][1].with_settings(**changes)
    config.check()
    found = proportions(config, IMAGENET)
    assert all(math.isfinite(value or 0) for value in asdict(found).values())
    assert 0 < (found.total_turn or 0) <= 200 * math.pi / 2


def test_shared_classes_and_a_plain_softmax() -> None:
    config = PRESETS["demo"][1]
    of_labels = proportions(config, 10_000, 10)
    assert of_labels.visits_per_row == pytest.approx(32_000)
    assert of_labels.negatives_of_rows == 12.8
    assert np.isfinite(of_labels.total_turn or np.nan)
    plain = proportions(config.with_settings(softmax="plain"), 10_000)
    assert plain.first_turn is plain.total_turn is None
    assert len(list(plain.lines())) == len(MEANINGS) - 2


def test_few_classes_take_no_memory_for_each_of_their_visits() -> None:
    config = PRESETS["demo"][1].with_settings(steps=1_000)
    tracemalloc.start()
    try:
        assert proportions(config, 10_000, 2).visits_per_row == 64_000
        assert tracemalloc.get_traced_memory()[1] < 200 * 1_000
    finally:
        tracemalloc.stop()


def test_a_run_has_them_in_its_summary_and_its_report(tmp_path: Path) -> None:
    config = small_run(tmp_path, rows="dense", checkpoint_every=0)
    expected = asdict(proportions(config, NUM_IMAGES))
    assert train(config).summary["proportions"] == expected
    assert json.loads((tmp_path / "summary.json").read_text())["proportions"] == expected
    page = render_report(tmp_path, bank=10)
    assert all(meaning in page and f"{expected[name]:.3g}" in page for name, meaning in MEANINGS.items())
