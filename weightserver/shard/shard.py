"""The state machine of one shard: what fetch, push and write do to the stored rows. No gRPC, no LMDB.

Reads run in any thread, each on a snapshot of the storage. Every change is an operation on a `WriteTransaction`;
`Committer` runs them one after another. What the shard keeps in memory (the table, the schedule, the
state) is replaced only after the transaction that changed it is durable.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import asdict, dataclass, field, replace

from weightserver.common.stages import StageClock
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import SMALL, Block, BlockCodec, RowBuffer
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.correction import MAX_STEPS, Schedule, apply_push, bring_to
from weightserver.core.errors import (
    DataLossError,
    FencedError,
    InvalidRequestError,
    NoTableError,
    StepError,
    StorageError,
    TableMismatchError,
)
from weightserver.core.exactly_once import WriterState
from weightserver.core.initial import initial_rows
from weightserver.core.lineage import Lineage
from weightserver.core.sharding import BlockRun, Sharding, block_runs
from weightserver.core.spec import TableSpec
from weightserver.core.versions import released_generations, unneeded
from weightserver.protocol.codec import CHUNK_BYTES, table_digest
from weightserver.shard.schedule_change import Part, ScheduleState, read_schedule_state, write_schedule_state
from weightserver.storage.lmdb_storage import NEWEST, DiskUsage, Storage, Transaction
from weightserver.storage.records import (
    FORMAT,
    MAX_CHECKPOINTS,
    ShardIdentity,
    State,
    descends,
    get_record,
    put_record,
    read_earlier_sizes,
    read_format,
    read_identity,
    read_lineage,
    read_peers,
    read_schedule,
    read_spec,
    read_state,
    read_table_identity,
    upgrade,
    write_identity,
    write_lineage,
    write_peers,
    write_spec,
    write_state,
)

READ_BYTES = 4 << 20
"""Blocks in one answer of `read_blocks`."""
MAX_EPOCH_STEP = 1 << 20
"""How far a session may lie beyond the shard's newest: other shards can have opened, and those before a restore, some
that this one never heard of."""
MAX_EARLIER_SIZES = 64
"""Extensions before which a client may have met the table and still go on with it."""
_MOST_STANDARD_DEVIATIONS = 10
"""Beyond which no initial weight lies."""
_MAX_SEEN_BLOCKS = 50_000
"""Blocks looked at for one answer of `read_blocks`: a snapshot of some 100 ms."""


@dataclass(frozen=True)
class Table:
    """A table that exists: what its rows are and how they move."""

    spec: TableSpec
    codec: BlockCodec
    schedule: Schedule
    """One and the same as long as the table exists, however large it becomes."""
    identity: bytes
    """16 random bytes of the call that created it."""
    earlier_sizes: tuple[int, ...] = ()
    """num_rows before each extension."""

    @functools.cached_property
    def digests(self) -> frozenset[int]:
        """By which clients know it: those too that met it before an extension, because its old rows stay."""
        sizes = (*self.earlier_sizes, self.spec.num_rows)
        return frozenset(table_digest(replace(self.spec, num_rows=size), self.identity) for size in sizes)


@dataclass(frozen=True)
class WriteHeader:
    """Who writes, under which session, and which of its writes this is; see the wire contract."""

    epoch: int
    opener: bytes
    writer: bytes
    sequence: int
    settled_before: int
    step: int
    schedule: int = 0
    """Digest of the learning rates that the writer knows; 0 is not checked."""


@dataclass(frozen=True)
class Rows:
    """Rows as a fetch answers them; momentum_buffer and last_step only where they were asked for."""

    weight: Float32Array  # (n, D)
    momentum_buffer: Float32Array | None = None  # (n, D)
    last_step: Int64Array | None = None  # (n,)


@dataclass
class WriteTransaction:
    """One write transaction in the making."""

    txn: Transaction
    state: State
    mark: str
    """The shard's once this is committed."""
    schedule: ScheduleState
    after_commit: list[Callable[[], None]] = field(default_factory=list)
    given_up: Callable[[], bool] = lambda: False
    """Whether nobody waits any more for the operation that runs."""


