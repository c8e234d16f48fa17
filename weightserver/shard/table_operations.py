"""Operations that create, extend and drop the table of a shard."""

from __future__ import annotations

import os
from dataclasses import asdict

from weightserver.core.errors import FencedError, InvalidRequestError, TableMismatchError
from weightserver.core.spec import TableSpec
from weightserver.shard.sessions import check_epoch, session_of
from weightserver.shard.table import Table
from weightserver.shard.transaction import WriteTransaction
from weightserver.storage.records import (
    State,
    read_spec,
    read_table_identity,
    write_spec,
)


def create(batch: WriteTransaction, spec: TableSpec, identity: bytes, epoch: int | None, *, shard: int) -> bytes:
    """Creates the table, with a new identity if none is given, unless the same table exists; returns its identity.

    A table of the same spec that was never used takes on the given identity.

    Raises:
        TableMismatchError: another table exists.
        FencedError: a table was dropped since `epoch`.
    """
    existing, found = read_spec(batch.txn), read_table_identity(batch.txn)
    if existing is not None and existing != spec:
        raise TableMismatchError(f"another table exists, {_difference(existing, spec)}: use its spec")
    if existing is None and epoch not in (None, batch.state.epoch):
        raise FencedError(f"a table was dropped since epoch {epoch}: call create_table() again if it is still wanted")
    if existing is not None and identity in (b"", found):
        return found
    state = batch.state
    if existing is not None and (state.rows_stored or state.clock or state.session_id or state.checkpoints):
        raise TableMismatchError(
            f"shard {shard} holds another table of the same spec, of {session_of(state)}: are all addresses of one "
            "cluster?"
        )
    table = Table.of(spec, identity or os.urandom(16))
    write_spec(batch.txn, spec, table.identity)
    batch.table = table
    return table.identity


def extend(batch: WriteTransaction, num_rows: int, epoch: int | None) -> bool:
    """Gives the table more rows, unless another session than `epoch` is the newest; returns False if it has as many.

    Nothing is stored for new rows: a row that was never written is a function of the seed and its number.
    """
    table = batch.require_table()
    spec = table.spec
    if epoch not in (None, batch.state.epoch):
        check_epoch(batch.state, epoch)
    if num_rows < spec.num_rows:
        raise InvalidRequestError(f"the table has {spec.num_rows} rows, and can only become larger, not {num_rows}")
    if num_rows == spec.num_rows:
        return False
    batch.table = table.extended(num_rows)
    write_spec(batch.txn, batch.table.spec, table.identity)
    return True


def drop(batch: WriteTransaction, epoch: int | None) -> bool:
    """Deletes the table and fences every session; epochs continue to count. Returns False if it was dropped before.

    Raises:
        FencedError: `epoch` has passed, and a newer table exists.
    """
    if epoch not in (None, batch.state.epoch):
        if read_spec(batch.txn) is None:
            return False
        raise FencedError(
            f"the table is now that of {session_of(batch.state)}, no longer of epoch {epoch}: nothing was dropped"
        )
    for database in ("versions", "blocks", "schedule", "writers"):
        batch.txn.clear(database)
    write_spec(batch.txn, None)
    batch.state, batch.table, batch.peers = State(epoch=batch.state.epoch + 1), None, []
    return True


def _difference(existing: TableSpec, wanted: TableSpec) -> str:
    """The values in which two specs differ, for an error message."""
    old, new = asdict(existing), asdict(wanted)
    return ", ".join(f"{name} {old[name]} there and {new[name]} here" for name in old if old[name] != new[name])
