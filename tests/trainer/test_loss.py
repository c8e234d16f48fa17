"""The loss compared with its formula in float64, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers import numerics
from weightserver.torch import cosine_softmax_loss, softmax_loss


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Features (6, 5), small weight (9, 5), labels (6,)."""
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(6, 5, generator=generator), torch.randn(9, 5, generator=generator) * 0.01
    return features.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.tensor([0, 8, 3, 3, 5, 1])


@pytest.mark.parametrize("temperature", [0.2, 0.03])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_equal_the_formula(temperature: float, dtype: torch.dtype) -> None:
    features, weight, labels = inputs(dtype)
    loss = cosine_softmax_loss(features, weight, labels, temperature=temperature)
    loss.backward()
    expected = numerics.softmax_loss(features, weight, labels, temperature=temperature)
    expected.loss.assert_near(loss, "loss")
    expected.features.assert_near(features.grad, "features")
    expected.weight.assert_near(weight.grad, "weight")


def test_the_formula_is_torchs_in_float64() -> None:
    """The oracle, written out with its gradients, equals autograd."""
    features, weight, labels = inputs(torch.float64)
    cosine = (features @ weight.T) / (features.norm(dim=1)[:, None] * weight.norm(dim=1)[None])
    loss = (torch.logsumexp(cosine / 0.2, dim=1) - cosine[torch.arange(6), labels] / 0.2).mean()
    loss.backward()
    expected = numerics.softmax_loss(features, weight, labels, temperature=0.2)
    expected.loss.assert_near(loss)
    expected.features.assert_near(features.grad)
    expected.weight.assert_near(weight.grad)
    assert expected.loss.error < 1e-13


@pytest.mark.parametrize("label_smoothing", [0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smoothed_labels_are_torchs(label_smoothing: float, dtype: torch.dtype) -> None:
    """Loss and gradients are autograd's of torch's own cross_entropy over all classes; the oracle's too."""
    features, weight, labels = inputs(torch.float64)
    cosines = torch.nn.functional.cosine_similarity(features[:, None], weight[None], dim=2)
    expected = torch.nn.functional.cross_entropy(cosines / 0.2, labels, label_smoothing=label_smoothing)
    wanted = torch.autograd.grad(expected, (features, weight))
    formula = numerics.softmax_loss(features, weight, labels, temperature=0.2, label_smoothing=label_smoothing)
    formula.loss.assert_near(expected)
    z, w, _ = inputs(dtype)
    loss = cosine_softmax_loss(z, w, labels, temperature=0.2, label_smoothing=label_smoothing)
    found = torch.autograd.grad(loss, (z, w))
    accuracy = 1e-12 if dtype == torch.float64 else 2e-5
    assert loss.item() == pytest.approx(expected.item(), rel=accuracy)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=accuracy * float(other.abs().max()))


def test_the_bounds_are_tight_enough_to_find_faults() -> None:
    """They detect a temperature off by a thousandth, a wrong label, and a mean without one image."""
    features, weight, labels = inputs()
    expected = numerics.softmax_loss(features, weight, labels, temperature=0.2)
    for wrong in (
        cosine_softmax_loss(features, weight, labels, temperature=0.2001),
        cosine_softmax_loss(features, weight, labels.clone().index_fill_(0, torch.tensor([2]), 4), temperature=0.2),
        cosine_softmax_loss(features, weight, labels, temperature=0.2) + 1e-4,
    ):
        with pytest.raises(AssertionError, match="of which rounding explains"):
            expected.loss.assert_near(wrong)
    loss = cosine_softmax_loss(features, weight, labels, temperature=0.2001)
    loss.backward()
    with pytest.raises(AssertionError, match="of which rounding explains"):
        expected.weight.assert_near(weight.grad)
    assert expected.loss.error < 1e-5 * expected.loss.value


def test_plain_logits_are_products() -> None:
    features, weight, labels = inputs()
    loss = softmax_loss(features, 100 * weight, labels)
    numerics.softmax_loss(features, 100 * weight, labels, cosines=False).loss.assert_near(loss)