class Shard:
    """One shard of one table.

    Args:
        verify_reads: whether a fetch looks at the checksums of its blocks; a write always does.
        on_gaps: told how many updates each fetched row has not seen, int64 [n].

    Raises:
        StorageError: the directory belongs to another shard, cluster or format, or is damaged.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        shard: int,
        num_shards: int,
        verify_reads: bool = True,
        on_gaps: Callable[[Int64Array], None] = lambda gaps: None,
    ) -> None:
        self.shard = shard
        self.num_shards = num_shards
        self._storage = storage
        self._verify_reads = verify_reads
        self._on_gaps = on_gaps
        self._state = State()
        self._schedule = ScheduleState()
        self._table: Table | None = None
        self._unswept: deque[tuple[int, int, int]] = deque()
        """(generation, block) to look at next, and the generation to end before."""
        self._peers: list[str] = []
        self._incarnation = os.urandom(8).hex()
        with storage.write() as txn:
            identity = ShardIdentity(shard, num_shards)
            stored = read_identity(txn)
            if stored is None:
                write_identity(txn, identity)
                write_spec(txn, None)
                write_state(txn, State(incarnation=self._incarnation))
                write_lineage(txn, Lineage())
                write_peers(txn, [])
            elif stored != identity:
                raise StorageError(_identity_mismatch(storage, stored, identity))
            elif read_format(txn) != FORMAT:
                upgrade(txn, self._incarnation)
            self._load(txn)

    def _load(self, txn: Transaction) -> None:
        self._state, self._lineage, self._peers = read_state(txn), read_lineage(txn), read_peers(txn)
        self._unswept.append((1, 0, self._state.generation + 1))
        if (spec := read_spec(txn)) is not None:
            self._table = _open_table(spec, read_table_identity(txn), read_earlier_sizes(txn))
            self._table.schedule.extend(0, read_schedule(txn))
            self._schedule = read_schedule_state(txn, self._table.schedule.learning_rates)

    # ---- reading

    @property
    def state(self) -> State:
        return self._state

    @property
    def spec(self) -> TableSpec | None:
        return self._table.spec if self._table else None

    @property
    def schedule(self) -> ScheduleState:
        return self._schedule

    @property
    def table_identity(self) -> bytes:
        return self._table.identity if self._table else b""

    @property
    def peers(self) -> list[str]:
        """The marks of all shards that this one was told last."""
        return self._peers

    @property
    def horizon(self) -> int:
        return self._table.schedule.horizon if self._table else 0

    def disk_bytes(self) -> int:
        return self._storage.disk_bytes()

    def disk_usage(self) -> DiskUsage:
        return self._storage.disk_usage()

    def require_table(self) -> Table:
        """The table, or NoTableError."""
        if self._table is None:
            raise NoTableError("the shard holds no table: call create_table() first")
        return self._table

    def check_table(self, digest: int) -> None:
        """Raises TableMismatchError unless `digest` is this table's, as it is or was before it was extended, or 0."""
        table = self.require_table()
        if digest and digest not in table.digests:
            raise TableMismatchError(f"the table was replaced, it is now {table.spec}: call describe() and begin anew")

    def check_acknowledged(self, mark: str) -> None:
        """Raises DataLossError unless the shard's data descends from the state of that mark."""
        state = self._state
        if not descends(state, self._lineage, mark):
            raise DataLossError(
                f"shard {self.shard} lacks what it had acknowledged: its data is at {state.mark} and does not descend "
                f"from {mark}, so an older copy of its directory, or another directory, is in its place. Nothing was "
                "changed; put the newest directory back, or take all shards to one checkpoint or backup "
                "(docs/operations.md)"
            )

    def check_rows(self, rows: Int64Array) -> None:
        """Raises InvalidRequestError unless `rows` (int64 [n]) increase strictly and all live here."""
        spec = self.require_table().spec
        if len(rows) == 0:
            return
        if rows[0] < 0 or rows[-1] >= spec.num_rows:
            raise InvalidRequestError(f"rows must lie in 0..{spec.num_rows - 1}, got {rows[0]}..{rows[-1]}")
        if (rows[1:] <= rows[:-1]).any():  # a difference could wrap
            raise InvalidRequestError("the rows of one request must increase strictly")
        elsewhere = Sharding(spec.rows_per_block, self.num_shards).shard_of(rows) != self.shard
        if elsewhere.any():
            raise InvalidRequestError(
                f"row {rows[elsewhere.argmax()]} does not live on shard {self.shard} of {self.num_shards}"
            )

    def fetch(
        self,
        rows: Int64Array,
        *,
        step: int | None,
        state: bool,
        checkpoint: str | None = None,
        identity: str = "",
        schedule: int = 0,
        clock: StageClock | None = None,
    ) -> Iterator[Rows]:
        """Rows (checked, int64 [n]) before update `step`, or raw where `step` is None, in chunks of about 1 MiB.

        They are read as they are now, or as they were at a checkpoint.

        Each chunk is a snapshot of its own, so that no snapshot lives while a message waits for its reader; all are
        corrected by the same learning rates, those of digest `schedule` where it is given. `clock` is told when its
        stages "read" and "correct" begin.

        Raises:
            StepError: `step` lies beyond the horizon or before an update that a row has seen, or SGD would make a row
                infinite or NaN before it.
            NoTableError: there is no such checkpoint, or it is released meanwhile.
            OverloadedError, TableMismatchError: learning rates before `step` are about to change, or have changed.
        """
        table, at = self.require_table(), (checkpoint, identity, clock or StageClock("read"))
        schedule = schedule or self._schedule.digest
        if step is not None:
            self._schedule.require_settled(step)
            if not 0 <= step <= table.schedule.horizon:
                raise StepError(
                    f"step {step} is outside the schedule's 0..{table.schedule.horizon}: extend the schedule first"
                )
            self._schedule.require_known(schedule, step)
        rows_per_chunk = max(1, CHUNK_BYTES // (4 * table.spec.dim))
        runs: list[BlockRun] = []
        for run in block_runs(rows, table.spec.rows_per_block):
            runs.append(run)
            if run.part.stop - runs[0].part.start >= rows_per_chunk:
                yield self._fetch_chunk(table, rows, runs, step, state, schedule, *at)
                runs = []
        if runs:
            yield self._fetch_chunk(table, rows, runs, step, state, schedule, *at)

    def _fetch_chunk(
        self,
        table: Table,
        rows: Int64Array,
        runs: list[BlockRun],
        step: int | None,
        state: bool,
        schedule: int,
        checkpoint: str | None,
        identity: str,
        clock: StageClock,
    ) -> Rows:
        clock.start("read")
        first = runs[0].part.start
        rows = rows[first : runs[-1].part.stop]
        found = RowBuffer(table.codec, len(rows))
        absent: list[slice] = []  # never-written rows, neighbours together
        small = _MOST_STANDARD_DEVIATIONS * table.spec.init_std <= SMALL
        with self._storage.read() as txn:
            up_to = NEWEST if checkpoint is None else read_state(txn).checkpoint(checkpoint, identity).generation
            txn.prefetch([run.block for run in runs], up_to=up_to)
            for block, slots, run in runs:
                part = slice(run.start - first, run.stop - first)
                stored = txn.newest_block(block, up_to=up_to)
                if stored is None:
                    start = absent.pop().start if absent and absent[-1].stop == part.start else part.start
                    absent.append(slice(start, part.stop))
                else:
                    if self._verify_reads:
                        table.codec.check(block, stored)
                    small &= table.codec.is_small(stored)
                    found.copy(part, stored, slots)
        if self._table is None or self._table.schedule is not table.schedule:
            raise TableMismatchError("the table was dropped while its rows were read: call describe() and begin anew")
        for part in absent:
            found.weight[part] = initial_rows(table.spec, rows[part])
            found.momentum_buffer[part] = 0
        clock.start("correct")
        self._on_gaps((self._state.clock if step is None else step) - found.last_step)
        if step is not None:
            largest = SMALL if small else math.inf
            self._bring_to(table, step, rows, found, weight_only=not state, largest=largest)
            self._schedule.require_settled(step)  # rows and learning rates were read before
            self._schedule.require_known(schedule, step)
            found.last_step[:] = step
        return Rows(found.weight, found.momentum_buffer, found.last_step) if state else Rows(found.weight)

    def read_blocks(self, first: int, *, checkpoint: str) -> tuple[list[tuple[int, bytes]], int | None]:
        """A checkpoint's stored blocks from number `first` on, ascending, about 4 MiB of them; and where to go on, None
        behind the last block of the table as it was at the checkpoint.

        Raises:
            NoTableError: there is no such checkpoint.
            StorageError: a block is damaged.
        """
        spec, codec = self.require_table().spec, self.require_table().codec
        num_wanted = max(1, READ_BYTES // codec.num_bytes)
        found: list[tuple[int, bytes]] = []
        with self._storage.read() as txn:
            kept = read_state(txn).checkpoint(checkpoint)
            up_to, end = kept.generation, replace(spec, num_rows=kept.num_rows or spec.num_rows).num_blocks
            block = txn.next_block(first)
            if block is not None:
                txn.prefetch(range(block, block + num_wanted * self.num_shards, self.num_shards), up_to=up_to)
            for _ in range(_MAX_SEEN_BLOCKS):  # those too that are newer than the checkpoint
                if block is not None and block >= end:
                    block = None
                if block is None or len(found) == num_wanted:
                    break
                stored = txn.newest_block(block, up_to=up_to)
                if stored is not None:
                    codec.check(block, stored)
                    found.append((block, bytes(stored)))
                block = txn.next_block(block + 1)
        return found, block

    def lineage_of(self, checkpoint: str) -> Lineage:
        """Which states a retained checkpoint descends from; NoTableError where there is none."""
        with self._storage.read() as txn:
            return read_lineage(txn).up_to(read_state(txn).checkpoint(checkpoint).mark)

    def learning_rates(self, start_step: int) -> Float32Array:
        """Those of `start_step` and later steps, at most a MiB of them: float32 [n]."""
        rates = self.require_table().schedule.learning_rates
        return rates[start_step : start_step + CHUNK_BYTES // 4]

    def _bring_to(
        self, table: Table, step: int, rows: Int64Array, found: RowBuffer, *, weight_only: bool, largest: float
    ) -> None:
        """Corrects raw rows for `step`, in place. Raises StepError."""
        last_step, weight, momentum_buffer = found.last_step, found.weight, found.momentum_buffer
        if last_step.max(initial=0) > step:
            first = int((last_step > step).argmax())
            raise StepError(
                f"row {rows[first]} has seen {last_step[first]} updates, its state before update {step} is gone: "
                f"fetch it for step {last_step[first]} or later"
            )
        if table.spec.correction:
            bring_to(
                table.schedule,
                step,
                last_step,
                weight,
                momentum_buffer,
                weight_only=weight_only,
                rows=rows,
                largest=largest,
            )

    # ---- changing; all below run in the committer's thread

    @contextlib.contextmanager
    def batch(self) -> Iterator[WriteTransaction]:
        """A write transaction; the shard's state in memory follows once it is durable."""
        with self._storage.write() as txn:
            before, lineage = self._state, self._lineage
            batch = WriteTransaction(txn, before, f"{self._incarnation}:{before.commit + 1}", self._schedule)
            yield batch
            if batch.schedule is not self._schedule:
                write_schedule_state(txn, batch.schedule)
            if txn.changed or batch.state is not before:
                state = replace(batch.state, incarnation=self._incarnation, commit=before.commit + 1)
                if before.incarnation not in ("", self._incarnation):
                    lineage = lineage.joined([before.mark])
                    write_lineage(txn, lineage)
                write_state(txn, state, before)
                batch.state = state
        self._lineage = lineage
        self._state = batch.state
        for action in batch.after_commit:
            action()
        self._schedule = batch.schedule  # at last: a fetch looks whether its learning rates were settled all the time

    def create_table(
        self, batch: WriteTransaction, spec: TableSpec, identity: bytes = b"", epoch: int | None = None
    ) -> bytes:
        """Creates the table, unless one was dropped since `epoch`; returns its identity, a new one where none is given.

        Where the same one exists, nothing happens, but that one without rows takes on the identity.
        """
        existing, found = read_spec(batch.txn), read_table_identity(batch.txn)
        if existing is not None and existing != spec:
            raise TableMismatchError(f"another table exists, {_difference(existing, spec)}: use its spec")
        if existing is None and epoch not in (None, batch.state.epoch):
            raise FencedError(
                f"a table was dropped since epoch {epoch}: call create_table() again if it is still wanted"
            )
        if existing is not None and identity in (b"", found):
            return found
        state = batch.state
        if existing is not None and (state.rows_stored or state.clock or state.opener or state.checkpoints):
            raise TableMismatchError(
                f"shard {self.shard} holds another table of the same spec, of {_session(state)}: are all addresses of "
                "one cluster?"
            )
        identity = identity or os.urandom(16)
        write_spec(batch.txn, spec, identity)
        table = _open_table(spec, identity)
        table.schedule.extend(0, read_schedule(batch.txn))
        batch.after_commit.append(lambda: self._set_table(table))
        return identity

    def extend_table(self, batch: WriteTransaction, num_rows: int, epoch: int | None = None) -> bool:
        """Gives the table more rows, unless another session than `epoch` is the newest; False where it has as many.

        Nothing is written for them: a row that nobody wrote is a function of the seed and its number.
        """
        spec = read_spec(batch.txn)
        if spec is None:
            raise NoTableError("the shard holds no table: call create_table() first")
        if epoch not in (None, batch.state.epoch):
            self._check_epoch(batch.state, epoch)
        if num_rows < spec.num_rows:
            raise InvalidRequestError(f"the table has {spec.num_rows} rows, and can only become larger, not {num_rows}")
        if num_rows == spec.num_rows:
            return False
        larger = replace(spec, num_rows=num_rows)
        earlier_sizes = (*read_earlier_sizes(batch.txn), spec.num_rows)[-MAX_EARLIER_SIZES:]
        write_spec(batch.txn, larger, read_table_identity(batch.txn), earlier_sizes)

        def grow() -> None:
            self._table = replace(
                self.require_table(), spec=larger, codec=BlockCodec(larger), earlier_sizes=earlier_sizes
            )

        batch.after_commit.append(grow)
        return True

    def drop_table(self, batch: WriteTransaction, epoch: int | None = None) -> None:
        """Deletes the table and fences every session; epochs go on counting.

        Where `epoch` has passed, a request that comes again finds nothing to do, and a newer table stays.
        """
        if epoch not in (None, batch.state.epoch):
            if read_spec(batch.txn) is None:
                return
            raise FencedError(
                f"the table is that of {_session(batch.state)} by now, no longer of epoch {epoch}: nothing was dropped"
            )
        for database in ("blocks", "changes", "schedule", "writers"):
            batch.txn.clear(database)
        write_spec(batch.txn, None)
        write_peers(batch.txn, [])
        batch.state = State(epoch=batch.state.epoch + 1, schedule_version=batch.state.schedule_version + 1)
        batch.schedule = ScheduleState()
        batch.after_commit.append(lambda: self._set_table(None))
        batch.after_commit.append(lambda: self._set_peers([]))

    def _set_table(self, table: Table | None) -> None:
        self._table = table

    def _set_peers(self, marks: list[str]) -> None:
        self._peers = marks

    def _note_peers(self, batch: WriteTransaction, marks: list[str]) -> None:
        """Keeps the marks of all shards that a client has met, unless it tells none."""
        if marks and marks != self._peers:
            write_peers(batch.txn, marks)
            batch.after_commit.append(lambda: self._set_peers(marks))

    def open_session(
        self,
        batch: WriteTransaction,
        name: str,
        epoch: int,
        opener: bytes,
        *,
        keep_writer: bytes = b"",
        peers: list[str] | None = None,
        force: bool = False,
    ) -> None:
        """Starts `epoch` and fences every older one; a repeated attempt of the same opener changes nothing.

        The sequence numbers of `keep_writer`, the caller's writer in an earlier session, stay known. With `force` the
        shard's timeline is one of its own until the next rollback, so that no other session takes the shards for ones
        of a common state before.
        """
        state = batch.state
        if epoch == state.epoch and opener.hex() == state.opener:
            return
        if epoch <= state.epoch:
            raise FencedError(f"epoch {epoch} is not newer than {_session(state)}: open the session again")
        if epoch > state.epoch + MAX_EPOCH_STEP:
            raise InvalidRequestError(
                f"epoch {epoch} is far beyond {_session(state)}: open the one behind the newest of all shards"
            )
        kept = get_record(batch.txn, "writers", keep_writer) if keep_writer else None
        batch.txn.clear("writers")  # fenced writers are refused by their epoch alone
        if kept is not None:
            put_record(batch.txn, "writers", keep_writer, kept)
        self._note_peers(batch, peers or [])
        timeline = os.urandom(16).hex() if force else state.timeline
        batch.state = replace(state, epoch=epoch, opener=opener.hex(), run=name, timeline=timeline)

    def join_session(self, epoch: int, opener: bytes) -> None:
        """Raises FencedError unless `epoch`, opened by `opener`, is the current one."""
        self._check_epoch(self._state, epoch, opener)

    def has_learning_rates(self, part: Part) -> bool:
        """Whether they are those in use, and none of a change that is pending."""
        known, pending = self.require_table().schedule.learning_rates, self._schedule.pending
        if part.start_step > len(known) or (pending is not None and pending.change == part.change):
            return False
        return part.first_change(known) is None

    def prepare_schedule(self, batch: WriteTransaction, part: Part, *, version: int, epoch: int = 0) -> None:
        """Prepares a part of a change.

        Nothing that uses a step whose learning rate changes is done from now on, until the change is committed or given
        up. A part that comes again changes nothing, however late.
        """
        known, before = self.require_table().schedule.learning_rates, batch.schedule
        if epoch:
            self._check_epoch(batch.state, epoch)
        if part.stop_step > MAX_STEPS:
            raise StepError(f"a schedule has at most {MAX_STEPS} steps, not {part.stop_step}: give fewer")
        horizon = max(len(known), before.pending.stop_step if before.pending else 0)
        if part.start_step > horizon:
            raise StepError(f"the schedule ends at {horizon}: step {part.start_step} would leave a gap before it")
        batch.schedule = before.prepared(batch.txn, part, known, reached=batch.state.clock)
        if batch.schedule is not before and version != batch.state.schedule_version:
            raise FencedError(
                "the learning rates were changed by another call: call extend_schedule() again if these are still right"
            )

    def commit_schedule(self, batch: WriteTransaction, change: str, *, digest: int, epoch: int = 0) -> bool:
        """Puts a prepared change to use, which leads to learning rates of `digest`; False where it is done already."""
        schedule, pending = self.require_table().schedule, batch.schedule.pending
        if pending is None or pending.change != change:
            if batch.schedule.digest == digest:
                return False
            raise FencedError(
                "this change of the learning rates was given up by another call: call extend_schedule() again if they "
                "are still right"
            )
        if epoch:
            self._check_epoch(batch.state, epoch)
        if not pending.digest or pending.digest != digest:
            raise InvalidRequestError(
                "a part of this change of the learning rates is missing: prepare all of them first"
            )
        batch.schedule, rates = batch.schedule.committed(batch.txn, schedule.learning_rates)
        batch.state = replace(batch.state, schedule_version=batch.state.schedule_version + 1)
        batch.after_commit.append(lambda: schedule.extend(pending.first_step, rates))
        return True

    def give_up_schedule(self, batch: WriteTransaction, change: str) -> bool:
        """Forgets a prepared change, also before it has come: by the next version its parts are refused. False where
        another one is pending, or that one was given up just before."""
        before = batch.schedule
        if before.given_up == change or (before.pending is not None and before.pending.change != change):
            return False
        batch.schedule = before.without_pending(batch.txn, change)
        batch.state = replace(batch.state, schedule_version=batch.state.schedule_version + 1)
        return True

    def push_gradients(
        self, batch: WriteTransaction, header: WriteHeader, rows: Int64Array, gradients: Float32Array
    ) -> bool:
        """Applies update `header.step` with `gradients` (float32 [n, D]); False for a duplicate."""
        table = self.require_table()
        batch.schedule.require_settled(header.step + 1)
        if not 0 <= header.step < table.schedule.horizon:
            raise StepError(
                f"step {header.step} is outside the schedule's 0..{table.schedule.horizon - 1}: extend it first"
            )

        def update(stored: Block, run: BlockRun) -> None:
            last_step, weight = stored.last_step[run.slots], stored.weight[run.slots]
            momentum = stored.momentum_buffer[run.slots]
            apply_push(
                table.schedule,
                bool(table.spec.correction),
                header.step,
                last_step,
                weight,
                momentum,
                gradients[run.part],
                rows=rows[run.part],
            )
            stored.last_step[run.slots], stored.weight[run.slots] = last_step, weight
            stored.momentum_buffer[run.slots] = momentum

        return self._write(batch, table, header, rows, header.step + 1, update)

    def write_state(
        self,
        batch: WriteTransaction,
        header: WriteHeader,
        rows: Int64Array,
        weight: Float32Array,
        momentum_buffer: Float32Array,
        last_step: Int64Array,
    ) -> bool:
        """Replaces rows with raw state (float32 [n, D], float32 [n, D], int64 [n]); False for a duplicate."""
        table = self.require_table()
        batch.schedule.require_settled(int(last_step.max(initial=0)))
        if len(rows) and not 0 <= last_step.min() <= last_step.max() <= table.schedule.horizon:
            raise StepError(f"last_step must lie in 0..{table.schedule.horizon}: extend the schedule first")

        def update(stored: Block, run: BlockRun) -> None:
            older = last_step[run.part] < stored.last_step[run.slots]
            if older.any():
                row, seen = rows[run.part][older][0], stored.last_step[run.slots][older][0]
                raise StepError(
                    f"row {row} has seen {seen} updates, the state to write only {last_step[run.part][older][0]}: "
                    "an older state never replaces a newer one"
                )
            stored.last_step[run.slots] = last_step[run.part]
            stored.weight[run.slots] = weight[run.part]
            stored.momentum_buffer[run.slots] = momentum_buffer[run.part]

        return self._write(batch, table, header, rows, int(last_step.max(initial=0)), update)

    def checkpoint(
        self,
        batch: WriteTransaction,
        header: WriteHeader,
        name: str,
        identity: str = "",
        peers: list[str] | None = None,
    ) -> bool:
        """Keeps the rows as they are before update `header.step` under `name`; False for a duplicate.

        The same again only changes the identity, which ties the shards' checkpoints together; shard 0 keeps its own.
        """
        table = self.require_table()
        batch.schedule.require_settled(header.step)
        if not self._admit(batch, header):
            return False
        if header.step > table.schedule.horizon:
            raise StepError(
                f"a checkpoint of step {header.step} lies beyond the schedule's 0..{table.schedule.horizon}"
            )
        batch.schedule.require_known(header.schedule, header.step)
        self._note_peers(batch, peers or [])
        # Learning rates before the checkpoint's step are as good as used: its rows are read for it.
        state = replace(batch.state, clock=max(batch.state.clock, header.step))
        taken = Checkpoint(
            name,
            header.step,
            state.generation,
            state.clock,
            state.rows_stored,
            identity,
            batch.mark,
            table.spec.num_rows,
        )
        for known in state.checkpoints:
            if known.name == name:
                if known.step != header.step:
                    raise InvalidRequestError(
                        f"checkpoint {name!r} was taken at step {known.step}: choose another name"
                    )
                if batch.txn.is_changed(known.generation + 1):
                    raise InvalidRequestError(
                        f"rows were written since checkpoint {name!r} was taken: choose another name"
                    )
                if self.shard == 0:
                    identity = known.identity or identity
                again = replace(known, identity=identity, mark=batch.mark)
                checkpoints = tuple(again if other is known else other for other in state.checkpoints)
                batch.state = replace(state, checkpoints=checkpoints)
                return True
        _require_room_for_checkpoint(state)
        batch.state = replace(state, generation=state.generation + 1, checkpoints=(*state.checkpoints, taken))
        return True

    def rollback(
        self,
        batch: WriteTransaction,
        header: WriteHeader,
        name: str,
        identity: str = "",
        peers: list[str] | None = None,
        timeline: str = "",
    ) -> bool:
        """Takes the rows and the clock back to a checkpoint and forgets later ones; False for a duplicate.

        Costs what was written since. Epochs, writers and the schedule stay.
        """
        self.require_table()
        if not self._admit(batch, header):
            return False
        state, kept = batch.state, batch.state.checkpoint(name, identity)
        self._note_peers(batch, peers or [])
        batch.txn.delete_generations(kept.generation + 1)
        batch.state = replace(
            state,
            clock=kept.clock,
            rows_stored=kept.rows_stored,
            generation=kept.generation + 1,
            timeline=timeline,
            checkpoints=tuple(known for known in state.checkpoints if known.generation <= kept.generation),
        )
        return True

    def release(self, batch: WriteTransaction, header: WriteHeader, name: str, identity: str = "") -> bool:
        """Forgets a checkpoint, if there is one; False for a duplicate.

        What only it needed is deleted when its blocks are written again, or by `sweep`.
        """
        self.require_table()
        if not self._admit(batch, header):
            return False
        state = batch.state
        remaining = tuple(known for known in state.checkpoints if known.name != name)
        if len(remaining) < len(state.checkpoints):
            released = state.checkpoint(name)
            generations = released_generations(released.generation, state.generation, remaining)
            unswept = (generations.start, 0, generations.stop)
            batch.after_commit.append(lambda: self._unswept.append(unswept))
        batch.state = replace(state, checkpoints=remaining)
        return True

    @property
    def is_swept(self) -> bool:
        """Whether `sweep` would find nothing to delete."""
        return not self._unswept

    def sweep(self, submit: Callable[[Callable[[WriteTransaction], None]], Future[None]], seconds: float) -> None:
        """Looks for versions that nothing needs for about `seconds`, and has them deleted; continues where it ended.

        It looks only at blocks that were written in the generations after a released checkpoint; after a start, at all
        that have more than one version. Unlike the other changes, it runs outside of the committer's thread.

        Args:
            submit: has the committer run an operation.
        """
        until = time.perf_counter() + seconds
        (generation, block, end), found = self._unswept[0], list[int]()
        with self._storage.read() as txn:
            while (change := txn.next_change(generation, block)) is not None and change[0] < end:
                generation, block = change
                if unneeded(txn.generations(block), self._state.checkpoints):
                    found.append(block)
                block += 1
                if time.perf_counter() >= until:
                    break

        def delete(batch: WriteTransaction) -> None:
            for block in found:
                _delete_unneeded(batch, block)

        if found:
            submit(delete).result()
        if change is None or change[0] >= end:
            self._unswept.popleft()
        else:
            self._unswept[0] = generation, block, end  # releases only append

    def copy_checkpoint(
        self, batch: WriteTransaction, header: WriteHeader, name: str, source: str, identity: str = ""
    ) -> bool:
        """Keeps the checkpoint `source` under `name` too, with its identity; False for a duplicate."""
        self.require_table()
        if not self._admit(batch, header):
            return False
        state, kept = batch.state, batch.state.checkpoint(source, identity)
        copied = replace(kept, name=name)
        for known in state.checkpoints:
            if known.name == name:
                if known == copied:
                    return True
                raise InvalidRequestError(f"checkpoint {name!r} is another one than {source!r}: choose another name")
        _require_room_for_checkpoint(state)
        position = state.checkpoints.index(kept) + 1
        checkpoints = (*state.checkpoints[:position], copied, *state.checkpoints[position:])
        batch.state = replace(state, checkpoints=checkpoints)
        return True

    def _write(
        self,
        batch: WriteTransaction,
        table: Table,
        header: WriteHeader,
        rows: Int64Array,
        clock: int,
        update: Callable[[Block, BlockRun], None],
    ) -> bool:
        """Runs `update` on each block that `rows` touch, once; False where the write is a duplicate.

        The clock is `clock` then: the write uses the learning rates of so many steps.
        """
        if not self._admit(batch, header):
            return False
        batch.schedule.require_known(header.schedule, clock)
        rows_stored = 0
        for run in _prefetched(block_runs(rows, table.spec.rows_per_block), batch.txn):
            if batch.given_up():  # the transaction is taken back, and the write's number with it: it may come again
                raise CancelledError
            stored = batch.txn.newest_block(run.block)
            if stored is None:
                buffer = table.codec.initial(run.block)
            else:
                table.codec.check(run.block, stored)  # sealing it anew would hide the damage
                buffer = bytearray(stored)
            block = table.codec.views(buffer)
            update(block, run)
            rows_stored += table.codec.mark_written(buffer, rows[run.part] - run.block * table.spec.rows_per_block)
            table.codec.seal(run.block, buffer)
            batch.txn.put_block(run.block, batch.state.generation, buffer)
            if batch.state.generation:
                _delete_unneeded(batch, run.block)
        state = batch.state
        batch.state = replace(state, clock=max(state.clock, clock), rows_stored=state.rows_stored + rows_stored)
        return True

    def _admit(self, batch: WriteTransaction, header: WriteHeader) -> bool:
        """Fences old sessions and recognises duplicates."""
        self._check_epoch(batch.state, header.epoch, header.opener)
        stored = get_record(batch.txn, "writers", header.writer)
        writer = WriterState.unpack(stored)
        admitted = writer.admit(header.sequence, header.settled_before)
        if writer.pack() != stored:  # a duplicate too may tell what its writer gave up
            put_record(batch.txn, "writers", header.writer, writer.pack())
        return admitted

    def _check_epoch(self, state: State, epoch: int, opener: bytes | None = None) -> None:
        if epoch < state.epoch:
            raise FencedError(f"session {epoch} was superseded by {_session(state)}: this writer must stop")
        if epoch > state.epoch or not state.opener:  # what was restored must not go on with the writers of before
            raise FencedError(f"session {epoch} is not known, the newest is {_session(state)}: open a session first")
        if opener is not None and opener.hex() != state.opener:
            raise FencedError(
                f"session {epoch} of this shard is another one, {_session(state)}: are all addresses of one cluster? "
                "Open a session first"
            )


def _require_room_for_checkpoint(state: State) -> None:
    if len(state.checkpoints) >= MAX_CHECKPOINTS:
        oldest = ", ".join(repr(known.name[:60]) for known in state.checkpoints[:5])
        raise InvalidRequestError(
            f"the shard retains {len(state.checkpoints)} checkpoints, the most there may be: release some, the oldest "
            f"are {oldest}"
        )


def _prefetched(runs: Iterator[BlockRun], txn: Transaction) -> Iterator[BlockRun]:
    """The same runs; their blocks are read from disk a thousand at a time."""
    while some := list(itertools.islice(runs, 1000)):
        txn.prefetch([run.block for run in some])
        yield from some


def _delete_unneeded(batch: WriteTransaction, block: int) -> None:
    for generation in unneeded(batch.txn.generations(block), batch.state.checkpoints):
        batch.txn.delete_block(block, generation)


def _open_table(spec: TableSpec, identity: bytes, earlier_sizes: tuple[int, ...] = ()) -> Table:
    return Table(spec, BlockCodec(spec), Schedule.of_table(spec), identity, earlier_sizes)


def _session(state: State) -> str:
    return f"epoch {state.epoch} (run {state.run!r})"


def _difference(existing: TableSpec, wanted: TableSpec) -> str:
    old, new = asdict(existing), asdict(wanted)
    return ", ".join(f"{name} {old[name]} there and {new[name]} here" for name in old if old[name] != new[name])


def _identity_mismatch(storage: Storage, stored: ShardIdentity, wanted: ShardIdentity) -> str:
    if stored.unfinished:
        return f"{storage.directory} is unfinished: repeat the 'restore' or 'reshard' that was stopped"
    return (
        f"{storage.directory} holds shard {stored.shard} of {stored.num_shards}, "
        f"not shard {wanted.shard} of {wanted.num_shards}: give this shard its own --data-dir"
    )
