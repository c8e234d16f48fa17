"""Margins and several own classes: the loss against formulas in float64, finite differences, and over ranks."""

from __future__ import annotations

import math
import os
import socket
import statistics
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from weightserver.core.arrays import Float64Array
from weightserver.torch import Margin, Ranks, margin_of
from weightserver.torch.loss import Loss
from weightserver.torch.margins import DEFAULT_SIZES, MARGINS, MarginKind, quality_of

SINGLE = torch.tensor([0, 8, 3, 3, 5, 1])
SEVERAL = torch.tensor([[0, 4, 7], [8, -1, -1], [3, 3, -1], [-1, 5, 2], [5, -1, 5], [1, 0, 8]])  # some given twice
CASES = [(kind, labels) for kind in MARGINS for labels in (SINGLE, SEVERAL)]
IDS = [f"{kind}, {labels.dim()}-d labels" for kind, labels in CASES]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Features (6, 5), weight (9, 5)."""
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(6, 5, generator=generator), torch.randn(9, 5, generator=generator) * 0.01
    weight[8] = -0.02 * features[1]  # the own class of an image is opposite: θ + m exceeds π
    weight[5] = 0.03 * features[4]  # and that of another one equal to its embedding
    return features.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def formula(features: Tensor, weight: Tensor, labels: Tensor, kind: MarginKind, *, temperature: float) -> float:
    """The loss by angles, image by image and class by class."""
    cosines = torch.nn.functional.cosine_similarity(features[:, None], weight[None], dim=2).tolist()
    size, losses = DEFAULT_SIZES[kind], []
    norms = features.detach().norm(dim=1).tolist()
    deviation = statistics.stdev(norms) + 1e-3
    for image, own in enumerate(labels.reshape(len(labels), -1).tolist()):
        classes = {label for label in own if label >= 0}
        logits = []
        for label, cosine in enumerate(cosines[image]):
            angle = math.acos(max(-1.0, min(1.0, cosine)))
            if label not in classes or kind == "none":
                value = cosine
            elif kind == "cosface":
                value = cosine - size
            elif kind == "adaface":
                quality = max(-1.0, min(1.0, 0.333 * (norms[image] - statistics.fmean(norms)) / deviation))
                value = math.cos(max(0.0, min(math.pi, angle - size * quality))) - size - size * quality
            elif angle + size < math.pi:
                value = math.cos(angle + size)
            else:
                value = cosine - size * math.sin(size)
            logits.append(value / temperature)
        of_own = statistics.fmean(logits[label] for label in classes)
        losses.append(math.log(math.fsum(map(math.exp, logits))) - of_own)
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize(("kind", "labels"), CASES, ids=IDS)
@pytest.mark.parametrize("temperature", [0.2, 1 / 30])
def test_the_loss_equals_the_formula(kind: MarginKind, labels: Tensor, temperature: float) -> None:
    """At θ = 0 the sine is 3.2e-4 instead of 0: ArcFace's logit there differs by sin(0.5) · 3.2e-4 / τ, AdaFace's by
    less."""
    expected = formula(*inputs(), labels, kind, temperature=temperature)
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        features, weight = inputs(dtype)
        loss = Loss(temperature=temperature, margin=kind)(features, weight, labels)
        clamped = 1.6e-4 / temperature / len(labels) if kind in ("arcface", "adaface") else 0
        assert abs(loss.item() - expected) <= relative * (expected + 1 / temperature) + clamped, dtype


@pytest.mark.parametrize(("kind", "labels"), CASES, ids=IDS)
def test_gradients_equal_finite_differences(kind: MarginKind, labels: Tensor) -> None:
    features, weight = inputs()
    with torch.no_grad():  # θ = 0 and π have no derivative
        weight[8, 0] += 0.01
        weight[5, 0] += 0.01
    loss = partial(Loss(margin=kind), labels=labels)
    norms = features.detach().norm(dim=1, keepdim=True)  # held: AdaFace's quality is a constant to the gradient

    def of_directions(features: Tensor, weight: Tensor) -> Tensor:
        return loss(torch.nn.functional.normalize(features) * norms, weight)

    assert torch.autograd.gradcheck(of_directions, (features, weight), eps=1e-7, atol=1e-6, rtol=1e-5)
    exact = torch.autograd.grad(loss(features, weight), (features, weight))
    rounded = [values.detach().float().requires_grad_() for values in (features, weight)]
    # A cosine errs by up to 5·2⁻²⁴, and the slope of a margin, at most 8 here, by 490 times that: 2e-5 of itself.
    for found, expected in zip(torch.autograd.grad(loss(*rounded), rounded), exact, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm(), "in float32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MARGINS)
def test_gradients_are_finite_at_the_ends(kind: MarginKind, dtype: torch.dtype) -> None:
    """Also for cosines that rounding brings beyond ±1."""
    ends = torch.tensor([1.0, -1.0, 1 + 1e-7, -1 - 1e-7, 1 - 6e-8, 0.0], dtype=dtype).requires_grad_()
    margin_of(kind, None).of(ends).sum().backward()
    assert ends.grad is not None
    assert ends.grad.isfinite().all()
    assert ends.grad.abs().max() < 2e3
    features, weight = inputs(dtype)
    Loss(margin=kind)(features, weight, SINGLE).backward()
    for gradient in (features.grad, weight.grad):
        assert gradient is not None
        assert gradient.isfinite().all()


def test_adaface_lies_between_cosface_and_arcface() -> None:
    """The average image has CosFace's margin, the worst one ArcFace's, and the best one turns towards its class."""
    cosines = torch.linspace(-0.9, 0.9, 101, dtype=torch.float64)[:, None]
    margin = margin_of("adaface", None)
    for quality, expected in (
        (0.0, cosines - 0.4),
        (-1.0, Margin("arcface", 0.4).of(cosines)),
        (1.0, (cosines.acos() - 0.4).cos() - 0.8),
    ):
        found = margin.of(cosines, torch.full((101,), quality, dtype=torch.float64))
        inside = slice(10, 99)  # θ ± 0.4 is between 0 and π
        assert torch.allclose(found[inside], expected[inside], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "quality"),
    [("cosface", 0.0), ("arcface", 0.0), *(("adaface", quality / 10) for quality in range(-10, 11))],
)
def test_a_margin_decreases_with_the_angle_and_never_helps(kind: MarginKind, quality: float) -> None:
    cosines = torch.linspace(1, -1, 20_001, dtype=torch.float64)[:, None]
    margin, allowed = margin_of(kind, None), 2e-4 if kind == "adaface" else 1e-12
    found = margin.of(cosines, torch.full((20_001,), quality, dtype=torch.float64))
    assert (found.diff(dim=0) < (1e-12 if kind == "adaface" else 0)).all()
    assert (found <= cosines + allowed).all()
    assert found.min() >= margin.lowest_cosine - allowed


def test_an_image_s_quality_is_that_of_the_whole_batch() -> None:
    norms = torch.tensor([1.0, 2.0, 3.0, 1e9])
    quality = quality_of(norms)
    assert quality.argsort().tolist() == [0, 1, 2, 3]
    assert abs(quality.sum()) < 1e-6
    assert torch.equal(quality_of(norms[:1]), torch.zeros(1))
    features, weight = inputs()
    Loss(margin="adaface")(features, weight, SINGLE).backward()
    assert features.grad is not None
    along = (features.grad * features).sum(dim=1) / features.norm(dim=1)
    assert along.abs().max() < 1e-10, "the loss has no slope along an embedding's norm"


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("cosface", 1.5, "margin_size of cosface must lie between 0 and 1, got 1.5: the usual one is 0.35"),
        ("arcface", 0.0, r"margin_size of arcface must lie between 0 and 1.571, got 0: the usual one is 0.5"),
        ("arcface", math.nan, "got nan"),
        ("none", 0.3, "margin_size 0.3 is for margin cosface, arcface, adaface: omit it"),
        ("sphere", 0.3, "margin must be none, cosface, arcface or adaface, got sphere"),
    ],
)
def test_impossible_margins_are_refused(kind: MarginKind, size: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Margin(kind, size)


def compute(rank: int, world_size: int, port: int, out: str) -> None:
    """Losses and gradients of all cases on one of several ranks: rows are dealt in turn, images in slices.

    The last rank holds no rows, or only padding.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=60), rank=rank, world_size=world_size)
    ranks, found = Ranks(rank=rank, world_size=world_size), {}
    holders = max(1, world_size - 1)
    mine = np.flatnonzero(np.arange(9) % holders == rank) if rank < holders else np.zeros(0, int)
    local = torch.full((10,), -1)  # label to place among this rank's rows; the last is that of -1
    local[mine] = torch.arange(len(mine))
    for number, (kind, labels) in enumerate(CASES):
        for num_padded, temperature in product((0, 3), (0.2, 1 / 64)):
            features, weight = inputs(torch.float32)
            part = features[ranks.share(len(labels))].detach().requires_grad_()
            rows = torch.nn.functional.pad(weight[mine], (0, 0, 0, num_padded)).detach().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=world_size > 1):  # changes nothing
                softmax = Loss(temperature=temperature, margin=kind)
                loss = softmax(part, rows, local[labels], ranks=ranks, num_rows=len(mine))
            loss.backward()
            assert part.grad is not None
            assert rows.grad is not None
            whole = np.zeros((9, 5))
            whole[mine] = rows.grad[: len(mine)].numpy()
            assert not rows.grad[len(mine) :].any()
            name = f"{number}-{num_padded}-{temperature:.3f}"
            found[name] = np.concatenate([[loss.item()], whole.ravel()])
            found[f"{name}-features"] = part.grad.numpy() / world_size
    np.savez(f"{out}-{rank}.npz", **found)  # type: ignore[arg-type]
    dist.destroy_process_group()


