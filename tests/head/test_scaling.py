"""Scaled losses, overflows and clipped norms: an encoder and a head take each step as dense SGD over both does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.head.conftest import MakeHead, drop_table
from tests.helpers.own_loop import (
    BATCH_SIZE,
    DIM,
    INPUTS,
    NUM_CLASSES,
    SETTINGS,
    Dense,
    Encoder,
    Result,
    loaded,
    shuffled,
)
from weightserver.torch import ClassifierHead

BATCHES = shuffled(6, 6)
RATE, MAX_NORM = 0.3, 4.9


def spoil(head: ClassifierHead) -> None:
    """Lets a gradient of the rows overflow, and none of the encoder."""
    step = head._steps.current
    assert step is not None
    assert step.weight is not None
    assert step.weight.grad is not None
    step.weight.grad[0, 0] = float("inf")


def test_a_scaler_that_is_disabled_scales_nothing(make_head: MakeHead, embeddings: Tensor) -> None:
    head, scaler = make_head("dense"), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(head(embeddings, [1, 2, 3, 4])).backward()
    spoil(head)
    with pytest.raises(ValueError, match="is infinite or NaN in step 0, nothing was updated"):
        head.step(RATE, scaler=scaler)
    head.skip(RATE)


def clipped(head: ClassifierHead, encoder: Encoder, batches: Any, max_norm: float, **scaled: Any) -> list[float]:
    norms, scaler = [], scaled.get("scaler") or torch.amp.GradScaler("cpu", enabled=False)
    for ids, batch in batches:
        scaler.scale(head(encoder.module(batch), ids)).backward()
        norm = head.step(RATE, optimizer=encoder.optimizer, max_norm=max_norm, **scaled)
        assert norm is not None
        norms.append(norm.item())
        scaler.step(encoder.optimizer)
        scaler.update()
        encoder.optimizer.zero_grad()
    return norms


def clipped_by_torch(dense: Dense, encoder: Encoder, max_norm: float, batches: Any = BATCHES) -> list[float]:
    norms = []
    for ids in batches:
        dense.visits += ids
        dense.loss(encoder.module(INPUTS[ids]), ids).backward()
        everything = [*encoder.module.parameters(), dense.weight]
        norms.append(torch.nn.utils.clip_grad_norm_(everything, max_norm).item())
        dense.update(RATE)
        encoder.update(encoder.optimizer.param_groups[0]["lr"])
    return norms


def test_a_parameter_of_two_optimizers_counts_once(make_head: MakeHead) -> None:
    norms, ids = [], BATCHES[0]
    for several in (False, True):
        head, encoder = make_head("dense"), Encoder()
        head(encoder.module(INPUTS[ids]), ids).backward()
        other = torch.optim.SGD(encoder.module.parameters(), lr=0.1)
        optimizers = iter([encoder.optimizer, other]) if several else encoder.optimizer
        norms.append(head.step(RATE, optimizer=optimizers, max_norm=MAX_NORM))
    assert norms[0] == norms[1]


@pytest.mark.parametrize("spoiled", ["encoder", "rows"])
def test_a_norm_that_is_not_finite_changes_nothing(make_head: MakeHead, spoiled: str) -> None:
    """One decision for encoder and rows, although no scale was given."""
    head, encoder = make_head(), Encoder()
    before, ids = head.rows(range(NUM_CLASSES)), BATCHES[0]
    head(encoder.module(INPUTS[ids]), ids).backward()
    if spoiled == "rows":
        spoil(head)
    else:
        encoder.optimizer.param_groups[0]["params"][0].grad[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the gradient of (class \d+|the encoder.*) is infinite or NaN in step 0, no"):
        head.step(RATE, optimizer=encoder.optimizer, max_norm=MAX_NORM)
    assert head.num_steps == 0
    head.skip(0.0)
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), before)


def test_an_overflow_at_a_scale_of_one(make_head: MakeHead) -> None:
    """Is a step without gradients, as at any other scale."""
    head, encoder, ids = make_head("dense"), Encoder(), BATCHES[0]
    scaler, before = torch.amp.GradScaler("cpu", init_scale=1.0), head.rows(range(NUM_CLASSES))
    scaler.scale(head(encoder.module(INPUTS[ids]), ids)).backward()
    spoil(head)
    head.step(0.0, scaler=scaler, optimizer=encoder.optimizer)
    scaler.step(encoder.optimizer)
    scaler.update()
    assert (scaler.get_scale(), head.num_steps) == (0.5, 1)
    assert torch.equal(encoder.weight(), Encoder().weight())
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), before)


ORDER = r"call head\.step\(\), scaler\.step\(optimizer\) and scaler\.update\(\), in this order"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("update first", r"scaler\.update\(\) was called before head\.step\(\): " + ORDER),
        ("no update", r"scaler\.update\(\) of the step before was not called: " + ORDER),
    ],
)
def test_the_order_of_the_scalers_calls(make_head: MakeHead, wrong: str, message: str) -> None:
    """Where torch would scale a step silently, or raise, the head says what is missing."""
    head, encoder, scaler = make_head("dense"), Encoder(), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def train() -> None:
        for ids, batch in loaded(BATCHES):
            scaler.scale(head(encoder.module(batch), ids)).backward()
            if wrong == "update first":
                scaler.step(encoder.optimizer)
                scaler.update()
            head.step(RATE, scaler=scaler, optimizer=encoder.optimizer)
            if wrong == "no update":
                scaler.step(encoder.optimizer)

    with pytest.raises(ValueError, match=message):
        train()
    assert head.num_steps == 1
    assert encoder.weight().abs().max() < 2  # no step was made with scaled gradients
    scaler = torch.amp.GradScaler("cpu")
    clipped(head, encoder, head.announced(loaded(BATCHES)), MAX_NORM, scaler=scaler)
    assert head.num_steps == 1 + len(BATCHES)


def test_clipping_comes_before_the_encoders_step(make_head: MakeHead) -> None:
    """An optimizer's step in the step before, or without max_norm, is none of this one's."""
    head, encoder, other = make_head("dense"), Encoder(), Encoder()

    def passed(ids: list[int]) -> None:
        encoder.optimizer.zero_grad()
        head(encoder.module(INPUTS[ids]), ids).backward()
        other.optimizer.step()

    passed(BATCHES[0])
    encoder.optimizer.step()
    head.step(RATE)
    for ids in BATCHES[1:3]:
        passed(ids)
        head.step(RATE, optimizer=encoder.optimizer, max_norm=MAX_NORM)
        encoder.optimizer.step()
    passed(BATCHES[3])
    encoder.optimizer.step()
    with pytest.raises(ValueError, match=r"^optimizer\.step\(\) was called before head\.step\(max_norm=\.\.\.\)"):
        head.step(RATE, optimizer=[other.optimizer, encoder.optimizer], max_norm=MAX_NORM)
    assert head.num_steps == 3


class Wrapper(torch.optim.Optimizer):
    """Around an optimizer, as Accelerate and Lightning have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


