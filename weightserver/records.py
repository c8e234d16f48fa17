"""What a shard stores beside its blocks: who it is, the table's spec, its state, the schedule (where: storage.py)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from weightserver.config import TableSpec
from weightserver.errors import NoTableError
from weightserver.storage import Transaction
from weightserver.wire import Float32Array

FORMAT = 1
_SCHEDULE_CHUNK = 65_536
"""Learning rates per stored value."""
_STEP = struct.Struct(">Q")


@dataclass(frozen=True)
class Checkpoint:
    """A state of the shard that can be read and returned to: the newest versions of a generation ≤ `generation`."""

    name: str
    step: int
    generation: int
    clock: int
    rows_stored: int
    identity: str = ""
    """Hexadecimal; the same on every shard of the call that took it."""


@dataclass(frozen=True)
class State:
    """What changes with every write, stored beside the rows."""

    epoch: int = 0
    opener: str = ""
    """Of the newest session. Empty where the epoch is nobody's, as behind a drop or a restore."""
    run: str = ""
    clock: int = 0
    rows_stored: int = 0
    schedule_version: int = 0
    generation: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    """Retained, oldest first; the current generation is newer than all of theirs."""

    def checkpoint(self, name: str, identity: str = "") -> Checkpoint:
        """The retained checkpoint of that name and, where given, identity, or NoTableError."""
        for checkpoint in self.checkpoints:
            if checkpoint.name == name:
                if identity not in ("", checkpoint.identity):
                    raise NoTableError(f"checkpoint {name!r} is another one by now: call checkpoints() and begin anew")
                return checkpoint
        raise NoTableError(f"there is no checkpoint {name!r}: call checkpoints() for those of all shards")


HELD_PREFIX = "backup-"
"""Of the second names under which backups keep checkpoints while they read them."""


class KeptCheckpoint(NamedTuple):
    """A checkpoint of all shards, as each of them keeps it."""

    name: str
    step: int
    identity: str


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...


Kept = TypeVar("Kept", bound=_Named)


def chosen_checkpoint(name: str | None, known: Iterable[Kept]) -> Kept:
    """The one of that name, or the newest, among those that all shards keep.

    Raises:
        NoTableError: there is none.
    """
    by_name = {kept.name: kept for kept in known}
    of_runs = [(kept.step, kept.name) for kept in by_name.values() if not kept.name.startswith(HELD_PREFIX)]
    if name is None and of_runs:
        _, name = max(of_runs)
    if name is None or name not in by_name:
        what = "no checkpoint" if name is None else f"no checkpoint {name!r}"
        raise NoTableError(f"there is {what} on all shards, only {sorted(by_name)}")
    return by_name[name]


def read_spec(txn: Transaction) -> TableSpec | None:
    """None where there is no table."""
    stored = get_json(txn, "spec")
    return None if stored is None else TableSpec(**stored)


def read_state(txn: Transaction) -> State:
    stored = get_json(txn, "state")
    if stored is None:
        return State()
    checkpoints = tuple(Checkpoint(**checkpoint) for checkpoint in stored.get("checkpoints", ()))
    return State(**stored | {"checkpoints": checkpoints})


def write_state(txn: Transaction, state: State) -> None:
    put_json(txn, "state", asdict(state))


def read_schedule(txn: Transaction) -> Float32Array:
    """All learning rates, float32 [horizon]."""
    chunks = [np.frombuffer(value, "<f4") for _, value in txn.items("schedule")]
    return np.concatenate([np.zeros(0, np.float32), *chunks])


def write_schedule(txn: Transaction, start_step: int, learning_rates: Float32Array) -> None:
    """Stores those of `start_step` (≤ horizon) and later steps, float32 [n]."""
    end = start_step + len(learning_rates)
    for first in range(start_step - start_step % _SCHEDULE_CHUNK, end, _SCHEDULE_CHUNK):
        key = _STEP.pack(first)
        chunk = np.frombuffer(txn.get("schedule", key) or b"", "<f4")
        low, high = max(first, start_step), min(first + _SCHEDULE_CHUNK, end)
        merged = np.concatenate(
            [chunk[: low - first], learning_rates[low - start_step : high - start_step], chunk[high - first :]]
        )
        txn.put("schedule", key, merged.astype("<f4").tobytes())


def get_json(txn: Transaction, key: str) -> dict[str, Any] | None:
    """A value of the database `meta`."""
    value = txn.get("meta", key.encode())
    stored: dict[str, Any] | None = None if value is None else json.loads(bytes(value))
    return stored


def put_json(txn: Transaction, key: str, value: object) -> None:
    txn.put("meta", key.encode(), json.dumps(value).encode())
