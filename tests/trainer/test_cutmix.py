"""CutMix against its definition image by image, with rows that dense torch.optim.SGD updates, and after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.own_loop import DIM, NUM_CLASSES, SETTINGS, TEMPERATURE, Dense
from tests.helpers.small_run import PowerLoss, losses, power_loss_at, small_run
from trainer.data.cutmix import NUM_UNIFORMS, CutMix
from trainer.loop import train
from trainer.schedule import batch_uniforms
from weightserver.torch import ClassifierHead

pytestmark = pytest.mark.usefixtures("one_thread")
BEYOND: dict[str, Any] = {"cutmix": 0.7, "label_smoothing": 0.1, "final_temperature": 0.1, "row_momentum": 0.5}
"""All options that are not in the paper."""


def drawn(batch: int, views: torch.Tensor) -> CutMix:
    mix = CutMix.drawn(1.0, batch_uniforms(3, batch, NUM_UNIFORMS), views)
    assert mix is not None
    return mix


def test_a_rectangle_is_that_of_another_image_and_the_weight_is_its_area() -> None:
    views = torch.arange(5.0)[:, None, None, None].expand(5, 2, 16, 12).contiguous()
    partners, areas = set(), []
    for batch in range(300):
        mix = drawn(batch, views)
        mixed = mix.views(views)
        for image, view in enumerate(mixed):
            partner = (image + mix.distance) % 5
            assert partner != image
            assert set(view.unique().tolist()) <= {image, partner}
            assert (view == image).float().mean().item() == pytest.approx(mix.kept, abs=1e-6)
            rows, columns = mix.rectangle
            assert (view[:, rows, columns] == partner).all()
        partners.add(mix.distance)
        areas.append(1 - mix.kept)
    assert partners == {1, 2, 3, 4}
    assert 0.25 < np.mean(areas) < 0.45  # half, less what is clipped
    assert np.array_equal(views[:, 0, 0, 0], np.arange(5)), "the views given are unchanged"


def test_a_batch_is_mixed_with_the_probability_asked_for() -> None:
    views = torch.zeros(4, 1, 8, 8)
    for probability, bounds in ((0.0, (0, 0)), (0.3, (0.25, 0.35)), (1.0, (1, 1))):
        numbers = (batch_uniforms(0, batch, NUM_UNIFORMS) for batch in range(2_000))
        share = np.mean([CutMix.drawn(probability, uniforms, views) is not None for uniforms in numbers])
        assert bounds[0] <= share <= bounds[1]


def test_a_single_image_stays_as_it_is() -> None:
    """As on a rank that has one image of the batch."""
    views = torch.rand(1, 1, 8, 8)
    assert torch.equal(drawn(0, views).views(views), views)


def test_loss_and_gradients_are_those_of_each_image_with_both_classes() -> None:
    """The rows' after updates by dense SGD too."""
    ids, generator = torch.tensor([7, 3, 19, 30]), torch.Generator().manual_seed(0)
    with ClassifierHead(NUM_CLASSES, DIM, rows="dense", **SETTINGS) as head:
        dense = Dense(head)
        for step in range(5):
            mix = drawn(step, torch.zeros(4, 1, 8, 8))
            embeddings = torch.randn(4, DIM, generator=generator).requires_grad_()
            loss = mix.loss(partial(head, ids=ids), embeddings)
            loss.backward()
            found, embeddings.grad = embeddings.grad, None
            dense.visits += ids.tolist()
            active = dense.active()
            unit = torch.nn.functional.normalize
            logs = (unit(embeddings) @ unit(dense.weight[active]).T / TEMPERATURE).log_softmax(dim=1)
            expected = torch.zeros(())
            for image in range(4):
                own, other = (active.index(int(ids[(image + places) % 4])) for places in (0, mix.distance))
                expected = expected - (mix.kept * logs[image, own] + (1 - mix.kept) * logs[image, other]) / 4
            expected.backward()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
            torch.testing.assert_close(found, embeddings.grad, rtol=0, atol=1e-5)
            head.step(learning_rate=0.4)
            dense.update(0.4)
        torch.testing.assert_close(head.rows(range(NUM_CLASSES)), dense.weight.detach(), rtol=0, atol=2e-5)


@pytest.mark.guard  # seconds
def test_a_resumed_run_has_the_same_mixes_and_temperatures(tmp_path: Path) -> None:
    """Bit for bit, with two views in two parts."""
    changes = BEYOND | {"views": 2, "accumulate": 2, "steps": 26}
    train(small_run(tmp_path / "whole", **changes))
    with pytest.raises(PowerLoss):
        train(small_run(tmp_path / "run", **changes), on_step=power_loss_at(20))
    train(small_run(tmp_path / "run", **changes, resume=True))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"whose cutmix is 0.7, not 0.0"):
        train(small_run(tmp_path / "run", **changes | {"cutmix": 0.0}, resume=True))


@pytest.mark.guard  # seconds
def test_all_stores_train_alike(tmp_path: Path) -> None:
    found = []
    for rows in ("dense", "resident", "remote"):
        train(small_run(tmp_path / rows, **BEYOND, rows=rows, steps=10))
        found.append(np.array(losses(tmp_path / rows)))
    train(small_run(tmp_path / "plain", rows="dense", steps=10))
    assert np.abs(found[0] - losses(tmp_path / "plain")).max() > 0.01
    assert max(np.abs(other / found[0] - 1).max() for other in found[1:]) <= 1e-4