@pytest.mark.parametrize("stepped", ["wrapper", "wrapped"])
@pytest.mark.parametrize("unscaled", [True, False])
def test_an_optimizer_that_wraps_another(make_head: MakeHead, stepped: str, unscaled: bool) -> None:
    """The scaler is given either of them, and unscales the gradients once; the last ones overflow."""
    head, dense, encoder = make_head("dense"), Dense(make_head("dense")), Encoder()
    wrapper, scaler = Wrapper(encoder.optimizer), torch.amp.GradScaler("cpu", init_scale=256.0)
    for ids, batch in loaded(BATCHES):
        scaler.scale(head(encoder.module(batch), ids)).backward()
        if unscaled:
            scaler.unscale_(encoder.optimizer)
        if head.num_steps == len(BATCHES) - 1:
            spoil(head)
        head.step(RATE, scaler=scaler, optimizer=wrapper, max_norm=MAX_NORM)
        before = encoder.weight()
        scaler.step(encoder.optimizer if stepped == "wrapped" else wrapper)
        scaler.update()
        encoder.optimizer.zero_grad()
    assert torch.equal(encoder.weight(), before)
    assert scaler.get_scale() == 128
    expected = Encoder()
    clipped_by_torch(dense, expected, MAX_NORM, BATCHES[:-1])
    torch.testing.assert_close(before, expected.weight())
    head(encoder.module(INPUTS[:1]), [0]).backward()
    wrapper.step()
    with pytest.raises(ValueError, match=r"^optimizer\.step\(\) was called before head\.step\(max_norm=\.\.\.\)"):
        head.step(RATE, optimizer=wrapper, max_norm=MAX_NORM)


def test_sparse_gradients_are_not_clipped(make_head: MakeHead) -> None:
    head, words = make_head("dense"), torch.nn.Embedding(9, DIM, sparse=True)
    head(words(torch.tensor([1, 2])), [1, 2]).backward()
    with pytest.raises(ValueError, match=r"^max_norm cannot clip sparse gradients: make the encoder's embeddings with"):
        head.step(RATE, optimizer=torch.optim.SGD(words.parameters(), lr=0.1), max_norm=MAX_NORM)
    head.step(RATE)


