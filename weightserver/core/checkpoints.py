"""Checkpoints: states of all rows that can be read and returned to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weightserver.core.errors import NoTableError, StepError


@dataclass(frozen=True)
class Checkpoint:
    """A state of all rows that can be read and returned to."""

    name: str
    step: int
    """Number of finished updates that it holds."""
    checkpoint_id: bytes = field(default=b"", compare=False, repr=False)
    """16 random bytes, the same on every shard, which distinguish it from others of the same name."""
    marks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Each shard's mark when the checkpoint was taken (see `Lineage`): the argument of `WeightClient.expect`."""


def backup_name(checkpoint: Checkpoint) -> str:
    """The name under which the shards keep a checkpoint for its backups, the same for all of them."""
    return f"backup-{checkpoint.checkpoint_id.hex()[:16]}"


def is_for_backup(kept: Checkpoint) -> bool:
    """Whether the shards keep it for its backups, or one of them while it is made."""
    return kept.name.startswith(backup_name(kept))


@dataclass(frozen=True, kw_only=True)
class ShardCheckpoint(Checkpoint):
    """A checkpoint as one shard retains it: each block's newest version of a generation ≤ `generation`."""

    generation: int
    rows_stored: int
    num_rows: int
    """Number of rows of the table when it was taken."""

    @property
    def mark(self) -> str:
        """The shard's mark when the checkpoint was taken."""
        return self.marks[0]


def require_readable(name: str, step: int, clock: int) -> None:
    """Raises StepError for a new checkpoint at a step below a shard's clock, before which its rows are not read."""
    if step < clock:
        raise StepError(
            f"writes or checkpoints have used the learning rates of {clock} steps, so the rows of checkpoint {name!r} "
            f"could not be read before update {step}: take it at step {clock} or later",
            step=step,
        )


def common_checkpoints(shards: Sequence[Iterable[Checkpoint]]) -> list[Checkpoint]:
    """The checkpoints that every shard retains, oldest first, with the marks of all shards."""
    known = [{(kept.checkpoint_id, kept.name): kept for kept in checkpoints} for checkpoints in shards]
    common = []
    for key, kept in known[0].items():
        if all(key in shard for shard in known):
            marks = tuple(mark for shard in known for mark in shard[key].marks)
            common.append(Checkpoint(kept.name, kept.step, kept.checkpoint_id, marks))
    return sorted(common, key=lambda kept: kept.step)  # those of one step stay in the order in which they were taken


def partly_kept(shards: Sequence[Iterable[Checkpoint]]) -> dict[str, list[list[int]]]:
    """The names under which not all shards retain one checkpoint, and for each checkpoint of that name the numbers of
    the shards that retain it."""
    common, found = {kept.name for kept in common_checkpoints(shards)}, dict[str, dict[bytes, list[int]]]()
    for shard, checkpoints in enumerate(shards):
        for kept in checkpoints:
            if kept.name not in common:
                found.setdefault(kept.name, {}).setdefault(kept.checkpoint_id, []).append(shard)
    return {name: list(by_identity.values()) for name, by_identity in found.items()}


def who_keeps(name: str, groups: list[list[int]]) -> str:
    """Says which shards retain a checkpoint of that name, as `partly_kept` returned them."""
    if not groups:
        return f"no shard has a checkpoint {name!r}"
    if len(groups) == 1:
        return f"only shards {groups[0]} keep checkpoint {name!r}"
    return f"shards {' and '.join(map(str, groups))} keep different checkpoints {name!r}"


def chosen_checkpoint(name: str | None, known: Iterable[Checkpoint]) -> Checkpoint:
    """The checkpoint of that name, or the newest that is no backup's, among those that all shards retain, oldest first.

    Raises:
        NoTableError: there is none.
    """
    by_name = {kept.name: kept for kept in known}
    of_runs = [kept.name for kept in by_name.values() if not is_for_backup(kept)]
    if name is None and of_runs:
        name = of_runs[-1]
    if name is None or name not in by_name:
        what = "no checkpoint" if name is None else f"no checkpoint {name!r}"
        others = f", only {sorted(by_name)}" if by_name else ": WeightClient.checkpoint() and every trainer take them"
        raise NoTableError(f"there is {what} on all shards{others}")
    return by_name[name]
