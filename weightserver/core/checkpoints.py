"""Checkpoints: states of all shards that can be read and returned to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from weightserver.core.errors import NoTableError


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
    mark: str = ""
    """The shard's once it was taken; see `Lineage`."""
    num_rows: int = 0
    """Of the table when it was taken; 0 where version 0.1 took it, which did not tell."""


BACKUP_PREFIX = "backup-"
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
    of_runs = [(kept.step, kept.name) for kept in by_name.values() if not kept.name.startswith(BACKUP_PREFIX)]
    if name is None and of_runs:
        _, name = max(of_runs)
    if name is None or name not in by_name:
        what = "no checkpoint" if name is None else f"no checkpoint {name!r}"
        raise NoTableError(f"there is {what} on all shards, only {sorted(by_name)}")
    return by_name[name]
