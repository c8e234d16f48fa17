"""The loss against its formula in float64."""

from __future__ import annotations

import math

import torch

from trainer.loss import cosine_softmax_loss, softmax_loss


def test_loss_and_gradients_equal_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 5, generator=generator, requires_grad=True)
    weight = (torch.randn(9, 5, generator=generator) * 0.01).requires_grad_()
    labels = torch.tensor([0, 8, 3, 3, 5, 1])
    loss = cosine_softmax_loss(features, weight, labels, temperature=0.2)
    loss.backward()

    z, w = features.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    cosine = (z @ w.T) / (z.norm(dim=1)[:, None] * w.norm(dim=1)[None])
    expected = (torch.logsumexp(cosine / 0.2, dim=1) - cosine[torch.arange(6), labels] / 0.2).mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(features.grad.double(), z.grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(weight.grad.double(), w.grad, rtol=1e-5, atol=1e-6)


def test_chance_is_log_k() -> None:
    loss = cosine_softmax_loss(torch.eye(4, 40)[:2], torch.eye(40)[10:], torch.tensor([0, 7]), temperature=0.2)
    assert math.isclose(loss.item(), math.log(30), rel_tol=1e-6)


def test_plain_logits_are_products() -> None:
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(6, 5, generator=generator), torch.randn(9, 5, generator=generator)
    labels = torch.tensor([0, 8, 3, 3, 5, 1])
    products = features.double() @ weight.double().T
    expected = (torch.logsumexp(products, dim=1) - products[torch.arange(6), labels]).mean()
    torch.testing.assert_close(softmax_loss(features, weight, labels).double(), expected, rtol=1e-6, atol=0)
