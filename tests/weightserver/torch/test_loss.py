"""The loss against formulas in float64."""

from __future__ import annotations

from typing import Any

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


def test_the_loss_is_exact_to_1e_6_and_gradients_to_1e_5() -> None:
    """Error model: a logit's D + 4 roundings are independent, each at most u = 2⁻²⁴ of 1/τ, so that it errs by e =
    √(D+4)·u/τ, 7e-7, in the root mean square, and a probability by √2·e of itself; a sum of n products adds at most
    √n·u. Bounds are six times that: of a loss near log K, and of the gradients' norms."""
    features, weight = inputs(128, 20_000, dim=8)
    labels = torch.arange(128) * 150
    found: list[Any] = []
    expected: list[Any] = []
    for dtype, results in ((torch.float32, found), (torch.float64, expected)):
        z, w = (values.detach().to(dtype).requires_grad_() for values in (features, weight))
        unit_z, unit_w = torch.nn.functional.normalize(z), torch.nn.functional.normalize(w)
        whole = torch.nn.functional.cross_entropy(unit_z @ unit_w.T / 0.2, labels)
        loss = whole if dtype == torch.float64 else Loss()(z, w, labels)
        loss.backward()
        results += [loss.detach(), z.grad, w.grad]
    unit, error = 2.0**-24, (8 + 4) ** 0.5 * 2.0**-24 / 0.2
    assert 6 * error / 10 < 1e-6
    assert abs(found[0] - expected[0]) <= 6 * error
    for actual, exact, num_terms in zip(found[1:], expected[1:], (len(weight), len(features)), strict=True):
        bound = 6 * (2**0.5 * error + num_terms**0.5 * unit) * exact.norm()
        assert (actual - exact).norm() <= min(bound, 1e-5 * exact.norm())


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


def test_gradients_that_nobody_needs_are_left_out() -> None:
    """Those of rows that are not updated, and those of an encoder that is frozen; the others are the same bits."""
    labels = labels_of(6, 30, 1)
    gradients: list[Any] = []
    for wanted in ((True, True), (True, False), (False, True)):
        z, w = (values.detach().requires_grad_(need) for values, need in zip(inputs(6, 30), wanted, strict=True))
        Loss()(z, w, labels).backward()
        assert (z.grad is not None, w.grad is not None) == wanted
        gradients.append((z.grad, w.grad))
    both, of_features, of_weight = gradients
    assert torch.equal(both[0], of_features[0])
    assert torch.equal(both[1], of_weight[1])


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


def test_labels_of_rows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        Loss()(*inputs(6, 9), torch.arange(4, 10))
