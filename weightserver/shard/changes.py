"""What calls change on a shard. An operation may raise at any point, and then leaves no trace."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import asdict, replace

from weightserver.core.arrays import Int64Array, StoredArray
from weightserver.core.checkpoints import ShardCheckpoint, require_readable
from weightserver.core.errors import FencedError, InvalidRequestError, StepError, TableMismatchError
from weightserver.core.lineage import split_mark
from weightserver.core.spec import TableSpec
from weightserver.core.versions import Version
from weightserver.shard import writing
from weightserver.shard.sessions import check_epoch, session_of
from weightserver.shard.table import Table
from weightserver.shard.transaction import WriteHeader, WriteTransaction
from weightserver.storage.records import MAX_CHECKPOINTS, State, truncate_schedule, write_spec

_DELETED_AT_ONCE = 1 << 16
"""Versions that a rollback holds in memory."""
MAX_EPOCH_STEP = 1 << 20
"""How far a session may lie beyond the shard's newest: others may have been opened on other shards only, or before a
restore."""


class ShardChange(WriteTransaction):
    """A write transaction of a shard; each method is one operation."""

    # ---- the table

    def create_table(self, spec: TableSpec, identity: bytes = b"", epoch: int | None = None) -> bytes:
        """Creates the table, with a new identity if none is given, unless the same table exists; returns its identity.

        A table of the same spec that was never used takes on the given identity.

        Raises:
            TableMismatchError: another table exists.
            FencedError: a table was dropped since `epoch`.
        """
        existing, state = self.table, self.state
        if existing is None and epoch not in (None, state.epoch):
            raise FencedError(
                f"a table was dropped since epoch {epoch}: call create_table() again if it is still wanted"
            )
        if existing is not None:
            if existing.spec != spec:
                raise TableMismatchError(f"another table exists, {_difference(existing.spec, spec)}: use its spec")
            if identity in (b"", existing.identity):
                return existing.identity
            if state.rows_stored or state.clock or state.session_id or state.checkpoints:
                raise TableMismatchError(
                    f"shard {self.shard} holds another table of the same spec, of {session_of(state)}: are all "
                    "addresses of one cluster?"
                )
        self.table = Table.of(spec, identity or os.urandom(16))
        write_spec(self.txn, spec, self.table.identity)
        return self.table.identity

    def extend_table(self, num_rows: int, epoch: int | None = None) -> bool:
        """Gives the table more rows if `epoch` is the newest session; returns False if it has as many.

        Nothing is stored for new rows: a row that was never written is a function of the seed and its number.
        """
        table = self.require_table()
        known = table.spec.num_rows
        if epoch not in (None, self.state.epoch):
            check_epoch(self.state, epoch)
        if num_rows < known:
            raise InvalidRequestError(f"the table has {known} rows, and can only become larger, not {num_rows}")
        if num_rows == known:
            return False
        self.table = table.extended(num_rows)
        write_spec(self.txn, self.table.spec, table.identity)
        return True

    def drop_table(self, epoch: int | None = None) -> None:
        """Deletes the table of `epoch` and fences every session; epochs continue to count. May be repeated.

        Raises:
            FencedError: `epoch` has passed, and a newer table exists.
        """
        if epoch not in (None, self.state.epoch):
            if self.table is None:
                return
            raise FencedError(
                f"the table is now that of {session_of(self.state)}, no longer of epoch {epoch}: nothing was dropped"
            )
        for database in ("versions", "blocks", "schedule", "writers"):
            self.txn.clear(database)
        write_spec(self.txn, None)
        self.state, self.table, self.peers = State(epoch=self.state.epoch + 1), None, []
        self.note_rows()

    # ---- sessions

    def open_session(
        self,
        name: str,
        epoch: int,
        session_id: bytes,
        *,
        peers: list[str] | None = None,
        force: bool = False,
        take_over: bool = False,
        holder_id: bytes = b"",
    ) -> None:
        """Starts `epoch` and fences every older one. A repeated attempt changes nothing.

        With `force` the timeline becomes the shard's own, until the next rollback: no other session then mistakes the
        shards for ones that had a common state.

        Args:
            holder_id: of the process that opens it.

        Raises:
            FencedError: the epoch is not newer.
            InvalidRequestError: the epoch lies too far ahead.
            SessionInUseError: without `take_over`, if a live run of another process holds the newest session.
        """
        state = self.state
        if epoch == state.epoch and session_id.hex() == state.session_id:
            return
        if epoch <= state.epoch:
            raise FencedError(f"epoch {epoch} is not newer than {session_of(state)}: open the session again")
        if epoch > state.epoch + MAX_EPOCH_STEP:
            raise InvalidRequestError(
                f"epoch {epoch} is far beyond {session_of(state)}: open the one that follows the newest of all shards"
            )
        if not take_over:
            self.lease.require_free(bytes.fromhex(state.session_id), state.run, holder_id)
        timeline = os.urandom(16).hex() if force else state.timeline
        self.state = replace(state, epoch=epoch, session_id=session_id.hex(), run=name, timeline=timeline)
        self.peers = peers or self.peers

    # ---- rows and checkpoints

    def push_gradients(self, header: WriteHeader, rows: Int64Array, gradients: StoredArray) -> bool:
        """Applies update `header.step` with `gradients` ([n, D] of the table's dtype); False means a duplicate."""
        if not writing.admit(self, header):
            return False
        if header.step < 0:
            raise StepError(f"step must not be negative, got {header.step}")
        table = writing.use_rates(self, header.rates, header.step + 1)
        writing.update_rows(self, table, rows, header.step + 1, writing.Push(table, header.step, rows, gradients))
        return True

    def write_state(
        self,
        header: WriteHeader,
        rows: Int64Array,
        weight: StoredArray,
        momentum_buffer: StoredArray,
        last_step: Int64Array,
    ) -> bool:
        """Replaces rows by raw state ([n, D] of the table's dtype, int64 [n]); returns False for a duplicate."""
        if not writing.admit(self, header):
            return False
        if (last_step < 0).any():
            raise StepError(f"last_step must not be negative, got {last_step.min()}")
        last = int(last_step.max(initial=0))
        table = writing.use_rates(self, header.rates, last)
        update = writing.Replacement(table, rows, weight, momentum_buffer, last_step)
        writing.update_rows(self, table, rows, last, update)
        return True

    def settle_write(self, header: WriteHeader) -> bool:
        """Ensures that this write is not applied any more, if it has not been; returns whether it has."""
        self.require_table()
        return writing.seal(self, header.writer, header.sequence)

    def checkpoint(
        self,
        header: WriteHeader,
        name: str,
        checkpoint_id: bytes = b"",
        peers: list[str] | None = None,
    ) -> bool:
        """Keeps the rows as they are before update `header.step` under `name`; returns False for a duplicate.

        Taking the same checkpoint again only changes its id, which ties the shards' checkpoints together; shard 0 keeps
        its own. Call `Shard.check_contents` before: none is to be taken of rows that the disk has lost.

        Args:
            peers: marks of all shards; rows that were written since this shard's own are not those that are meant.

        Raises:
            InvalidRequestError: the name was used for another step or other rows, or there are too many checkpoints.
            StepError: rows may have seen more updates.
        """
        if not writing.admit(self, header):
            return False
        step = header.step
        table = writing.use_rates(self, header.rates, step)
        self.peers = peers or self.peers
        state, known = self.state, self._find(name)
        if known is None:
            if peers and split_mark(peers[self.shard])[1] < self.state.rows_commit:
                raise InvalidRequestError(f"rows were written since checkpoint {name!r} was begun: choose another name")
            require_readable(name, step, state.clock)
            taken = ShardCheckpoint(
                name,
                step,
                checkpoint_id,
                (self.mark,),
                generation=state.generation,
                rows_stored=state.rows_stored,
                num_rows=table.spec.num_rows,
            )
            self._retain(taken, len(state.checkpoints))
            # Its rows are read by the learning rates before its step, which stay; later writes go to a new generation.
            self.state = replace(self.state, clock=step, generation=state.generation + 1)
            return True
        if known.step != step:
            raise InvalidRequestError(f"checkpoint {name!r} was taken at step {known.step}: choose another name")
        if state.written > known.generation:
            raise InvalidRequestError(f"rows were written since checkpoint {name!r} was taken: choose another name")
        if self.shard == 0:
            checkpoint_id = known.checkpoint_id or checkpoint_id
        again = replace(known, checkpoint_id=checkpoint_id, marks=(self.mark,))
        self.state = replace(state, checkpoints=tuple(again if kept is known else kept for kept in state.checkpoints))
        return True

    def _find(self, name: str) -> ShardCheckpoint | None:
        return next((kept for kept in self.state.checkpoints if kept.name == name), None)

    def _retain(self, checkpoint: ShardCheckpoint, position: int) -> None:
        """Retains one more, before that of number `position`. Raises InvalidRequestError if there are too many."""
        kept = self.state.checkpoints
        if len(kept) >= MAX_CHECKPOINTS:
            oldest = ", ".join(repr(known.name[:60]) for known in kept[:5])
            raise InvalidRequestError(
                f"the shard retains {len(kept)} checkpoints, the most there may be: release some, the oldest are "
                f"{oldest}"
            )
        self.state = replace(self.state, checkpoints=(*kept[:position], checkpoint, *kept[position:]))

    def rollback(
        self,
        header: WriteHeader,
        name: str,
        checkpoint_id: bytes = b"",
        peers: list[str] | None = None,
        timeline: str = "",
    ) -> bool:
        """Returns the rows and the clock to a checkpoint and forgets later ones; returns False for a duplicate.

        Takes time in proportion to the number of stored blocks. The learning rates that were used since are forgotten.
        Epochs and writers stay.
        """
        if not writing.admit(self, header):
            return False
        table = self.require_table()
        kept = self.state.checkpoint(name, checkpoint_id)
        self.peers = peers or self.peers
        self.note_rows()
        self.txn.check_contents()  # a version that it does not find would stay
        first = 0
        while newer := list(itertools.islice(self._newer(first, kept.generation), _DELETED_AT_ONCE)):
            for version in newer:
                self.txn.delete_block(version)
            first = newer[-1].block
        self.state = replace(
            self.state,
            clock=kept.step,
            rows_stored=kept.rows_stored,
            generation=kept.generation + 1,
            written=min(self.state.written, kept.generation),
            timeline=timeline,
            checkpoints=tuple(other for other in self.state.checkpoints if other.generation <= kept.generation),
        )
        table = self.table = replace(table, num_rollbacks=table.num_rollbacks + 1)
        if kept.step < len(table.rates):
            self.table = table.with_rates(table.rates.up_to(table.spec, kept.step))
            truncate_schedule(self.txn, self.table.rates.hashed.values)
        return True

    def _newer(self, first: int, generation: int) -> Iterator[Version]:
        """The versions of blocks from `first` on that are newer than a generation."""
        return (version for version in self.txn.versions(first) if version.generation > generation)

    def release(self, header: WriteHeader, name: str) -> bool:
        """Forgets a checkpoint, if it exists; returns False for a duplicate.

        Versions that only it needed are deleted when their blocks are written again, or in a sweep.
        """
        if not writing.admit(self, header):
            return False
        others = tuple(kept for kept in self.state.checkpoints if kept.name != name)
        self.state = replace(self.state, checkpoints=others)
        return True

    def copy_checkpoint(self, header: WriteHeader, name: str, source: str, checkpoint_id: bytes = b"") -> bool:
        """Keeps the checkpoint `source` under `name` too, with its id; returns False for a duplicate.

        Raises:
            InvalidRequestError: the name is that of another checkpoint, or there are too many.
        """
        if not writing.admit(self, header):
            return False
        kept, known = self.state.checkpoint(source, checkpoint_id), self._find(name)
        if known is None:
            self._retain(replace(kept, name=name), self.state.checkpoints.index(kept) + 1)
        elif (known.checkpoint_id, known.generation) != (kept.checkpoint_id, kept.generation):
            raise InvalidRequestError(f"checkpoint {name!r} is another one than {source!r}: choose another name")
        return True


def _difference(existing: TableSpec, wanted: TableSpec) -> str:
    """The values in which two specs differ, for an error message."""
    old, new = asdict(existing), asdict(wanted)
    return ", ".join(f"{name} {old[name]} there and {new[name]} here" for name in old if old[name] != new[name])