def test_an_overflow_in_one_of_two_optimizers(make_head: MakeHead) -> None:
    """Leaves out the steps of both; a frozen encoder, whose gradients were unscaled before, is none."""
    head, encoder, other = make_head("dense"), Encoder(), Encoder()
    scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), head.rows(range(NUM_CLASSES))
    optimizers, ids = [encoder.optimizer, other.optimizer], BATCHES[0]
    scaler.scale(head(encoder.module(INPUTS[ids]) + other.module(INPUTS[ids]), ids)).backward()
    other.optimizer.param_groups[0]["params"][0].grad[0, 0] = float("inf")
    head.step(0.0, scaler=scaler, optimizer=optimizers)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), head.num_steps) == (2.0, 1)
    for trained in (encoder, other):
        assert torch.equal(trained.weight(), Encoder().weight())
        trained.module.requires_grad_(False)
        trained.optimizer.zero_grad()
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), before)
    scaler.scale(head(encoder.module(INPUTS[ids]), ids)).backward()
    scaler.unscale_(encoder.optimizer)
    head.step(RATE, scaler=scaler, optimizer=encoder.optimizer, max_norm=MAX_NORM)
    scaler.step(encoder.optimizer)
    scaler.update()
    assert not torch.equal(head.rows(ids), before[ids])


def test_what_contradicts_itself_changes_nothing(make_head: MakeHead, embeddings: Tensor) -> None:
    head, encoder, scaler = make_head("dense"), Encoder(), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(head(embeddings, [1, 2, 3, 4]) + encoder.module(INPUTS[:1]).sum()).backward()
    for settings in ({"max_norm": 1.0}, {"scaler": scaler}):
        with pytest.raises(ValueError, match="scaler and max_norm are for encoder and rows together: give the"):
            head.step(RATE, **settings)
    with pytest.raises(TypeError, match="max_norm must be a number, got '5'"):
        head.step(RATE, max_norm="5", optimizer=encoder.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer or a list .*, got a Parameter"):
        head.step(RATE, max_norm=5.0, optimizer=encoder.module.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_norm must be positive, got 0: omit it"):
        head.step(RATE, max_norm=0.0, optimizer=encoder.optimizer)
    scaler.step(encoder.optimizer)
    with pytest.raises(ValueError, match=r"scaler\.step\(optimizer\) was called before head\.step\(\): " + ORDER):
        head.step(RATE, scaler=scaler, optimizer=encoder.optimizer)
    assert head.num_steps == 0


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_two_ranks_clip_and_overflow_together(make_head: MakeHead, of_ranks: Path) -> None:
    """The rows of one rank overflow in the last step. With shards of the encoder, norms are the same."""
    dense, encoder = Dense(make_head("dense")), Encoder()
    expected = Result(clipped_by_torch(dense, encoder, MAX_NORM), encoder=encoder.weight())
    dense.visits += BATCHES[0]
    dense.update(RATE)
    expected.rows = dense.weight.detach()
    for rank in range(2):
        result = torch.load(of_ranks / f"clipped-{rank}", weights_only=True)
        Result(**result).assert_close(expected)


def as_rank(directory: Path, servers: list[str]) -> None:
    rank, share, encoder = dist.get_rank(), BATCH_SIZE // 2, Encoder()
    encoder.module = DistributedDataParallel(encoder.module)
    batches = loaded([ids[rank * share : (rank + 1) * share] for ids in [*BATCHES, BATCHES[0]]])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with ClassifierHead(NUM_CLASSES, DIM, servers=servers, **SETTINGS) as head:
        norms = clipped(head, encoder, batches[:-1], MAX_NORM, scaler=scaler)
        ids, batch = batches[-1]
        scaler.scale(head(encoder.module(batch), ids)).backward()
        if rank == 1:
            spoil(head)
        head.step(RATE, scaler=scaler, optimizer=encoder.optimizer)
        scaler.step(encoder.optimizer)
        scaler.update()
        assert scaler.get_scale() == 128
        torch.save(vars(Result(norms, head.rows(range(NUM_CLASSES)), encoder.weight())), directory / f"clipped-{rank}")
    sharded = Encoder()
    fully_shard(sharded.module, mesh=init_device_mesh("cpu", (2,)))
    sharded.optimizer = torch.optim.SGD(sharded.module.parameters(), lr=0.1, momentum=0.9)
    head = ClassifierHead(NUM_CLASSES, DIM, rows="dense", **SETTINGS)
    torch.testing.assert_close(clipped(head, sharded, batches[:-1], MAX_NORM), norms, rtol=2e-5, atol=2e-6)
    drop_table(servers)
