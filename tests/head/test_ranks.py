"""Two ranks that torchrun starts train a head as one rank does. As a script, this file is one of those ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.helpers.own_loop import (
    BATCH_SIZE,
    DIM,
    NUM_CLASSES,
    NUM_NEGATIVES,
    STEPS,
    Encoder,
    Images,
    Result,
    loaded,
    shuffled,
    trained,
)
from weightserver.torch import ClassifierHead

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "num_negatives": NUM_NEGATIVES,
    "rows_per_block": 3,
    "init_std": 0.3,
    "weight_decay": 0.01,
    "num_shards": 2,
}
BATCHES = shuffled(0, STEPS)
WINDOW: dict[str, Any] = {"window_size": 16, "window_stride": 4, "batch_size": BATCH_SIZE, "seed": 3}


def batches_of(head: ClassifierHead, kind: str) -> Any:
    """This rank's batches."""
    if kind == "windows":
        return [head.announced(DataLoader(Images(), batch_sampler=head.sampler(**WINDOW)))] * 2
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = slice(BATCH_SIZE * rank // ranks, BATCH_SIZE * (rank + 1) // ranks)
    batches = loaded([ids[mine] for ids in BATCHES])
    return [head.announced(batches) if kind == "announced" else batches]


def run(directory: Path, kind: str, rows: Any) -> Result:
    """Trains; on several ranks the encoder's gradients are averaged, and losses are those of the whole batch."""
    encoder = Encoder()
    if dist.is_initialized():
        encoder.module = DistributedDataParallel(encoder.module)
    with ClassifierHead(NUM_CLASSES, DIM, rows=rows, directory=directory, **SETTINGS) as head:
        first = trained(head, batches_of(head, kind), steps=STEPS // 2, encoder=encoder)
        head.checkpoint("half")
        state = head.state_dict()
        head.load_state_dict(state)
        epochs = batches_of(head, kind)
        if kind != "windows":
            epochs = [loaded_rest(head, epochs[0])]
        rest = trained(head, epochs, encoder=encoder)
    return Result(first.losses + rest.losses, rest.rows, encoder.weight())


def loaded_rest(head: ClassifierHead, batches: Any) -> Any:
    """Without the steps that were made, without leaving the announced ones unused."""
    if isinstance(batches, list):
        return batches[head.num_steps :]
    return head.announced(batches._loader[head.num_steps :])


def as_rank(out: Path, kind: str, rows: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    rank = dist.get_rank()
    if kind in ERRORS:
        try:
            FAILURES[kind](out, rank)
        except ValueError as error:
            (out / f"error-{rank}").write_text(str(error))
            os._exit(0)
        os._exit(3)
    result = run(out / "rows", kind, rows)
    torch.save(vars(result), out / f"result-{rank}")
    dist.destroy_process_group()


def other_sizes(out: Path, rank: int) -> None:
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", **SETTINGS) as head:
        ids = list(range(2 + rank))
        head(torch.randn(len(ids), DIM, requires_grad=True), ids)


def other_numbers(out: Path, rank: int) -> None:
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", **SETTINGS) as head:
        trained(head, [head.announced(loaded(BATCHES[: 6 + rank]))])


def other_classes(out: Path, rank: int) -> None:
    """One rank gives other classes than it announced: it fails before anything is exchanged, then both end."""
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", **SETTINGS) as head:
        head.announce([1, 2])
        head(torch.randn(2, DIM, requires_grad=True), [5, 6])


def other_settings(out: Path, rank: int) -> None:
    """They would train different classes, or rows in another order, without an error."""
    settings = SETTINGS | {"num_negatives": NUM_NEGATIVES + rank}
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", order_seed=rank, **settings) as head:
        head.announce([1, 2])


def one_fails(out: Path, rank: int) -> None:
    """In its backward pass, which it repeats, while the other ends the step."""
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", **SETTINGS) as head:
        for _ in range(2):
            try:
                with head.step_of([rank]):
                    head(torch.ones(1, DIM, requires_grad=True), [rank]).backward()
                    if rank:
                        raise RuntimeError
                    head.step(0.1)
            except RuntimeError:
                continue


def one_is_spoiled(out: Path, rank: int) -> None:
    with ClassifierHead(NUM_CLASSES, DIM, directory=out / "rows", **SETTINGS) as head:
        head(torch.ones(1, DIM, requires_grad=True), [rank]).backward()
        assert head._steps.current is not None
        assert head._steps.current.weight is not None
        if 0 in head.order.images(head._steps.current.announced.rows):
            assert head._steps.current.weight.grad is not None
            head._steps.current.weight.grad.fill_(float("nan"))
        head.step(0.1)


FAILURES = {"settings": other_settings, "sizes": other_sizes, "numbers": other_numbers, "classes": other_classes}
FAILURES |= {"one fails": one_fails, "one is spoiled": one_is_spoiled}
ERRORS = {
    "settings": [
        "rank 0: every rank must make the head with the same arguments, got other settings on another rank",
        "rank 1: every rank must make the head with the same arguments, got order_seed=1 (rank 0: 0), "
        "num_negatives=13 (rank 0: 12)",
    ],
    "sizes": ["the batches of a step must be equally large, on every rank, got 2 to 3 classes"] * 2,
    "numbers": [
        "the batches of this rank have ended before those of another: give every rank as many",
        "the batches of another rank have ended before this one's: give every rank as many",
    ],
    "one fails": [
        "this rank ends step 0 after 0 failed attempts, another one announces step 0 after 1 failed attempts: a step ",
        "this rank announces step 0 after 1 failed attempts, another one ends step 0 after 0 failed attempts: a step ",
    ],
    "one is spoiled": [
        "the gradient of class 1 is infinite or NaN in step 0, nothing was updated",
        "the gradient of the encoder or of another rank is infinite or NaN in step 0, nothing was updated",
    ],
    "classes": ["the classes 5, 6 are not those that were announced for step 0 (1, 2)"] * 2,
}


def launch(module: str, *arguments: str) -> None:
    """Runs a module as two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", module, *arguments]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.guard
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("windows", "resident"), ("windows", "remote"), ("announced", "resident"), ("plain", "remote")],
)
def test_two_ranks_train_as_one(tmp_path: Path, one_thread: None, kind: str, rows: str) -> None:
    """Also after a checkpoint was restored in the middle, with embedded shards that rank 0 starts."""
    expected = run(tmp_path / "one", kind, rows)
    launch("tests.head.test_ranks", str(tmp_path), kind, rows)
    for rank in range(2):
        Result(**torch.load(tmp_path / f"result-{rank}", weights_only=True)).assert_close(expected)


@pytest.mark.guard
@pytest.mark.parametrize("kind", list(ERRORS))
def test_ranks_that_do_not_agree(tmp_path: Path, kind: str) -> None:
    """Each of them says so in one line, and none waits for the other."""
    launch("tests.head.test_ranks", str(tmp_path), kind, "resident")
    for rank, message in enumerate(ERRORS[kind]):
        error = (tmp_path / f"error-{rank}").read_text()
        assert error.startswith(message)
        assert "\n" not in error


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
