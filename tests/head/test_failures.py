"""A step that fails at any of its lines, and is then repeated, left out or skipped, trains as dense SGD does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.head.conftest import MakeHead, drop_table
from tests.helpers.failing_steps import (
    BATCHES,
    RATE,
    Attempt,
    DenseHead,
    Point,
    Then,
    Tracer,
    lines_of,
    run,
    with_scaler,
    with_step,
    with_zero_grad,
)
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
from weightserver import WeightClient
from weightserver.torch import ClassifierHead

STORES = ["dense", "resident", "remote"]
OF_RANKS: list[tuple[str, Attempt, Then]] = [
    ("dense", with_zero_grad, "repeated"),
    ("dense", with_zero_grad, "announced, repeated"),
    ("dense", with_step, "left out"),
    ("dense", with_scaler, "announced, skipped"),
    ("resident", with_step, "repeated"),
    ("remote", with_step, "announced, skipped"),
]
EVERY_STORE = pytest.mark.parametrize("rows", STORES)


def test_at_any_line_of_the_loop(make_head: MakeHead) -> None:
    """Those of the encoder's two passes included; of other loops, and inside the head, the next test."""
    attempt: Attempt = with_zero_grad
    then: Then = "announced, repeated"
    lines = lines_of(attempt, make_head("dense"))
    assert len(lines) >= 9
    for point in lines:
        head = make_head("dense")
        expected = run(DenseHead(head), loaded(BATCHES), attempt, then, Tracer(attempt, point))
        run(head, loaded(BATCHES), attempt, then, Tracer(attempt, point)).assert_close(expected)


@pytest.mark.parametrize(
    ("attempt", "then", "rows"),
    [
        pytest.param(attempt, then, rows, marks=pytest.mark.guard if guards == rows else pytest.mark.slow)
        for attempt, then, guards in (
            (with_zero_grad, "repeated", "remote"),
            (with_step, "left out", "resident"),
            (with_step, "announced, skipped", "dense"),
            (with_scaler, "repeated", "dense"),
        )
        for rows in ("dense", "resident", "remote")
    ],
)
def test_at_any_line_inside(make_head: MakeHead, client: WeightClient, attempt: Attempt, then: Then, rows: str) -> None:
    """As if the line of the loop failed whose call it is in: before it, or after it if the update was made. Of heads
    with servers, the lines of their rows."""
    with make_head(rows) as head:
        run(head, loaded(BATCHES), attempt, then, lines := Tracer(attempt, inside=True))
    own_file, made, expected = lines.points[0][0], set[bool](), dict[Point, Result]()
    loop = [point for point in lines.points if point[0] == own_file]
    for point in lines.points:
        if rows != "dense" and point[0] != own_file and "/rows/" not in point[0]:
            continue
        if rows != "dense":
            client.drop_table()
        with make_head(rows) as head:
            result = run(head, loaded(BATCHES), attempt, then, failed := Tracer(attempt, point, inside=True))
            assert failed.line is not None, point
            ended = failed.made and point[0] != own_file
            as_dense = loop[-2] if ended and failed.line == loop[0] else loop[loop.index(failed.line) + ended]
            if as_dense not in expected:
                expected[as_dense] = run(DenseHead(head), loaded(BATCHES), attempt, then, Tracer(attempt, as_dense))
        result.assert_close(expected[as_dense])
        made.add(ended)
    assert made == {False, True}


@EVERY_STORE
def test_a_batch_that_is_repeated_without_a_word_is_refused(make_head: MakeHead, rows: str) -> None:
    """Before its second backward pass reaches rows or encoder: the step is that of the first one."""
    head, dense, encoder = make_head(rows), Dense(make_head("dense")), Encoder()
    ids, batch = [5, 13, 17, 19], INPUTS[[5, 13, 17, 19]]
    dense.visits += ids
    dense.loss(encoder.module(batch), ids).backward()
    encoder.optimizer.zero_grad()
    first = head(encoder.module(batch), ids)
    first.backward(retain_graph=True)
    encoder.optimizer.zero_grad()
    for again in (first, head(encoder.module(batch), ids)):
        with pytest.raises(ValueError, match=r"a second backward pass .* call head\.zero_grad\(\) before you repeat"):
            again.backward(retain_graph=True)
        assert encoder.module.weight.grad is None
    head.step(0.3)
    dense.update(0.3)
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), dense.weight.detach(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"backward\(\) of a loss of step 0, which has ended: call head"):
        first.backward()


