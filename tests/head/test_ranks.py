"""Two ranks that torchrun starts train a head as one rank does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.head.conftest import drop_table
from tests.helpers.own_loop import (
    BATCH_SIZE,
    DIM,
    INPUTS,
    NUM_CLASSES,
    NUM_NEGATIVES,
    SETTINGS,
    STEPS,
    Encoder,
    Images,
    Result,
    loaded,
    shuffled,
    trained,
)
from tests.helpers.torchrun import torchrun
from weightserver import InvalidRequestError, LocalCluster, ShardUnavailableError, WeightClient
from weightserver.torch import ClassifierHead

KINDS = [
    ("windows", "resident"),
    ("windows", "remote"),
    ("announced", "resident"),
    ("plain", "remote"),
    ("nodes", "resident"),
]
"""How batches come, and where rows are."""
BATCHES = shuffled(0, STEPS)
WINDOW: dict[str, Any] = {"window_size": 16, "window_stride": 4, "batch_size": BATCH_SIZE, "seed": 3}


def batches_of(head: ClassifierHead, kind: str) -> Any:
    """This rank's batches."""
    if kind in ("windows", "nodes"):
        sampler = head.sampler(**WINDOW)
        assert sampler.ranks.num_nodes == (sampler.ranks.world_size if kind == "nodes" else 1)
        return [head.announced(DataLoader(Images(), batch_sampler=sampler))] * 2
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = slice(BATCH_SIZE * rank // ranks, BATCH_SIZE * (rank + 1) // ranks)
    batches = loaded([ids[mine] for ids in BATCHES])
    return [head.announced(batches) if kind == "announced" else batches]


def run(kind: str, rows: Any, where: dict[str, Any]) -> Result:
    """Trains; on several ranks the encoder's gradients are averaged, and losses are those of the whole batch."""
    encoder = Encoder()
    if dist.is_initialized():
        encoder.module = DistributedDataParallel(encoder.module)
    with ClassifierHead(NUM_CLASSES, DIM, rows=rows, **SETTINGS | where) as head:
        first = trained(head, batches_of(head, kind), steps=STEPS // 2, encoder=encoder)
        head.checkpoint("half")
        state = head.state_dict()
        head.load_state_dict(state)
        epochs = batches_of(head, kind)
        if kind not in ("windows", "nodes"):
            epochs = [loaded_rest(head, epochs[0])]
        rest = trained(head, epochs, encoder=encoder)
    return Result(first.losses + rest.losses, rest.rows, encoder.weight())


def loaded_rest(head: ClassifierHead, batches: Any) -> Any:
    """Without the steps that were made, without leaving the announced ones unused."""
    if isinstance(batches, list):
        return batches[head.num_steps :]
    return head.announced(batches._loader[head.num_steps :])


def as_rank(directory: Path, servers: list[str]) -> None:
    rank = dist.get_rank()
    for kind, rows in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            if kind == "nodes":
                patch.setenv("LOCAL_RANK", "0")
                patch.setenv("LOCAL_WORLD_SIZE", "1")
            own = {"directory": directory / "rows", "num_shards": 2}
            result = run(kind, rows, own if kind == "announced" else {"servers": servers})
        torch.save(vars(result), directory / f"{kind}-{rows}-{rank}")
        drop_table(servers)
    torch.save([error_of(case, rank) for case in DISAGREEMENTS], directory / f"errors-{rank}")


def dense(**settings: Any) -> ClassifierHead:
    return ClassifierHead(NUM_CLASSES, DIM, **SETTINGS | {"rows": "dense"} | settings)


def error_of(case: Callable[[int], object], rank: int) -> str:
    try:
        case(rank)
    except (ValueError, InvalidRequestError) as error:
        return str(error)
    raise AssertionError(case.__name__)


def passed(head: ClassifierHead, ids: Sequence[int], **settings: Any) -> ClassifierHead:
    head(torch.ones(len(ids), DIM, requires_grad=True), ids, **settings).backward()
    return head


def other_sizes(rank: int) -> None:
    passed(dense(), range(2 + rank))


def other_numbers(rank: int) -> None:
    head = dense()
    for ids, batch in head.announced(loaded(BATCHES[: 6 + rank])):
        head(Encoder().module(batch), ids).backward()
        head.step(0.1)


def other_classes(rank: int) -> None:
    """One rank gives other classes than it announced: it fails before anything is exchanged, then both end."""
    head = dense()
    head.announce([1, 2])
    passed(head, [5, 6])


def other_settings(rank: int) -> None:
    """They would train different classes, or rows in another order, without an error."""
    dense(num_negatives=NUM_NEGATIVES + rank, order_seed=rank).announce([1, 2])


def one_fails(rank: int) -> None:
    """After its backward pass, and repeats the step, which the other ends."""
    head, encoder = dense(), DistributedDataParallel(Encoder().module)
    for _ in range(2):
        with contextlib.suppress(RuntimeError), head.step_of([rank]):
            head(encoder(INPUTS[[rank]]), [rank]).backward()
            if rank:
                raise RuntimeError
            head.step(0.1)


def one_fails_before_its_pass(rank: int) -> None:
    """Between the encoder's pass and the head's."""
    head, encoder, fails = dense(), DistributedDataParallel(Encoder().module), rank == 1
    for _ in range(2):
        with contextlib.suppress(RuntimeError), head.step_of([rank]):
            embeddings = encoder(INPUTS[[rank]])
            if fails:
                fails = False
                raise RuntimeError
            head(embeddings, [rank]).backward()


def one_fails_in_its_backward_pass() -> None:
    """Of the encoder, whose gradients the other one waits for; it does not catch the error."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, head, encoder = dist.get_rank(), dense(), DistributedDataParallel(Encoder().module)

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError("the encoder's backward pass")

    with head.step_of([rank]):
        embeddings = encoder(INPUTS[[rank]])
        if rank:
            embeddings.register_hook(fail)
        head(embeddings, [rank]).backward()
        head.step(0.1)


def one_is_spoiled(rank: int) -> None:
    head = passed(dense(), [rank])
    assert head._steps.current is not None
    assert head._steps.current.weight is not None
    if 0 in head.order.images(head._steps.current.announced.rows):
        assert head._steps.current.weight.grad is not None
        head._steps.current.weight.grad.fill_(float("nan"))
    head.step(0.1)


def other_rates(rank: int) -> None:
    passed(dense(), [rank]).step(0.1 * (1 + rank))


def other_batches(rank: int) -> None:
    """In the other order: each would compare its images with the classes of the other's."""
    head = dense()
    head.announce([1, 2], [3, 4])
    passed(head, [3, 4] if rank else [1, 2])


def other_samplers(rank: int) -> None:
    """As by a seed for each rank: each would take the other's images for some of its own sampler's."""
    head = dense()
    sampler = head.sampler(batch_size=BATCH_SIZE, seed=rank)
    for ids, batch in head.announced(DataLoader(Images(), batch_sampler=sampler)):
        head(Encoder().module(batch), ids).backward()


def late_ranks(rank: int) -> None:
    """The sampler is made as if torch.distributed had not been initialised yet: each rank would train alone."""
    head = dense()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        head.sampler(batch_size=BATCH_SIZE)
    head.open()


def one_clips(rank: int) -> None:
    encoder, head = Encoder(), dense()
    head(encoder.module(INPUTS[:1]), [rank]).backward()
    head.step(0.1, optimizer=encoder.optimizer, max_norm=1.0 if rank else None)


def other_gradients(rank: int) -> None:
    """Of encoders without DistributedDataParallel: each rank would clip by a factor of its own."""
    encoder, head = Encoder(), dense()
    head(encoder.module(INPUTS[[rank]]), [rank]).backward()
    head.step(0.1, optimizer=encoder.optimizer, max_norm=1.0)


def one_scales(rank: int) -> None:
    encoder, head, scaler = Encoder(), dense(), torch.amp.GradScaler("cpu", init_scale=1.0, enabled=rank == 1)
    scaler.scale(head(encoder.module(INPUTS[:1]), [rank])).backward()
    head.step(0.1, scaler=scaler, optimizer=encoder.optimizer)


def one_gives_no_rate(rank: int) -> None:
    """It alone knows why; the other one does not wait for it. Both may repeat the call."""
    head = passed(dense(), [rank])
    try:
        head.step(None if rank else 0.1)
    finally:
        head.step(0.1)
        assert head.num_steps == 1


def one_class_does_not_exist(rank: int) -> None:
    dense().evaluate(torch.ones(2, DIM), [0, 99 if rank else 1])


def one_saves(rank: int) -> None:
    with tempfile.TemporaryDirectory() as rows, dense(rows="resident", directory=Path(rows)) as head:
        passed(head, [rank]).step(0.1)
        if rank:
            head.checkpoint("a")
        head.predict(torch.ones(1, DIM))


def one_reads(rank: int) -> None:
    if rank:
        dense().rows([0])
    dense().evaluate(torch.ones(1, DIM), [0])


def a_row_does_not_exist(rank: int) -> None:
    dense().rows([99 if rank else 1])


def other_numbers_of_predictions(rank: int) -> None:
    dense().predict(torch.ones(1, DIM), 2 + rank)


def other_classes_to_compare(rank: int) -> None:
    dense().predict(torch.ones(1, DIM), 1, classes=[2 + rank])


def a_name_was_used(rank: int) -> None:
    with tempfile.TemporaryDirectory() as rows, dense(rows="resident", directory=Path(rows)) as head:
        for _ in range(2):
            passed(head, [1 + 2 * rank, 2 + 2 * rank]).step(0.1)
            head.checkpoint("a")


def a_token_is_away(rank: int) -> None:
    """From the first rank, whose own function for it raises any error."""
    opened_again(rank, "create_table", RuntimeError("there is no token"), of=0)


def a_server_cannot_be_found(rank: int) -> None:
    opened_again(rank, "expect", ShardUnavailableError("it is down"), of=1)


def opened_again(rank: int, method: str, error: Exception, *, of: int) -> None:
    """A method of one rank's client fails when the head is opened; both go on."""
    patch = pytest.MonkeyPatch()

    def fail(*_: object) -> None:
        patch.undo()
        raise error

    with tempfile.TemporaryDirectory() as rows, dense(rows="resident", directory=Path(rows)) as head:
        if rank == of:
            patch.setattr(WeightClient, method, fail)
        try:
            head.open()
        except (RuntimeError, ValueError, ShardUnavailableError) as told:
            passed(head, [rank]).step(0.1)
            raise ValueError(str(told)) from None


def a_server_is_away(rank: int) -> None:
    """From one rank, once in each of these calls, which both repeat until they succeed."""
    errors = []
    with tempfile.TemporaryDirectory() as rows, dense(rows="resident", directory=Path(rows)) as head:
        passed(head, range(6 * rank, 6 * rank + 6)).step(0.1)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("write_state", head.checkpoint),
            ("fetch", lambda: head.evaluate(torch.ones(1, DIM), [0])),
            ("fetch_state", lambda: passed(head, range(12 + 6 * rank, 18 + 6 * rank)).step(0.1)),
            ("require_session", lambda: passed(head, range(24 + 6 * rank, 30 + 6 * rank)).step(0.1)),
        ]
        for method, call in calls:
            patch = pytest.MonkeyPatch()

            def fail(*_: object, patch: pytest.MonkeyPatch = patch, **__: object) -> None:
                patch.undo()
                raise ShardUnavailableError("it is down")

            if rank:
                patch.setattr(head.client, method, fail)
            for _ in range(3):
                try:
                    call()
                    break
                except (ValueError, ShardUnavailableError) as error:
                    errors.append(str(error))
                    head.zero_grad()
        assert head.num_steps == 3
    raise ValueError(", ".join(errors))


def unlike(first: str, second: str) -> list[str]:
    """What the ranks say of their different calls."""
    return [f"this rank {first}, another one {second}: ", f"this rank {second}, another one {first}: "]


A_RANK_FAILED = "another rank failed where this one"
DISAGREEMENTS: dict[Callable[[int], object], list[str]] = {
    other_settings: [
        "rank 0: every rank must make the head with the same arguments, got other settings on another rank",
        "rank 1: every rank must make the head with the same arguments, got order_seed=1 (rank 0: 0), "
        "num_negatives=13 (rank 0: 12)",
    ],
    other_sizes: ["the batches of a step must be equally large, on every rank, got 2 to 3 classes"] * 2,
    other_numbers: [
        "the batches of this rank have ended before those of another: give every rank as many",
        "the batches of another rank have ended before this one's: give every rank as many",
    ],
    one_fails: unlike("ends step 0 after 0 failed attempts", "announces step 0 after 1 failed attempts"),
    one_fails_before_its_pass: unlike(
        "gives a batch of step 0 after 0 failed attempts", "announces step 0 after 1 failed attempts"
    ),
    one_is_spoiled: [
        "the gradient of class 1 is infinite or NaN in step 0, nothing was updated",
        "the gradient of the encoder or of another rank is infinite or NaN in step 0, nothing was updated",
    ],
    other_classes: ["the classes 5, 6 are not those that were announced for step 0 (1, 2)"] * 2,
    other_rates: ["the learning rate of step 0 must be the same on every rank, got 0.1 to 0.2: a schedule that "] * 2,
    other_batches: ["the ranks give different batches in step 0, got 0 to 1: every rank gives the batches and "] * 2,
    other_samplers: ["the ranks announce different classes for step 0: give every rank's sampler the same arg"] * 2,
    late_ranks: ["the head, or its sampler, was used before torch.distributed was initialised, as if this process"] * 2,
    one_clips: ["max_norm must be the same on every rank, got -1 to 1 (-1: none)"] * 2,
    other_gradients: ["the gradients of the ranks' encoders have norms from "] * 2,
    one_scales: ["the ranks' losses have different scales, 0 to 1 (0: none): share one scaler's"] * 2,
    one_gives_no_rate: [
        f"{A_RANK_FAILED} ends step 0 after 0 failed attempts: its own error says why; repeat the call on all of them",
        "the learning rate of step 0 is not known: give step(learning_rate=...)",
    ],
    one_class_does_not_exist: [
        f"{A_RANK_FAILED} evaluates before step 0",
        "class 99 does not exist: the head has classes 0..39",
    ],
    one_saves: unlike(
        "predicts before step 1 after 0 failed attempts", "takes a checkpoint before step 1 after 0 failed attempts"
    ),
    one_reads: unlike(
        "evaluates before step 0 after 0 failed attempts", "reads rows before step 0 after 0 failed attempts"
    ),
    a_row_does_not_exist: [
        f"{A_RANK_FAILED} reads rows before step 0",
        "class 99 does not exist: the head has classes 0..39",
    ],
    other_numbers_of_predictions: ["k must be the same on every rank, got 2 to 3"] * 2,
    other_classes_to_compare: ["the classes to compare must be the same on every rank"] * 2,
    a_server_is_away: [
        f"{A_RANK_FAILED} takes a checkpoint before step 1",
        "it is down, it is down, it is down, it is down, this rank announces step 2",
    ],
    a_server_cannot_be_found: [f"{A_RANK_FAILED} opens the rows before step 0", "it is down"],
    a_token_is_away: ["there is no token", "rank 0 failed: there is no token"],
    a_name_was_used: ["shard 0 at 127.0.0.1:", "rank 0 failed: shard 0 at 127.0.0.1:"],
}


@pytest.mark.guard
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "rows"), KINDS)
@pytest.mark.usefixtures("client")
def test_two_ranks_train_as_one(of_ranks: Path, cluster: LocalCluster, kind: str, rows: str) -> None:
    """Also after a checkpoint was restored in the middle, and with embedded shards that rank 0 starts. As nodes, each
    is dealt visits to neighbouring images, and torchrun's variables say that each has its own machine."""
    expected = run(kind, rows, {"servers": cluster.addresses})
    for rank in range(2):
        Result(**torch.load(of_ranks / f"{kind}-{rows}-{rank}", weights_only=True)).assert_close(expected)


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_ranks_that_do_not_agree(of_ranks: Path) -> None:
    """Each of them says so in one line, in that step, and none waits for the other."""
    for rank in range(2):
        errors = torch.load(of_ranks / f"errors-{rank}", weights_only=True)
        for error, messages in zip(errors, DISAGREEMENTS.values(), strict=True):
            assert error.startswith(messages[rank])
            assert "\n" not in error


@pytest.mark.guard
def test_a_rank_that_fails_in_the_encoders_backward_pass_ends_all() -> None:
    """Although the other one waits for its gradients."""
    ended = torchrun("tests.head.test_ranks", check=False)
    assert ended.returncode
    assert "MemoryError: the encoder's backward pass" in ended.stderr


if __name__ == "__main__":
    one_fails_in_its_backward_pass()
