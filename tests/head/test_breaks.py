"""Iterations that are left early, steps that fail or are skipped, errors in the background, and what close() ends."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead
from tests.head.test_exact import WINDOW, drawn, windows
from tests.helpers.own_loop import (
    DIM,
    NUM_CLASSES,
    SETTINGS,
    STEPS,
    Dense,
    Encoder,
    Images,
    learning_rate,
    loaded,
    shuffled,
    trained,
)
from weightserver import LocalCluster, WeightClient, WeightServerError
from weightserver.torch import ClassifierHead

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sampler", [True, False])
def test_an_iteration_that_ended_does_not_disturb_a_newer_one(make_head: MakeHead, sampler: bool) -> None:
    """As the iterator of a loop that failed, which its traceback keeps: closed later, it forgets nothing."""
    head, batches = make_head(), shuffled(2, STEPS)
    announced = head.announced(windows(head) if sampler else loaded(batches))
    former = iter(announced)
    next(former)
    trained(head, [announced], steps=3)
    newer = iter(announced)
    next(newer)
    former.close()  # type: ignore[attr-defined]
    assert head._steps._coming
    ids, batch = next(newer)
    assert len(ids) == len(batch)
    iter(announced)
    with pytest.raises(ValueError, match="another one began, or the head was closed or loaded a state: begin a new on"):
        next(newer)


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("how", ["close", "load"])
def test_an_iteration_ends_when_the_head_closes_or_loads_a_state(make_head: MakeHead, sampler: bool, how: str) -> None:
    head, encoder = make_head(), Encoder()
    announced = head.announced(windows(head) if sampler else loaded(shuffled(2, STEPS)))

    def interrupted() -> None:
        state = {}
        for ids, batch in announced:
            head(encoder.module(batch), ids).backward()
            head.step(0.1)
            if head.num_steps == 2:
                state = head.state_dict()
            if head.num_steps == 4:
                head.close() if how == "close" else head.load_state_dict(state)

    with pytest.raises(ValueError, match="the head was closed or loaded a state: begin a new one"):
        interrupted()
    if how == "load":
        trained(head, [announced], steps=5, encoder=encoder)


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which dynamo reads of all tensors
def test_a_compiled_model(make_head: MakeHead) -> None:
    """torch.compile leaves the head as it is: tracing its calls of the servers would fail or take minutes."""
    head, encoder, batches = make_head(), Encoder(), shuffled(3, STEPS)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = encoder.module, head

        def forward(self, batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.head(self.encoder(batch), ids)
            return loss

    model = torch.compile(Model(), backend="eager")
    for ids, batch in loaded(batches):
        model(batch, ids).backward()
        encoder.update(learning_rate(head.num_steps))
        head.step(learning_rate(head.num_steps))
    torch.testing.assert_close(head.rows(range(NUM_CLASSES)), Dense(head).trained(batches).rows, rtol=0, atol=2e-5)


@pytest.mark.guard
def test_a_compiled_loop(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    """With everything that a loop calls of a head."""
    head, ids = make_head("dense"), [1, 2, 3, 4]

    @torch.compile(backend="eager")
    def loop() -> torch.Tensor:
        with head.step_of(ids):
            head(embeddings, ids).backward()
            head.zero_grad()
            head(embeddings, ids).backward()
            head.step(0.1)
        head.announce(ids)
        head.active_rows()
        head.skip(0.1)
        head.evaluate(embeddings, ids)
        return head.predict(embeddings, 2)

    assert loop().shape == (4, 2)
    assert head.num_steps == 2


def test_a_forked_process_neither_uses_nor_closes_the_head(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    """Without the wait for servers that gRPC, which does not survive a fork, would cause; the parent goes on."""
    head = make_head()
    head(embeddings, [1, 2, 3, 4]).backward()
    head.step(0.1)
    reader, writer = os.pipe()
    if not (process_id := os.fork()):
        try:
            head.rows([1])
        except ValueError as error:
            os.write(writer, str(error).encode())
        head.close()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert re.match(r"the head is that of process \d+ and cannot be used in \d+, which was forked", answer.read())
    assert os.waitpid(process_id, 0)[1] == 0
    head(embeddings, [1, 2, 3, 4]).backward()
    head.step(0.1)
    head.rows([1])


def test_a_gradient_that_is_infinite_names_its_class(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    """Nothing is updated, and the step can be skipped."""
    head = make_head()
    before = head.rows(range(NUM_CLASSES))
    (head(embeddings, [3, 3, 3, 3]) * float("inf")).backward()
    with pytest.raises(ValueError, match=r"class 3 is infinite or NaN in step 0, .* --learning-rate\), or skip"):
        head.step(0.0)
    head.skip(0.0)
    assert torch.equal(head.rows(range(NUM_CLASSES)), before)


@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_an_error_in_the_background_is_raised_by_the_next_calls(
    make_head: MakeHead, client: WeightClient, rows: str
) -> None:
    """Another session has begun meanwhile; nothing is pretended to be stored."""
    head, encoder = make_head(rows), Encoder()
    trained(head, [loaded(shuffled(8, 3))], steps=3, encoder=encoder)
    client.open_session("another run", take_over=True)
    with pytest.raises(WeightServerError, match="another run"):
        trained(head, [loaded(shuffled(9, STEPS))], encoder=encoder)
    with pytest.raises(WeightServerError, match="another run"):
        head.flush()


def test_an_error_that_names_a_row_names_its_class(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    """A learning rate at which rows explode, found by the servers; with weight decay it would be refused."""
    head = make_head("remote", weight_decay=0.0)

    def explode() -> None:
        for _ in range(40):
            head(embeddings, [1, 2, 3, 4]).backward()
            head.step(1e38)

    with pytest.raises(WeightServerError, match=r"row \d+ would be infinite .* \(row \d+ is class \d+\)") as raised:
        explode()
    words = str(raised.value).split()
    row, named = int(words[words.index("row") + 1]), int(words[-1].rstrip(")"))
    assert head.order.images(np.array([row])).tolist() == [named]


def own_threads() -> set[str]:
    names = ("prefetch", "write-back", "remote-rows")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(names)}


@pytest.mark.guard
@pytest.mark.parametrize("how", ["close", "collected", "in vain"])
def test_nothing_outlives_the_head(tmp_path: Path, how: str) -> None:
    """Neither threads nor shards: after close(), without it, and if opening failed."""
    directory = tmp_path / "rows"
    if how == "in vain":
        with ClassifierHead(NUM_CLASSES, 6, num_negatives=12, directory=directory) as head:
            trained(head, [loaded(shuffled(0, 3))], steps=3)
            head.checkpoint()
    before = set(psutil.Process().children())
    head = ClassifierHead(NUM_CLASSES, 6, num_negatives=12, directory=directory)
    if how == "in vain":
        for _ in range(2):
            with pytest.raises(ValueError, match=r"hold the rows of run 'head' up to step 3: .* use another directory"):
                head.rows([0])
        assert set(psutil.Process().children()) == before
        return
    loader = DataLoader(Images(), batch_sampler=head.sampler(**WINDOW))
    for ids, batch in head.announced(loader):
        head(Encoder().module(batch), ids).backward()
        break
    shards = list(set(psutil.Process().children()) - before)
    assert shards
    assert own_threads()
    if how == "close":
        head.close()
        with pytest.raises(ValueError, match="the head is closed: make another one"):
            head.rows([0])
        head.close()
    else:
        del head, loader
        gc.collect()
    assert not psutil.wait_procs(shards, timeout=60)[1]
    assert not own_threads()


_WITHOUT_CLOSE = """
import os, sys, torch
from weightserver.torch import ClassifierHead
STORES = ("resident", "remote")
heads = [ClassifierHead(40, 6, num_negatives=12, rows=rows, directory=f"{sys.argv[1]}/{rows}") for rows in STORES]
embeddings = torch.randn(4, 6, requires_grad=True)
for step in range(3):
    for head in heads:
        head(embeddings, [1, 2, 3, 4]).backward()
        head.step(0.1)
    if (child := os.fork()) == 0:  # as a DataLoader's worker, which must not stop the parent's shards
        del head, heads
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.guard
def test_a_script_that_does_not_close_its_heads_ends_quietly(tmp_path: Path) -> None:
    """Its shards end with it."""
    command = [sys.executable, "-c", _WITHOUT_CLOSE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    lines = [line for line in done.stderr.splitlines() if "fork" not in line]  # gRPC and Python warn of threads
    assert (done.returncode, lines) == (0, [])
    for rows in ("resident", "remote"):
        with LocalCluster(1, tmp_path / rows) as cluster:  # nothing else serves the directory
            assert cluster.addresses


_IN_VAIN = """
import sys, psutil, torch
from weightserver.torch import ClassifierHead
head = ClassifierHead(40, 6, num_negatives=12, directory=sys.argv[1], rows=sys.argv[2])
head(torch.randn(4, 6, requires_grad=True), [1, 2, 3, 4]).backward()
head.step(0.1)
head.flush()
for shard in psutil.Process().children():
    shard.kill()
head.announce([5, 6, 7, 8])
raise RuntimeError("as any script may")
"""


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_a_script_that_fails_does_not_wait_for_servers_that_are_gone(tmp_path: Path, rows: str) -> None:
    """Python waits for the threads of executors, whose calls would be retried for minutes."""
    command = [sys.executable, "-c", _IN_VAIN, str(tmp_path), rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "RuntimeError: as any script may" in done.stderr.splitlines()


def test_a_head_that_is_dropped_is_gone_at_once(embeddings: torch.Tensor) -> None:
    """Without waiting for a garbage collection: another one may use its directory. Its sampler may stay."""
    head = ClassifierHead(NUM_CLASSES, 6, num_negatives=12, rows="dense")
    sampler = head.sampler(batch_size=4)
    loss = head(embeddings, [1, 2, 3, 4])
    loss.backward()
    head.step(0.1)
    dropped = weakref.ref(head)
    gc.disable()
    try:
        del head
        assert dropped() is None
        assert len(next(iter(sampler))) == 4
    finally:
        gc.enable()


@pytest.mark.slow
def test_many_steps_take_no_memory(make_head: MakeHead, embeddings: torch.Tensor) -> None:
    """Of classes that no sampler announces, with a new learning rate in each step: 16 bytes a step or less."""
    head, process = make_head(), psutil.Process()
    generator = np.random.default_rng(0)

    def train(steps: int) -> int:
        for _ in range(steps):
            head(embeddings, generator.integers(NUM_CLASSES, size=4)).backward()
            head.step(0.1 / (1 + head.num_steps))
        gc.collect()
        return process.memory_info().rss

    before = train(500)
    assert train(3000) - before < 8 << 20


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_close_does_not_wait_for_servers_that_are_gone(tmp_path: Path, rows: Any) -> None:
    """Calls of the background threads would otherwise be retried for minutes."""
    head = ClassifierHead(NUM_CLASSES, 6, num_negatives=12, directory=tmp_path / "rows", rows=rows)
    encoder = Encoder()
    trained(head, [loaded(shuffled(0, 3))], steps=3, encoder=encoder)
    for shard in psutil.Process().children():
        if "weightserver" in " ".join(shard.cmdline()) and str(tmp_path) in " ".join(shard.cmdline()):
            shard.kill()
            shard.wait()
    head.forget_announced()
    head.announce([0, 1, 2, 3])
    started = time.monotonic()
    head.close()
    assert time.monotonic() - started < 60


def test_without_a_window_each_image_is_visited_once_in_an_epoch() -> None:
    with ClassifierHead(NUM_CLASSES, 6, num_negatives=12, rows="dense") as head:
        visited = np.concatenate(drawn(head.sampler(batch_size=4), range(10)))
    assert sorted(visited.tolist()) == list(range(NUM_CLASSES))


@pytest.mark.guard
@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_a_shard_is_killed_and_started_again(tmp_path: Path, rows: Any) -> None:
    """During a step: training continues, and no update is lost."""
    batches = shuffled(0, STEPS)
    with (
        LocalCluster(2, tmp_path) as cluster,
        ClassifierHead(NUM_CLASSES, DIM, rows=rows, servers=cluster.addresses, **SETTINGS) as head,
    ):
        encoder, losses = Encoder(), []
        for stop in (4, 9, STEPS):
            losses += trained(head, [loaded(batches[head.num_steps :])], steps=stop, encoder=encoder).losses
            head.announce(batches[min(stop, STEPS - 1)])  # rows are under way
            cluster.processes[stop % 2].kill()
            cluster.restart(stop % 2)
            head.forget_announced()
        expected = Dense(head).trained(batches)
        rows_now = head.rows(range(NUM_CLASSES))
    assert losses == pytest.approx(expected.losses, rel=1e-4)
    assert (rows_now - expected.rows).abs().max() < 2e-5