def test_views_of_a_batch_have_a_backward_pass_together_or_one_each(make_head: MakeHead) -> None:
    ids, rows = list(range(BATCH_SIZE)), []
    for together in (True, False):
        head, encoder = make_head("dense"), Encoder()
        losses = [
            head(view, ids, view=0 if together else number) / 2
            for number, view in enumerate(encoder.views(INPUTS[ids], 2))
        ]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        head.step(0.3)
        rows.append(head.rows(ids))
    torch.testing.assert_close(*rows)


@pytest.mark.parametrize("announces", [True, False])
def test_what_was_forgotten_is_said_first(make_head: MakeHead, announces: bool) -> None:
    head, encoder, batches = make_head("dense"), Encoder(), loaded(shuffled(0, 6))
    coming = iter(head.announced(batches) if announces else batches)
    ids, batch = next(coming)
    head(encoder.module(batch), ids)
    ids, batch = next(coming)
    with pytest.raises(ValueError, match=r"^backward\(\) of the batch before was not called: .*, but step 0 .* has no"):
        head(encoder.module(batch), ids)
    head(encoder.module(batches[0][1]), batches[0][0]).backward()
    for begins in (lambda: head(encoder.module(batch), ids), head.step_of(ids).__enter__):
        with pytest.raises(ValueError, match=r"^step\(\) of the batch before was not called: a batch of the classes"):
            begins()
    head.step(0.3)
    with head.step_of(ids) as number:
        head(encoder.module(batch), ids).backward()
        head.step(0.3)
    assert number == 1
    with pytest.raises(ValueError, match=r"a step needs at least one batch: call step_of"), head.step_of():
        pass
    assert head.num_steps == 2


def test_a_block_that_ends_without_its_step_says_so(make_head: MakeHead) -> None:
    """The gradients are dropped; the same batch, or another one, may follow."""
    head, before = make_head("dense"), make_head("dense").rows(range(NUM_CLASSES))
    for ids in ([1, 2], [3, 4]):
        with pytest.raises(ValueError, match=r"^step\(\) was not called in the block of step 0, "), head.step_of(ids):
            head(INPUTS[ids, :DIM].requires_grad_(), ids).backward()
    with head.step_of([3, 4]):
        head(INPUTS[[3, 4], :DIM].requires_grad_(), [3, 4]).backward()
        head.skip(0.0)
    head.announce([5], [6])
    for ids in ([5], [6]):
        with head.step_of(ids):
            head(INPUTS[ids, :DIM].requires_grad_(), ids).backward()
    head.step(0.0)
    assert head.num_steps == 2
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), before)


def test_a_step_that_is_skipped_at_its_first_batch(make_head: MakeHead) -> None:
    """A loader leaves out its second one."""
    head, given = make_head("dense"), []
    first, second = [1, 2, 3], [4, 5, 6]
    for (ids,) in head.announced([(first,), (second,), (second,), (first,)], batches_per_step=2):
        given.append(ids)
        if len(given) == 1:
            head.skip(RATE)
            continue
        head(INPUTS[ids, :DIM].requires_grad_(), ids).backward()
        if len(given) == 3:
            head.step(RATE)
    assert given == [first, second, first]
    assert head.num_steps == 2


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_on_both_of_two_ranks(make_head: MakeHead, of_ranks: Path) -> None:
    for rows, attempt, then in OF_RANKS:
        for point in lines_of(attempt, make_head("dense")):
            expected = run(DenseHead(make_head("dense")), loaded(BATCHES), attempt, then, Tracer(attempt, point))
            result = Result(**torch.load(of_ranks / file_name(rows, attempt, then, point), weights_only=True))
            if rows == "dense":
                result.rows = expected.rows  # each rank has a part of them
            result.assert_close(expected)


def file_name(rows: str, attempt: Attempt, then: str, point: Point) -> str:
    return "-".join([rows, attempt.__name__, then, str(point[1])])


def as_rank(directory: Path, servers: list[str]) -> None:
    """Fails at each line of the loop, and writes what the rows are then."""
    rank, share = dist.get_rank(), BATCH_SIZE // 2
    batches = loaded([ids[rank * share : (rank + 1) * share] for ids in BATCHES])
    for rows, attempt, then in OF_RANKS:
        given: dict[str, Any] = SETTINGS | {"rows": rows} | ({} if rows == "dense" else {"servers": servers})
        for point in lines_of(attempt, ClassifierHead(NUM_CLASSES, DIM, **SETTINGS, rows="dense")):
            with ClassifierHead(NUM_CLASSES, DIM, **given) as head:
                result = run(head, batches, attempt, then, Tracer(attempt, point))
            if rank == 0:
                torch.save(vars(result), directory / file_name(rows, attempt, then, point))
            if rows != "dense":
                drop_table(servers)
