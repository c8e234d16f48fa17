"""The state machine of one shard: its reads, and what it keeps in memory. No gRPC, no LMDB.

Reads run in any thread, each on a snapshot of the storage. Every change is an operation of `ShardChange`; `Committer`
runs them one after another. What the shard keeps in memory (the table with its learning rates, the state)
is replaced only after the transaction that changed it is durable.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from weightserver.common.stages import StageClock
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.correction import MAX_STEPS
from weightserver.core.errors import (
    DataLossError,
    MissingRatesError,
    StepError,
    StorageError,
    TableMismatchError,
    WrongShardError,
)
from weightserver.core.lineage import Lineage
from weightserver.core.rates import NO_RATES, HashedRates
from weightserver.core.spec import TableSpec
from weightserver.core.versions import NEWEST
from weightserver.protocol.codec import CHUNK_BYTES
from weightserver.shard import reading
from weightserver.shard.changes import ShardChange
from weightserver.shard.lease import Lease
from weightserver.shard.rates import GivenRates, ScheduledRates
from weightserver.shard.table import Table, existing
from weightserver.storage.interface import Storage, Transaction
from weightserver.storage.records import (
    ShardIdentity,
    State,
    descends,
    read_identity,
    read_lineage,
    read_peers,
    read_schedule,
    read_state,
    read_table,
    write_identity,
    write_lineage,
    write_peers,
    write_spec,
    write_state,
)


class Shard:
    """One shard of one table.

    Raises:
        StorageError: the directory belongs to another shard, cluster or format, or is damaged.
    """

    def __init__(self, storage: Storage, *, shard: int, num_shards: int) -> None:
        self.shard = shard
        self.num_shards = num_shards
        self.storage = storage
        self.state = State()
        self._table: Table | None = None
        self._next_table: Table | None = None
        """The table once the transaction that is being committed is durable."""
        self._ahead: ScheduledRates | None = None
        """The newest learning rates that a fetch brought and no write has used so far, after those that were."""
        self.num_releases = 0
        """How often versions of blocks may have become unneeded that no write deletes."""
        self.peers: Sequence[str] = []
        """The marks of all shards that a client reported last."""
        self.lease = Lease()
        self._incarnation = os.urandom(8).hex()
        self._checking = threading.Lock()
        self._num_checks = 0
        """How often `check_contents` found nothing lost."""
        with storage.write() as txn:
            identity = ShardIdentity(shard, num_shards)
            stored = read_identity(txn)
            txn.check_contents()
            if stored is None:
                write_identity(txn, identity)
                write_spec(txn, None)
                write_state(txn, State(incarnation=self._incarnation))
                write_lineage(txn, Lineage())
                write_peers(txn, [])
            elif stored != identity:
                raise StorageError(_identity_mismatch(storage, stored, identity))
            self._load(txn)

    def _load(self, txn: Transaction) -> None:
        self.state, self._lineage, self.peers = read_state(txn), read_lineage(txn), read_peers(txn)
        if (stored := read_table(txn)) is not None:
            table = Table.of(*stored)
            self._table = self._next_table = table.with_rates(ScheduledRates.of(table.spec, read_schedule(txn)))

    # ---- reading

    @property
    def spec(self) -> TableSpec | None:
        return self._table.spec if self._table else None

    @property
    def table_identity(self) -> bytes:
        return self._table.identity if self._table else b""

    @property
    def used_rates(self) -> HashedRates:
        """The learning rates of the steps below the clock."""
        return self._table.rates.hashed if self._table else NO_RATES

    def require_table(self, number: int = 0) -> Table:
        """The table. Raises NoTableError if there is none, TableMismatchError unless `number` names it, or is 0."""
        table = existing(self._table)
        table.check_number(number)
        return table

    def check_acknowledged(self, mark: str, table: str = "") -> None:
        """Checks that the shard's data descends from the state of that mark.

        Args:
            table: the identity of the caller's table, in hexadecimal digits; empty if the caller knows none. Data that
                descend from the mark may be of another table: then this one was dropped.

        Raises:
            WrongShardError: they do not, and are of another table, or of none: this is another cluster's shard.
            DataLossError: they do not.
        """
        state = self.state
        if not descends(state, self._lineage, mark):
            own = self.table_identity.hex()
            if table and table != own:
                raise WrongShardError(
                    f"shard {self.shard}/{self.num_shards} of {f'table {own}' if own else 'no table'} answers, the "
                    f"call is for that of table {table[:32]}",
                    is_empty=0 if own else 1,
                )
            raise DataLossError(
                f"shard {self.shard} lacks what it had acknowledged: its data is at {state.mark} and does not descend "
                f"from {mark}, so an older copy of its directory, or another directory, is in its place. Nothing was "
                "changed; put the newest directory back, or take all shards to one checkpoint or backup "
                "(docs/operations.md)"
            )

    def check_contents(self) -> None:
        """Checks that the disk has lost no record and no version of a block. Writes go on meanwhile.

        It reads all of them, in one snapshot, 1 µs each. A call that waits for another one takes its result: a caller
        whose deadline has passed may repeat its request.

        Raises:
            DamagedFileError: it has lost some.
        """
        before = self._num_checks
        with self._checking:
            if self._num_checks == before:
                with self.storage.read() as txn:
                    txn.check_contents()
                self._num_checks += 1

    def check_rows(self, rows: Int64Array) -> None:
        """Raises InvalidRequestError unless `rows` (int64 [n]) increase strictly and all live here."""
        self.require_table().check_rows(rows, shard=self.shard, num_shards=self.num_shards)

    def fetch(
        self,
        rows: Int64Array,
        *,
        step: int | None,
        state: bool,
        checkpoint: str | None = None,
        checkpoint_id: bytes = b"",
        rates: GivenRates | None = None,
        number: int = 0,
        clock: StageClock | None = None,
    ) -> Iterator[tuple[int, bytes]]:
        """Rows (checked, int64 [n]) before update `step`, or raw if `step` is None: yields how many of them, and their
        FetchResponse, for chunks of about 1 MiB.

        They are read as they are now, or as they were at a checkpoint.

        Each chunk is a snapshot of its own, so that no snapshot lives while a message waits to be sent. All are
        corrected by the same learning rates, those that the request names: `rates`. The stages of `clock` are "read"
        and "correct".

        Raises:
            StepError: `step` lies beyond the learning rates or before an update that a row has seen, or SGD would make
                a row infinite or NaN before it.
            NoTableError: there is no such checkpoint, or it is released meanwhile.
            TableMismatchError: rows were updated by other learning rates.
            MissingRatesError: the shard lacks some that the request does not bring, or others are being used meanwhile.
        """
        table, clock = self.require_table(number), clock or StageClock("read")
        if step is not None:
            table = self._following(table, rates or GivenRates(), step)
        for touched in reading.chunks(rows, table):
            clock.start("read")
            with self.storage.read() as txn:
                up_to = read_state(txn).checkpoint(checkpoint, checkpoint_id).generation if checkpoint else NEWEST
                found = reading.read_rows(txn, table, touched, up_to=up_to)
                self._check_still(table, step)
                clock.start("correct")
                answer = found.answer(table, step, state=state)
                del found  # its memory is the snapshot's
            yield len(touched.rows), answer

    def num_other_rates(self, given: GivenRates) -> int:
        """The number of learning rates of a schedule of its own that a fetch by these may need; 0 if it needs none."""
        held = (self._ahead or self.require_table().rates).hashed.values[given.start : given.stop]
        brings = given.learning_rates
        return 0 if np.array_equal(held[: len(brings)], brings) else min(given.stop, MAX_STEPS)

    def _following(self, table: Table, given: GivenRates, step: int) -> Table:
        """The table with the learning rates that a fetch for `step` names, which are kept in memory."""
        if step < 0:
            raise StepError(f"step must not be negative, got {step}")
        given.require(step)
        rates = table.rates.named(given, self._ahead)
        if rates is not table.rates:
            self._ahead = rates
        return table.with_rates(rates)

    def _check_still(self, table: Table, step: int | None) -> None:
        """Checks that rows that were just read are of this table, and were updated by these learning rates.

        Raises:
            TableMismatchError: the table was dropped since it was looked up.
            MissingRatesError: a write has used other ones since, or is about to, or a rollback has forgotten some.
        """
        now = self._next_table  # a commit that the rows may be of, although it is not reported yet
        if now is None or now.identity != table.identity:
            raise TableMismatchError("the table was dropped while its rows were read: call describe() and start over")
        if step is None:
            return
        is_rolled_back = now.num_rollbacks != table.num_rollbacks  # it may have forgotten rates of these rows
        if is_rolled_back or not now.rates.hashed.begins_with(table.rates.hashed, min(len(now.rates), step)):
            raise MissingRatesError(len(self.require_table().rates))

    def learning_rates(self, start_step: int) -> Float32Array:
        """Learning rates of `start_step` and later steps below the clock, at most 1 MiB of them: float32 [n]."""
        return self.require_table().rates.hashed.values[start_step : start_step + CHUNK_BYTES // 4]

    # ---- changing, in the committer's thread

    @contextlib.contextmanager
    def batch(self) -> Iterator[ShardChange]:
        """A write transaction; what the shard keeps in memory follows once it is durable."""
        before, lineage = self.state, self._lineage
        try:
            with self.storage.write() as txn:
                mark = f"{self._incarnation}:{before.commit + 1}"
                batch = ShardChange(
                    txn,
                    before,
                    mark,
                    self._table,
                    self.peers,
                    shard=self.shard,
                    ahead=self._ahead,
                    lease=self.lease,
                )
                yield batch
                if batch.peers != self.peers:
                    write_peers(txn, batch.peers)
                if txn.changed or batch.state is not before:
                    state = replace(batch.state, incarnation=self._incarnation, commit=before.commit + 1)
                    if before.incarnation != self._incarnation:
                        lineage = lineage.joined([before.mark])
                        write_lineage(txn, lineage)
                    write_state(txn, state, before)
                    batch.state = state
                for block in batch.to_sweep:
                    batch.delete_unneeded(block)
                self._next_table = batch.table
            self._lineage, self.peers = lineage, batch.peers
            self._table = batch.table  # before the state, whose clock its learning rates reach in every answer
            self.state = batch.state
        finally:
            self._next_table = self._table
        kept = {checkpoint.generation for checkpoint in batch.state.checkpoints}
        if any(checkpoint.generation not in kept for checkpoint in before.checkpoints):
            self.num_releases += 1


def _identity_mismatch(storage: Storage, stored: ShardIdentity, wanted: ShardIdentity) -> str:
    if stored.unfinished:
        return f"{storage.directory} is unfinished: repeat the 'restore' or 'reshard' that was stopped"
    return (
        f"{storage.directory} holds shard {stored.shard} of {stored.num_shards}, "
        f"not shard {wanted.shard} of {wanted.num_shards}: give this shard its own --data-dir"
    )
