"""Tables, commands and checks that the tests of the operator's commands share."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightserver import RowState, TableSpec, WeightClient
from weightserver.operations.checkpoint_blocks import CheckpointReader
from weightserver.operations.reshard import reshard

SPEC = TableSpec(num_rows=1_000, dim=16, rows_per_block=7)

ROWS = np.arange(SPEC.num_rows)

NUM_STORED, STEPS = 334, 100

RATES = np.linspace(0.2, 0.1, STEPS, dtype=np.float32)

Weightserver = Callable[..., tuple[int | str | None, str, str]]


def make_table(client: WeightClient) -> RowState:
    """Makes checkpoint `one` of NUM_STORED rows, then `two`, then more writes; returns the rows of `one`."""
    client.create_table(SPEC)
    client.open_session("run")
    push(client, 0, ROWS[:700:3])
    push(client, 1, ROWS[:300:2])
    client.checkpoint("one", step=2)
    kept = client.fetch_state(ROWS)
    push(client, 2, ROWS[200:900:5])
    client.checkpoint("two", step=3)
    push(client, 3, ROWS[::11])
    return kept


def push(client: WeightClient, step: int, rows: np.ndarray) -> None:
    client.extend_schedule(0, RATES)
    gradients = np.random.default_rng(step).standard_normal((len(rows), SPEC.dim)).astype(np.float32)
    client.push_gradients(rows, gradients, step=step)


def dies(place: str, number: int, *arguments: object) -> None:
    """Runs a command that kills itself with -9 after call `number` of `place`."""
    command = [sys.executable, "-m", "tests.helpers.at_a_point", str(number), place, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def assert_one_line(outcome: tuple[int | str | None, str, str], message: str) -> None:
    status, _, error = outcome
    assert (status, error.count("\n")) == (1, 1), error
    assert message in error, error


def lose_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that shards send with blocks of a checkpoint lack the first."""
    read = CheckpointReader._read

    def without_first(reader: CheckpointReader, first_block: int) -> Any:
        answer = read(reader, first_block)
        del answer.blocks[:1]
        return answer

    monkeypatch.setattr(CheckpointReader, "_read", without_first)


def reshard_all(client: WeightClient, targets: list[Path], **options: Any) -> None:
    """Fills as many new shards, one after the other."""
    for shard, target in enumerate(targets):
        reshard(client, target, shard=shard, num_shards=len(targets), **options)


def targets_in(directory: Path, num_shards: int) -> list[Path]:
    return [directory / f"shard-{shard}" for shard in range(num_shards)]


def flipped(content: bytes, at: float = 0.5) -> bytes:
    """The content with one bit changed, by default halfway."""
    changed = bytearray(content)
    changed[int(len(content) * at)] ^= 4
    return bytes(changed)


@contextlib.contextmanager
def no_room(limit: int = 24 << 10) -> Iterator[None]:
    """Limits files to this number of bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
