"""The loss against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers import numerics
from weightserver.torch.loss import Loss
from weightserver.torch.margins import MARGINS, MarginKind

SIZES = [(7, 30), (5, 4), (1, 9), (1, 1)]
"""Images and rows: a single image; a single row, its own."""


def inputs(batch_size: int, num_rows: int, dim: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features (B, D), weight (K, D)."""
    generator = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(n, dim, generator=generator, dtype=dtype) for n in (batch_size, num_rows))
    return features.requires_grad_(), (0.1 * weight).requires_grad_()


def labels_of(batch_size: int, num_rows: int, num_own: int) -> Tensor:
    """(B,), or (B, P): some given twice, some missing; images share own rows."""
    generator = torch.Generator().manual_seed(1)
    if num_own == 1:
        return torch.randint(num_rows, (batch_size,), generator=generator)
    labels = torch.randint(-1, num_rows, (batch_size, num_own), generator=generator)
    labels[:, -1] = labels[:, -1].clamp(min=0)
    return labels


@pytest.mark.parametrize("cosines", [True, False])
@pytest.mark.parametrize("num_own", [1, 3])
@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.2), (torch.float64, 0.2), (torch.float32, 0.03)])
@pytest.mark.parametrize(("batch_size", "num_rows"), SIZES)
def test_the_loss_equals_the_formula(
    batch_size: int,
    num_rows: int,
    cosines: bool,
    num_own: int,
    dtype: torch.dtype,
    temperature: float,
) -> None:
    """The bounds are those of `numerics`, by running error analysis; test_margins.py has the losses with margins."""
    features, weight = inputs(batch_size, num_rows, dtype=dtype)
    labels = labels_of(batch_size, num_rows, num_own)
    softmax = Loss(temperature=temperature) if cosines else Loss("plain")
    loss = softmax(features, weight, labels)
    loss.backward()
    expected = numerics.softmax_loss(features, weight, labels, temperature=softmax.divisor, cosines=cosines)
    expected.loss.assert_near(loss, "loss")
    expected.features.assert_near(features.grad, "features")
    expected.weight.assert_near(weight.grad, "weight")


def test_the_bounds_are_tight_enough_to_find_faults() -> None:
    """They detect a temperature off by a thousandth, a wrong label, and a mean without one image."""
    (features, weight), labels = inputs(6, 9), labels_of(6, 9, 1)
    expected = numerics.softmax_loss(features, weight, labels, temperature=0.2)
    wrong_label = labels.clone().index_fill_(0, torch.tensor([2]), (int(labels[2]) + 1) % 9)
    off = Loss(temperature=0.2001)(features, weight, labels)
    of_others = Loss()(features, weight, wrong_label)
    for wrong in (off, of_others, Loss()(features, weight, labels) + 1e-4):
        with pytest.raises(AssertionError, match="of which rounding explains"):
            expected.loss.assert_near(wrong)
    off.backward()
    with pytest.raises(AssertionError, match="of which rounding explains"):
        expected.weight.assert_near(weight.grad)
    assert expected.loss.error < 1e-5 * expected.loss.value


def test_autocast_changes_no_bit_and_neither_does_a_second_run() -> None:
    results = []
    for enabled in (False, False, True):
        features, weight = inputs(6, 30, dim=16)
        with torch.autocast("cpu", enabled=enabled):
            loss = Loss()(features, weight, labels_of(6, 30, 1))
        loss.backward()
        assert loss.dtype == torch.float32
        assert features.grad is not None
        assert weight.grad is not None
        results.append(torch.cat([loss.detach()[None], features.grad.flatten(), weight.grad.flatten()]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", MARGINS)
def test_padding_is_no_class(kind: MarginKind) -> None:
    """A GPU has fewer than K active classes with sampled negatives, and before K classes were met."""
    features, weight = inputs(6, 9)
    padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, 5)).requires_grad_()
    labels, softmax = labels_of(6, 9, 3), Loss(margin=kind)
    expected = softmax(features.detach(), weight, labels)
    loss = softmax(features, padded, labels, num_rows=9)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    loss.backward()
    assert weight.grad is not None
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[:9], weight.grad)
    assert not padded.grad[9:].any()
