"""Records that a shard stores besides its blocks: its identity, spec, state and schedule (keys: lmdb_transaction.py).

Every value is 8 bytes of checksum, u64 little-endian, XXH3-64 of the database's name, the key and the content; then the
content. A value that is not as it was written raises StorageError.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from weightserver.common.version import FORMAT, refusal
from weightserver.core.arrays import Float32Array
from weightserver.core.checkpoints import ShardCheckpoint
from weightserver.core.errors import DamagedFileError, NoTableError, StorageError
from weightserver.core.lineage import Lineage, split_mark
from weightserver.core.spec import TableSpec
from weightserver.storage.interface import Transaction

MAX_CHECKPOINTS = 1_000
"""Number of checkpoints that a shard may retain."""
_SCHEDULE_CHUNK = 256
"""Number of learning rates in a stored value, which the write of each new one stores again."""
_STEP = struct.Struct(">Q")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True)
class ShardIdentity:
    """The shard whose data a directory holds."""

    shard: int
    num_shards: int
    unfinished: bool = False
    """Whether another program still fills the directory; see shard_builder.py."""


@dataclass(frozen=True)
class State:
    """The part of a shard that changes with every write, besides its rows."""

    epoch: int = 0
    session_id: str = ""
    """Random bytes of the newest session, as hex; empty if no client opened it, as after a drop or a restore."""
    run: str = ""
    clock: int = 0
    rows_stored: int = 0
    generation: int = 0
    written: int = 0
    """The newest generation in which rows may have been written."""
    incarnation: str = ""
    """Names the process that wrote last: 16 hexadecimal digits."""
    commit: int = 0
    """Number of transactions that changed anything, apart from sweeps."""
    rows_commit: int = 0
    """Number of the newest one that may have changed rows."""
    timeline: str = ""
    """Names the newest rollback or restore; shards with different ones hold rows of different times."""
    checkpoints: tuple[ShardCheckpoint, ...] = ()
    """Retained, oldest first; the current generation is newer than all of theirs."""

    @property
    def mark(self) -> str:
        """Names the state, see `Lineage`."""
        return f"{self.incarnation}:{self.commit}"

    def checkpoint(self, name: str, checkpoint_id: bytes = b"") -> ShardCheckpoint:
        """The retained checkpoint of that name and, if given, id.

        Raises:
            NoTableError: there is none.
        """
        for checkpoint in self.checkpoints:
            if checkpoint.name == name:
                if checkpoint_id not in (b"", checkpoint.checkpoint_id):
                    raise NoTableError(
                        f"checkpoint {name!r} was replaced by another of its name: call checkpoints() and start over"
                    )
                return checkpoint
        raise NoTableError(
            f"there is no checkpoint {name!r}: checkpoints(), or 'weightserver checkpoints', lists those of all shards"
        )


def descends(state: State, lineage: Lineage, mark: str) -> bool:
    """Whether a directory of that state and lineage holds everything that existed at the mark."""
    incarnation, commit = split_mark(mark)
    return (incarnation == state.incarnation and commit <= state.commit) or lineage.holds(mark)


def read_identity(txn: Transaction) -> ShardIdentity | None:
    """Reads whose data the directory holds; None if nothing is stored yet.

    Raises:
        StorageError: it is damaged, or of another format.
    """
    with _guarded(txn, "identity"):
        found = get_json(txn, "identity")
        if found is None:
            if any(True for _ in txn.items("meta")):
                raise ValueError("it is missing")
            return None
        found_format = found.pop("format")
        if found_format == FORMAT:
            return ShardIdentity(**found)
    raise StorageError(f"{txn.directory} {refusal(found_format)}")


def write_identity(txn: Transaction, identity: ShardIdentity) -> None:
    put_json(txn, "identity", {"format": FORMAT, **asdict(identity)})


def read_table(txn: Transaction) -> tuple[TableSpec, bytes] | None:
    """The table's spec, and its identity of 16 bytes; None if there is no table."""
    with _guarded(txn, "spec"):
        stored = _stored(txn, "spec")
        if stored["table"] is None:
            return None
        return TableSpec(**stored["table"]), bytes.fromhex(stored["identity"])


def write_spec(txn: Transaction, spec: TableSpec | None, identity: bytes = b"") -> None:
    put_json(txn, "spec", {"table": spec and asdict(spec), "identity": identity.hex()})


def read_state(txn: Transaction) -> State:
    with _guarded(txn, "state"):
        stored = _stored(txn, "state")
        checkpoints = tuple(map(_checkpoint_from_json, _stored(txn, "checkpoints")["retained"]))
        return State(**stored, checkpoints=checkpoints)


def write_state(txn: Transaction, state: State, before: State | None = None) -> None:
    """Stores the state; the checkpoints only if they are not those of the stored state `before`."""
    put_json(txn, "state", {name: value for name, value in vars(state).items() if name != "checkpoints"})
    if before is None or state.checkpoints is not before.checkpoints:
        put_json(txn, "checkpoints", {"retained": list(map(_checkpoint_to_json, state.checkpoints))})


