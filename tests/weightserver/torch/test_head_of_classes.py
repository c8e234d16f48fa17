"""A head whose images share classes, on real shards: against a dense full softmax, and in all its ways of use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.partial_fc import PartialFC
from weightserver import LocalCluster, WeightClient
from weightserver.core.initial import initial_rows
from weightserver.torch import ClassifierHead, ClassOrder
from weightserver.torch.loss import Loss

NUM_CLASSES, NUM_IMAGES, DIM, BATCH_SIZE, RATE = 41, 200, 8, 10, 0.5
LABELS = np.random.default_rng(0).permutation(np.arange(NUM_IMAGES) % NUM_CLASSES)
FEATURES = torch.randn(NUM_IMAGES, DIM, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def addresses(cluster: LocalCluster, client: WeightClient) -> list[str]:
    """Those of shards without a table."""
    return cluster.addresses


def head_of(**settings: Any) -> ClassifierHead:
    options: dict[str, Any] = {"num_negatives": NUM_CLASSES, "rows_per_block": 4, "weight_decay": 1e-3}
    return ClassifierHead(NUM_CLASSES, DIM, **options | settings)


def batches(head: ClassifierHead, **settings: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels and features, in the order of the head's sampler."""
    images = TensorDataset(torch.from_numpy(LABELS), FEATURES)
    sampler = head.sampler(batch_size=BATCH_SIZE, classes=LABELS, **settings)
    for labels, features in head.announced(DataLoader(images, batch_sampler=sampler)):
        yield labels, features.clone().requires_grad_()


class FullSoftmax:
    """All classes in one matrix, which torch.optim.SGD updates."""

    def __init__(self, rows: Tensor, weight_decay: float) -> None:
        self.weight = torch.nn.Parameter(rows.clone())
        self.optimizer = torch.optim.SGD([self.weight], lr=RATE, momentum=0.9, weight_decay=weight_decay)

    def step(self, features: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        self.features = features.detach().requires_grad_()
        loss = Loss()(self.features, self.weight, labels)
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_with_all_classes_each_step_is_that_of_a_dense_full_softmax(rows: str, addresses: list[str]) -> None:
    with head_of(rows=rows, servers=",".join(addresses)) as head:
        every = np.arange(NUM_CLASSES)
        dense = FullSoftmax(head.rows(every), head.spec.weight_decay)
        for labels, features in itertools.islice(batches(head, window_size=60, window_stride=20), 12):
            loss = head(features, labels)
            loss.backward()
            head.step(learning_rate=RATE)
            torch.testing.assert_close(loss, dense.step(features, labels), rtol=1e-5, atol=0)
            torch.testing.assert_close(features.grad, dense.features.grad, rtol=1e-5, atol=1e-6)
        difference = (head.rows(every) - dense.weight.detach()).norm(dim=1) / dense.weight.detach().norm(dim=1)
        assert difference.max() <= 1e-5


def test_a_dense_sampled_softmax_of_all_classes_is_the_full_one() -> None:
    """The peer of the benchmark, with K = C: torch.optim.SGD's steps, up to rounding."""
    spec = head_of(rows="dense").spec
    peer = PartialFC(spec, num_active=NUM_CLASSES, temperature=0.2, seed=0)
    dense = FullSoftmax(torch.from_numpy(initial_rows(spec, np.arange(NUM_CLASSES))), spec.weight_decay)
    for step in range(12):
        images = torch.arange(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        labels, features = torch.from_numpy(LABELS)[images], FEATURES[images]
        loss = peer(features, labels)
        loss.backward()
        peer.step(learning_rate=RATE)
        torch.testing.assert_close(loss, dense.step(features, labels), rtol=1e-5, atol=0)
    torch.testing.assert_close(peer.weight, dense.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("negatives", ["recent", "uniform", "both"])
def test_stores_and_ways_to_announce_agree(negatives: str, addresses: list[str]) -> None:
    """With a sampler, by hand, and in the step itself; margins and windows included."""
    settings: dict[str, Any] = {"num_negatives": 30, "negatives": negatives, "margin": "cosface"}
    found = []
    for rows, announces in (("dense", False), ("dense", True), ("resident", True), ("remote", True)):
        served = {} if rows == "dense" else {"servers": addresses}
        with head_of(rows=rows, **settings, **served) as head:
            coming = batches(head, window_size=80, window_stride=40)
            losses = []
            for labels, features in coming if announces else list(coming)[:8]:
                loss = head(features, labels)
                loss.backward()
                head.step(learning_rate=RATE)
                losses.append(loss.item())
                if len(losses) == 8:
                    break
            found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    np.testing.assert_allclose(found[2:], [found[0]] * 2, rtol=1e-5)
    assert found[0][0] > 3


def test_several_classes_of_an_image(addresses: list[str]) -> None:
    """The classes of a batch may overlap, repeat and be fewer than others': the loss is that of the formula."""
    several = torch.tensor([[3, 7, -1], [7, -1, -1], [0, 3, 3], [-1, 40, 2]])
    features = FEATURES[:4].clone().requires_grad_()
    with head_of(servers=addresses, num_negatives=12, margin="arcface") as head:
        head.announce(several)
        weight = head.active_rows()
        positions = head.labels
        assert weight.shape[0] == 5  # no others were visited
        assert ((positions >= 0) == (several >= 0)).all()
        loss = head(features, several)
        expected = Loss(margin="arcface")(features.detach(), weight.detach(), positions)
        assert loss.item() == expected.item()
        loss.backward()
        before = head.rows(torch.arange(NUM_CLASSES))
        head.step(learning_rate=RATE)
        moved = (head.rows(torch.arange(NUM_CLASSES)) - before).norm(dim=1) > 1e-3
        assert moved.nonzero().flatten().tolist() == [0, 2, 3, 7, 40]
        with pytest.raises(ValueError, match=r"classes must have shape \(n,\)"):
            head.rows(several)


def test_classes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="the class map has 3 classes, the table 41 rows: give a map of as many"):
        head_of(rows="dense").sampler(batch_size=2, classes=np.array([0, 1, 2, 2]))
    with pytest.raises(ValueError, match="margin 'arcface' is for cosines"):
        head_of(softmax="plain", margin="arcface")


def test_the_rows_of_a_head_are_those_of_its_class_order() -> None:
    head, order = head_of(order_seed=5), ClassOrder(LABELS, 5)
    assert np.array_equal(order.class_of_row(head.order.rows(LABELS)), LABELS)