def gradients_over_ranks(world_size: int, directory: Path) -> dict[str, Float64Array]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = str(directory / f"of-{world_size}")
    torch.multiprocessing.set_forkserver_preload([__name__])  # imported once, not by each
    torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
        compute, (world_size, port, out), nprocs=world_size, start_method="forkserver"
    )
    parts = [dict(np.load(f"{out}-{rank}.npz")) for rank in range(world_size)]
    result = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name.endswith("features"):
            result[name] = np.concatenate(values)
        else:
            assert len({value[0] for value in values}) == 1, "ranks saw different losses"
            result[name] = np.append(values[0][0], sum(value[1:] for value in values))
    return result


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.guard)]
)
def test_several_ranks_compute_what_one_does(world_size: int, tmp_path: Path) -> None:
    """Of six images, two ranks have three each, and one of seven none."""
    one, several = (gradients_over_ranks(number, tmp_path) for number in (1, world_size))
    assert one.keys() == several.keys()
    for name, expected in one.items():
        # A rounding of logits near 1/τ changes their exponentials by 2⁻²⁴/τ of themselves, 4e-6 at τ = 1/64.
        number, _, temperature, *_ = name.split("-")
        bounds = np.full(expected.shape, 1e-5 if temperature == "0.200" else 5e-5)
        if CASES[int(number)][0] == "arcface":
            # Image 4 is its own class 5: what is left of their difference, up to 4 · 2⁻²⁴, is multiplied by the slope
            # of ArcFace's logit, sin(0.5) over the least sine of 3.2e-4.
            alone = slice(4, 5) if name.endswith("-features") else slice(1 + 5 * 5, 1 + 6 * 5)
            bounds[alone] += 4 * 2.0**-24 * math.sin(DEFAULT_SIZES["arcface"]) / 3.2e-4
        if CASES[int(number)][0] == "adaface":  # images 1 and 4, whose own classes 8 and 5 are at the ends
            at_ends = [1, 4] if name.endswith("-features") else [*range(1 + 5 * 5, 1 + 6 * 5), *range(1 + 8 * 5, 46)]
            bounds[at_ends] += 4 * 2.0**-24 * math.sin(DEFAULT_SIZES["adaface"]) / 3.2e-4
        assert (np.abs(several[name] - expected) <= bounds * np.abs(expected).max()).all(), name