def _checkpoint_to_json(kept: ShardCheckpoint) -> dict[str, Any]:
    return {
        "name": kept.name,
        "step": kept.step,
        "generation": kept.generation,
        "rows_stored": kept.rows_stored,
        "identity": kept.checkpoint_id.hex(),
        "mark": kept.mark,
        "num_rows": kept.num_rows,
    }


def _checkpoint_from_json(stored: dict[str, Any]) -> ShardCheckpoint:
    named = {name: stored[name] for name in ("name", "step", "generation", "rows_stored", "num_rows")}
    checkpoint_id, mark = bytes.fromhex(stored["identity"]), stored["mark"]
    return ShardCheckpoint(**named, checkpoint_id=checkpoint_id, marks=(mark,))


def read_lineage(txn: Transaction) -> Lineage:
    with _guarded(txn, "lineage"):
        return Lineage().joined(_stored(txn, "lineage")["marks"])


def write_lineage(txn: Transaction, lineage: Lineage) -> None:
    put_json(txn, "lineage", {"marks": lineage.marks})


def read_peers(txn: Transaction) -> list[str]:
    """The marks of all shards that a client reported last, in the order of shards; empty if none did."""
    with _guarded(txn, "peers"):
        return list(map(str, _stored(txn, "peers")["marks"]))


def write_peers(txn: Transaction, marks: Iterable[str]) -> None:
    put_json(txn, "peers", {"marks": list(marks)})


def read_schedule(txn: Transaction) -> Float32Array:
    """The stored learning rates, those of the steps below the clock: float32 [clock]."""
    chunks = [np.frombuffer(content, "<f4") for _, content in read_records(txn, "schedule")]
    return np.concatenate([np.zeros(0, np.float32), *chunks])


def append_schedule(txn: Transaction, num_stored: int, learning_rates: Float32Array) -> None:
    """Stores learning rates (float32 [n]) after the `num_stored` that are stored."""
    first = num_stored - num_stored % _SCHEDULE_CHUNK
    if first < num_stored:
        stored = get_record(txn, "schedule", _STEP.pack(first)) or b""
        learning_rates = np.concatenate([np.frombuffer(stored, "<f4"), learning_rates])
    for start in range(0, len(learning_rates), _SCHEDULE_CHUNK):
        content = learning_rates[start : start + _SCHEDULE_CHUNK].astype("<f4").tobytes()
        put_record(txn, "schedule", _STEP.pack(first + start), content)


def truncate_schedule(txn: Transaction, learning_rates: Float32Array) -> None:
    """Stores only these learning rates (float32 [n]), the first of those that are stored."""
    txn.clear("schedule")
    append_schedule(txn, 0, learning_rates)


def get_json(txn: Transaction, key: str) -> dict[str, Any] | None:
    """A value of the database `meta`."""
    content = get_record(txn, "meta", key.encode())
    with _guarded(txn, key):
        found: dict[str, Any] | None = None if content is None else json.loads(content)
        return found


def put_json(txn: Transaction, key: str, value: dict[str, Any]) -> None:
    put_record(txn, "meta", key.encode(), json.dumps(value).encode())


# ---- checked values


def get_record(txn: Transaction, database: str, key: bytes) -> bytes | None:
    """A value's content, or None."""
    stored = txn.get(database, key)
    if stored is None:
        return None
    with _guarded(txn, _name(database, key)):
        return _checked(database, key, stored)


def put_record(txn: Transaction, database: str, key: bytes, content: bytes) -> None:
    txn.put(database, key, _CHECKSUM.pack(_checksum(database, key, content)) + content)


def read_records(txn: Transaction, database: str) -> Iterator[tuple[bytes, bytes]]:
    """(key, content) of all values."""
    for key, stored in txn.items(database):
        with _guarded(txn, _name(database, key)):
            content = _checked(database, key, stored)
        yield key, content


def _checked(database: str, key: bytes, stored: memoryview) -> bytes:
    content = bytes(stored[_CHECKSUM.size :])
    if bytes(stored[: _CHECKSUM.size]) != _CHECKSUM.pack(_checksum(database, key, content)):
        raise ValueError("checksum")
    return content


def _checksum(database: str, key: bytes, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"/".join([database.encode(), key, content]))


def _name(database: str, key: bytes) -> str:
    return key.decode(errors="replace") if database == "meta" else f"{database} {key.hex()}"


def _stored(txn: Transaction, key: str) -> dict[str, Any]:
    stored = get_json(txn, key)
    if stored is None:
        raise ValueError("it is missing")
    return stored


@contextlib.contextmanager
def _guarded(txn: Transaction, what: str) -> Iterator[None]:
    """Turns a wrong checksum, or a value that is missing, into DamagedFileError."""
    try:
        yield
    except ValueError as error:
        problem = f"its {what} is damaged ({error})"
        raise DamagedFileError(f"{txn.directory}: {problem}: restore it from a backup", [problem]) from error
