"""The client of a sharded weight server: fan-out, sessions, and the checks that need no server.

The contract of its calls, for a table of N rows of D values:

- Rows may be given in any order and repeated: fetch answers in order, a push adds repeats up, write_state refuses them.
- A push or state write returns when it is durable on every shard. It is atomic on each shard, not across shards. When
  it fails on one, the error says which, and making the same call again is safe: a shard that had applied it recognises
  the sequence number. Where that cannot be told any more, the call is refused.
- Calls may come from any thread. Every attempt has a deadline of `timeout_seconds`; a shard that is away, overloaded or
  silent is tried again with the same sequence number for `retry_seconds` in all. Nothing else is tried again. Rows that
  an attempt of a fetch brought are kept, and both times begin anew for the others: a fetch may take any time.
- What cannot be right raises ValueError or TypeError before anything is sent; what a shard refuses, or fails to do,
  raises a subclass of WeightServerError.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import Message

from weightserver.client.connection import ShardConnection, ShardFetch
from weightserver.client.fetched_rows import FetchedRows, Output
from weightserver.client.schedule_caller import KnownSchedule, ScheduleCaller, common_schedule
from weightserver.client.session import Numbers, Session, Write
from weightserver.client.workers import Workers
from weightserver.common.addresses import is_loopback
from weightserver.common.security import MAX_TOKEN_CHARACTERS
from weightserver.common.version import __version__
from weightserver.core.arrays import Float32Array, Int64Array, all_finite
from weightserver.core.errors import (
    ClusterError,
    DataLossError,
    FencedError,
    NoTableError,
    StepError,
    TableMismatchError,
    WeightServerError,
)
from weightserver.core.sharding import Sharding
from weightserver.core.spec import MAX_ROWS, TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    CHUNK_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_WRITE_BYTES,
    MAX_WRITE_ROWS,
    ScheduleHash,
    float32_from_bytes,
    is_understood,
    rows_to_proto,
    spec_from_proto,
    spec_to_proto,
    table_digest,
    to_bytes,
)

_MAX_SECONDS = 86_400
_MAX_READS = 10
"""How often a schedule is read that is changed meanwhile."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class RowState:
    """Rows with all their state."""

    weight: Float32Array  # (n, D)
    momentum_buffer: Float32Array  # (n, D)
    last_step: Int64Array  # (n,), the updates that each row as given here has seen


@dataclass(frozen=True)
class Checkpoint:
    """A state of all rows that can be read and returned to."""

    name: str
    step: int
    """Finished updates that it holds."""
    identity: bytes = field(default=b"", compare=False, repr=False)
    """Of the call that took it: tells it from another of the same name."""
    marks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Of each shard that retains it, once it was taken: what `WeightClient.expect` takes."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard's part of a table."""

    shard: int
    address: str
    epoch: int
    clock: int
    horizon: int
    rows_stored: int
    disk_bytes: int
    version: str
    checkpoints: tuple[Checkpoint, ...]
    """All that this shard retains, other shards or not; oldest first."""


@dataclass(frozen=True)
class TableInfo:
    """A table over all its shards."""

    spec: TableSpec
    identity: bytes
    """16 random bytes, drawn when the table was created."""
    epoch: int
    """Newest session."""
    run: str
    """Name of the newest session."""
    clock: int
    """Highest number of finished updates that an acknowledged write carried."""
    horizon: int
    """Learning rates known on every shard."""
    rows_stored: int
    """Rows ever written."""
    disk_bytes: int
    shards: tuple[ShardInfo, ...]

    @property
    def checkpoint_names(self) -> set[str]:
        """Of all that any shard retains."""
        return {kept.name for shard in self.shards for kept in shard.checkpoints}


class WeightClient:
    """A table's rows over all shards of a weight server. Thread-safe; a context manager; connects lazily.

    Args:
        addresses: host:port of every shard, in any order; each shard says who it is.
        credentials: gRPC channel credentials (TLS); without them only loopback addresses are taken.
        token: bearer token sent with every call; it leaves this machine over TLS only, or with `insecure`.
        timeout_seconds: deadline of one attempt; of a fetch, for some of its rows to arrive.
        retry_seconds: how long a shard that is away is tried again.
        insecure: take addresses other than loopback without credentials.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        timeout_seconds: float = 30,
        retry_seconds: float = 300,
        insecure: bool = False,
    ) -> None:
        if isinstance(addresses, str) or not len(addresses) or not all(isinstance(text, str) for text in addresses):
            raise ValueError(f"addresses must be a list of host:port, one for each shard, got {addresses!r}")
        if not 0 < timeout_seconds <= _MAX_SECONDS or not 0 <= retry_seconds < math.inf:
            raise ValueError(
                f"timeout_seconds must be positive and at most {_MAX_SECONDS}, retry_seconds not negative: "
                f"got {timeout_seconds}, {retry_seconds}"
            )
        if token is not None and not (token.isascii() and token.isprintable() and len(token) <= MAX_TOKEN_CHARACTERS):
            raise ValueError(f"token must be printable ASCII of at most {MAX_TOKEN_CHARACTERS} characters")
        for address in addresses:
            if not is_loopback(address) and credentials is None and not insecure:
                raise ValueError(
                    f"{address} is not on this machine: give credentials, or insecure=True on a network you trust"
                )
        self._addresses = list(addresses)
        self._options: dict[str, Any] = {
            "credentials": credentials,
            "token": token,
            "timeout_seconds": timeout_seconds,
            "retry_seconds": retry_seconds,
        }
        self._lock = threading.Lock()
        self._connections: list[ShardConnection] | None = None
        self._workers = Workers()
        weakref.finalize(self, self._workers.end)
        self._known: _Table | None = None
        self._schedule: KnownSchedule | None = None
        self._lost: DataLossError | None = None
        self._session: Session | None = None
        self._closed = False

    # ---- the table

    def create_table(self, spec: TableSpec) -> TableSpec:
        """Creates the table on every shard; nothing happens where the same one exists.

        Raises:
            TableMismatchError: another table exists; nothing was created.
        """
        if not isinstance(spec, TableSpec):
            raise TypeError(f"spec must be a TableSpec, got {type(spec).__name__}")
        answers = self._describe_shards()
        for answer in answers:
            if answer.HasField("spec") and (existing := spec_from_proto(answer.spec)) != spec:
                if existing.num_rows < spec.num_rows and existing.is_another_size_of(spec):
                    raise TableMismatchError(
                        f"the table of shard {answer.shard} has {existing.num_rows} rows, not {spec.num_rows}: "
                        f"extend_table({spec.num_rows}) makes it larger"
                    )
                raise TableMismatchError(
                    f"shard {answer.shard} holds another table, {existing}: use its spec, or other shards"
                )
        used = [str(answer.shard) for answer in answers if answer.clock or answer.rows_stored]
        lacking = [str(answer.shard) for answer in answers if not answer.HasField("spec")]
        if used and lacking:
            raise TableMismatchError(
                f"shard {', '.join(used)} holds rows of a table that shard {', '.join(lacking)} lacks: is a disk not "
                "mounted, an address wrong, or a drop_table() half done? Serve the right directories, or restore all "
                "shards from one backup"
            )
        # Shard 0 alone draws the table's identity, so that of two callers at a time both create the same table.
        # An older shard knows no single learning rate: it refuses the call, where it would overlook a field.
        method = "CreateSingleRateTable" if spec.correction == "paper" else "CreateTable"

        def create(connection: ShardConnection, answer: pb.DescribeResponse, identity: bytes) -> bytes:
            request = pb.CreateTableRequest(spec=spec_to_proto(spec), epoch=answer.epoch, identity=identity)
            created: bytes = connection.call(method, request).identity
            return created

        first, *others = zip(self._connect(), answers, strict=True)
        identity = create(*first, b"")
        if others:
            self._in_parallel(create, ((*other, identity) for other in others))
        self._known = _Table(spec, identity)
        return spec

    def extend_table(self, num_rows: int) -> TableSpec:
        """Makes the table larger, `num_rows` rows in all; nothing happens where it has as many.

        New rows begin as if they had been there from the start, old ones stay as they are, and clients that know the
        smaller table go on with those. A rollback leaves the table as large as it is. When it fails on one of several
        shards, it has to be repeated: until then describe() refuses.

        Raises:
            ValueError: fewer rows than the table has.
            FencedError: a superseded session, or without one: another client opened one, or dropped the table, at the
                same time.
        """
        num_rows = _integer(num_rows, "num_rows")
        if not 1 <= num_rows <= MAX_ROWS:
            raise ValueError(f"num_rows must lie in 1..{MAX_ROWS}, got {num_rows}")
        answers = self._describe_shards()
        identity = self._one_identity(answers)
        specs = [_spec_of(answer) for answer in answers]
        largest = max(specs, key=lambda spec: spec.num_rows)
        if other := next((spec for spec in specs if spec != largest and not spec.is_another_size_of(largest)), None):
            raise ClusterError(
                f"the shards hold different tables, {largest} and {other}: give the addresses of one cluster"
            )
        if num_rows < largest.num_rows:
            raise ValueError(
                f"the table has {largest.num_rows} rows and can only become larger, not {num_rows}: give at least "
                "as many"
            )
        extended = replace(largest, num_rows=num_rows)

        def extend(connection: ShardConnection, answer: pb.DescribeResponse, spec: TableSpec) -> None:
            if spec == extended:
                return
            epoch = self._session.epoch if self._session else answer.epoch
            connection.call(
                "ExtendTable", pb.ExtendTableRequest(num_rows=num_rows, epoch=epoch, table=table_digest(spec, identity))
            )

        self._in_parallel(extend, zip(self._connect(), answers, specs, strict=True))
        self._known = _Table(extended, identity)
        return extended

    def drop_table(self) -> None:
        """Deletes the table, its rows and its schedule on every shard, and fences every session. It may be repeated,
        where it ended halfway.

        Raises:
            ClusterError: the shards hold tables of several clusters; nothing was deleted.
        """
        answers = self._describe_shards()
        if len({answer.table_identity for answer in answers if answer.HasField("spec")}) > 1:
            raise ClusterError("the shards hold tables of several clusters: give the addresses of one cluster")
        self._in_parallel(
            lambda connection, answer: connection.call("DropTable", pb.DropTableRequest(epoch=answer.epoch)),
            zip(self._connect(), answers, strict=True),
        )
        self._known = self._schedule = self._session = None

    def describe(self) -> TableInfo:
        """What the table is and how far it came. What is read and written from now on goes by the learning rates that
        the shards have now.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards do not hold one table, or have different learning rates for a step.
        """
        answers = self._describe_shards()
        self._known, self._schedule = self._described_table(answers), self._common_schedule(answers)
        newest = max(answers, key=lambda answer: answer.epoch)
        return TableInfo(
            spec=self._known.spec,
            identity=self._known.identity,
            epoch=newest.epoch,
            run=newest.run,
            clock=max(answer.clock for answer in answers),
            horizon=min(answer.horizon for answer in answers),
            rows_stored=sum(answer.rows_stored for answer in answers),
            disk_bytes=sum(answer.disk_bytes for answer in answers),
            shards=tuple(
                ShardInfo(
                    shard=answer.shard,
                    address=connection.address,
                    epoch=answer.epoch,
                    clock=answer.clock,
                    horizon=answer.horizon,
                    rows_stored=answer.rows_stored,
                    disk_bytes=answer.disk_bytes,
                    version=answer.server_version,
                    checkpoints=_checkpoints(answer),
                )
                for answer, connection in zip(answers, self._connect(), strict=True)
            ),
        )

    def table_identity(self) -> bytes:
        """16 random bytes, drawn when the table was created; as describe() tells, also where an extension is half done.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards hold tables of several clusters.
        """
        return self._one_identity(self._describe_shards())

    def learning_rates(self, *, shard: int = 0) -> Float32Array:
        """Those that rows are moved by, float32 [horizon of the shard]; all shards hold the same."""
        for _ in range(_MAX_READS):
            parts = [np.zeros(0, np.float32)]
            while True:
                request = pb.ReadScheduleRequest(start_step=sum(map(len, parts)))
                answer = self.call_shard(shard, "ReadSchedule", request)
                parts.append(float32_from_bytes(answer.learning_rates, "learning_rates"))
                if not len(parts[-1]):
                    break
            rates = np.concatenate(parts)
            if ScheduleHash(rates).digest == answer.schedule:
                return rates
        raise ClusterError(f"the learning rates of shard {shard} change while they are read: call again")

    def extend_schedule(self, start_step: int, learning_rates: npt.ArrayLike) -> None:
        """Appends learning rates (float32 [n]) from `start_step` on, or rewrites those that no write has reached, on
        all shards or on none. Giving known steps the values they have is always allowed.

        Where it is stopped in between, the next call, of any client, first finishes its change or gives it up; until
        then nothing reads or writes by the learning rates that it touches, and waits. Clients that know those of before
        go on with what stayed of them, and are refused where a step was changed, until they call describe().

        Raises:
            StepError: a gap would remain before `start_step`.
            TableMismatchError: a step that was used would change.
            FencedError: a superseded session, or another client changed the schedule at the same time.
            ClusterError: the shards have different learning rates for steps that are not given.
        """
        start_step = _step(start_step, "start_step")
        rates = np.asarray(learning_rates)
        if rates.size and rates.dtype.kind not in "fiu":
            raise TypeError(f"learning_rates must be real numbers, got dtype {rates.dtype}")
        if rates.ndim != 1:
            raise ValueError(f"learning_rates must have shape [n], got {list(rates.shape)}")
        rates = rates.astype(np.float32)
        if not all_finite(rates) or (rates < 0).any():
            raise ValueError("learning_rates must be finite and not negative")
        answers, table = self._describe_shards(), self._table().digest
        caller = ScheduleCaller(
            self._connect(), self._in_parallel, epoch=self._session.epoch if self._session else 0, table=table
        )
        self._schedule = None  # not known before it has succeeded
        if caller.settle(answers):
            answers = self._describe_shards()
        self._schedule = caller.change(answers, start_step, rates)

    def open_session(self, name: str, *, join: int | None = None, force: bool = False) -> int:
        """Starts a new epoch under the run's `name`, which fences every older one; or joins epoch `join` as one more
        writer. Returns the epoch. Needed before a write.

        With `force` also where the shards have no common state: for who rolls all of them back next.

        Raises:
            FencedError: the epoch to join was superseded, or another client opened a session at the same time.
            DataLossError: a shard lacks what the others know it to have acknowledged.
            ClusterError: the shards' rows are not of one time, as where one was restored beside the others.
        """
        name = _name(name)
        answers = self._describe_shards()
        if join is not None:
            return self._join(answers, _step(join, "join"))
        return self._open(answers, name, force=force)

    def join_newest_session(self) -> int:
        """Adds a writer to the newest session, which fences nobody: for what is done beside a run. Where its epoch is
        nobody's, as behind a restore or a reshard, a new session of the same run's name is opened. Returns the epoch.

        Raises:
            FencedError: the shards' epochs are not the same, or another client opened a session at the same time.
        """
        answers = self._describe_shards()
        newest = max(answers, key=lambda answer: answer.epoch)
        if behind := [answer for answer in answers if answer.epoch != newest.epoch]:
            raise FencedError(
                f"shard {behind[0].shard} is at session {behind[0].epoch}, shard {newest.shard} at {newest.epoch}, as "
                "where one was restored beside the others: take all to one checkpoint first, with 'weightserver "
                "rollback', or let the run go on with --resume"
            )
        try:
            return self._join(answers, newest.epoch)
        except FencedError:  # a session that was opened meanwhile refuses this one too, shard 0 first
            return self._open(answers, newest.run)

    def _open(self, answers: list[pb.DescribeResponse], name: str, *, force: bool = False) -> int:
        """Opens a session behind the newest of `answers`."""
        self._one_identity(answers)
        if not force:
            self._require_common_state(answers)
        epoch, opener = 1 + max(answer.epoch for answer in answers), os.urandom(16)
        session = self._session
        if session is not None and any(answer.opener not in session.openers for answer in answers):
            session = None  # another client's session came between, and the shards have forgotten this writer's numbers
        if session is not None:
            session.openers.add(opener)
        request = pb.OpenSessionRequest(
            name=name,
            epoch=epoch,
            opener=opener,
            keep_writer=session.writer if session else b"",
            peers=[] if force else self.marks(),
            force=force,
        )
        connections = self._connect()
        for connection in connections:  # one by one: of two that race, shard 0 takes one
            connection.call("OpenSession", request)
        if session is None:
            self._session = Session(epoch, opener, len(connections), before=self._session)
        else:
            session.renew(epoch, opener)
        self._lost = None  # each shard holds what this client knows it to have acknowledged
        return epoch

    def _join(self, answers: list[pb.DescribeResponse], epoch: int) -> int:
        """Adds a writer to session `epoch`, that of shard 0."""
        self._one_identity(answers)
        opener = answers[0].opener
        if not opener:
            raise FencedError(f"session {epoch} was opened by nobody, as behind a restore: open a new one")
        request = pb.OpenSessionRequest(epoch=epoch, join=True, opener=opener)
        connections = self._connect()
        for connection in connections:
            connection.call("OpenSession", request)
        if self._session is None or (self._session.epoch, self._session.opener) != (epoch, opener):
            self._session = Session(epoch, opener, len(connections), before=self._session)
        return epoch

    def require_common_state(self) -> None:
        """Holds the shards' rows to be of one time, as open_session does: for who reads them all, without a session.

        Raises:
            DataLossError, ClusterError: as open_session.
        """
        self._require_common_state(self._describe_shards())

    def _require_common_state(self, answers: list[pb.DescribeResponse]) -> None:
        """Raises DataLossError or ClusterError where the shards' rows are known not to be of one time."""
        remedy = (
            "serve its newest directory, or take all shards to one checkpoint ('weightserver rollback'), or restore "
            "all of them from one backup"
        )
        for answer in answers:
            for connection, mark in zip(self._connect(), answer.peers, strict=False):
                try:
                    connection.require(mark)
                except DataLossError:
                    raise DataLossError(
                        f"{connection.name} lacks what shard {answer.shard} knows it to have acknowledged: {remedy}"
                    ) from None
        self._require_one_timeline(answers)

    def _require_one_timeline(self, answers: list[pb.DescribeResponse]) -> None:
        """Raises ClusterError where a rollback, or what was to be one, ended halfway."""
        if other := next((answer for answer in answers if answer.timeline != answers[0].timeline), None):
            raise ClusterError(
                f"shard {other.shard} was not rolled back or restored together with shard 0, and its rows are of "
                "another time: take all shards to one checkpoint ('weightserver rollback'), or restore all of them "
                "from one backup"
            )

    def marks(self) -> list[str]:
        """The newest mark of each shard that this client has seen: what `expect` takes. They name all that was
        acknowledged to it."""
        return [connection.acknowledged for connection in self._connect()]

    def expect(self, marks: Sequence[str]) -> None:
        """Holds every shard to have the state of its mark, as a client told them before.

        Raises:
            DataLossError: a shard's data does not descend from it.
        """
        if len(marks) != len(self._connect()):
            raise ValueError(f"{len(marks)} marks were given, one for each of {len(self._connect())} shards is needed")
        self._in_parallel(ShardConnection.require, zip(self._connect(), marks, strict=True))

    # ---- rows

    def fetch(
        self, rows: npt.ArrayLike, *, step: int, out: Float32Array | None = None, checkpoint: str | Checkpoint = ""
    ) -> Float32Array:
        """Weights of `rows` (int64 [n]) before update `step`: float32 [n, D], into `out` where given. Never writes.

        The rows of one shard come in messages of about 1 MiB, and those of a message are of one moment. With
        `checkpoint` the rows are those of a retained checkpoint: of that name, or one of `checkpoints()` and no
        other of its name.

        Raises:
            StepError: `step` lies beyond the horizon, or before an update that a row has seen, or SGD makes a row
                infinite or NaN before it.
            NoTableError: there is no such checkpoint.
        """
        rows = self._rows(rows)
        shape = (len(rows), self._table().spec.dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out must be a contiguous float32 array of shape {list(shape)}")
        step = _step(step, "step")
        request = pb.FetchRequest(step=step, schedule=self._known_schedule(step), **self._checkpoint_fields(checkpoint))
        self._fetch(rows, request, (out, None, None))
        return out

    def fetch_state(
        self, rows: npt.ArrayLike, *, step: int | None = None, checkpoint: str | Checkpoint = ""
    ) -> RowState:
        """All state of `rows` (int64 [n]): before update `step`, or raw as stored where it is None. Never writes.

        Raises:
            StepError, NoTableError: as for `fetch`.
        """
        rows, dim = self._rows(rows), self._table().spec.dim
        state = RowState(
            np.empty((len(rows), dim), np.float32),
            np.empty((len(rows), dim), np.float32),
            np.empty(len(rows), np.int64),
        )
        if step is None:
            request = pb.FetchRequest(raw=True, state=True, **self._checkpoint_fields(checkpoint))
        else:
            step = _step(step, "step")
            schedule = self._known_schedule(step)
            request = pb.FetchRequest(step=step, state=True, schedule=schedule, **self._checkpoint_fields(checkpoint))
        self._fetch(rows, request, (state.weight, state.momentum_buffer, state.last_step))
        return state

    def push_gradients(self, rows: npt.ArrayLike, gradients: npt.ArrayLike, *, step: int) -> None:
        """Applies update `step` with `gradients` (float32 [n, D]) to `rows` (int64 [n]); returns when durable.

        Pushes for one step add up, whoever sends them, and may arrive in any order, because an update is linear in its
        gradient (docs/design.md, section 2). With correction=False or "paper" they must arrive before a row's next
        update.

        Raises:
            FencedError: no session, or a superseded one.
            StepError: no learning rate is known for `step`, or SGD makes a row infinite or NaN; nothing was written.
        """
        rows, step = self._rows(rows), _step(step, "step")
        gradients = self._values(gradients, rows, "gradients")
        if not _increasing(rows):
            rows, gradients = _add_repeats(rows, gradients)
            if not all_finite(gradients):
                raise ValueError("the gradients of a repeated row add up beyond float32: nothing was sent")
        self._write(
            "PushGradients",
            step,
            step + 1,
            rows,
            {"gradients": gradients},
            lambda header, names, values: pb.PushGradientsRequest(header=header, rows=names, **values),
        )

    def write_state(
        self,
        rows: npt.ArrayLike,
        weight: npt.ArrayLike,
        momentum_buffer: npt.ArrayLike,
        last_step: int | npt.ArrayLike,
    ) -> None:
        """Replaces the raw state of distinct `rows` (int64 [n]): weight and momentum_buffer float32 [n, D], last_step
        an integer or int64 [n]; returns when durable.

        Raises:
            FencedError: no session, or a superseded one.
            StepError: a last_step beyond the horizon, or below what the row has seen.
        """
        rows = self._rows(rows)
        weight = self._values(weight, rows, "weight")
        momentum_buffer = self._values(momentum_buffer, rows, "momentum_buffer")
        steps = _int64(last_step, "last_step")
        if steps.ndim and steps.shape != rows.shape:
            raise ValueError(f"last_step must be an integer or have shape [{len(rows)}], got {list(steps.shape)}")
        steps = np.ascontiguousarray(np.broadcast_to(steps, rows.shape))
        if (steps < 0).any():
            raise ValueError(f"last_step must not be negative, got {steps.min()}")
        if not _increasing(rows):
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            if (repeats := np.flatnonzero(np.diff(rows) == 0)).size:
                raise ValueError(f"row {rows[repeats[0]]} is given twice: write_state takes each row once")
            weight, momentum_buffer, steps = weight[order], momentum_buffer[order], steps[order]
        last = int(steps.max(initial=0))
        self._write(
            "WriteState",
            last,
            last,
            rows,
            {"weight": weight, "momentum_buffer": momentum_buffer, "last_step": steps},
            lambda header, names, values: pb.WriteStateRequest(header=header, rows=names, **values),
        )

    # ---- checkpoints

    def checkpoint(self, name: str, *, step: int) -> None:
        """Keeps all rows as they are now, after `step` finished updates, under `name`, until it is released.

        Takes no copy: what is written later costs the disk space of a second version of its blocks. Every write that
        is to be part of it must have returned.

        Raises:
            FencedError: no session, or a superseded one.
            InvalidRequestError: the name was used for another step, or rows were written since it was used.
        """
        step = _step(step, "step")
        request = partial(pb.CheckpointRequest, name=_name(name), peers=self.marks())
        session, schedule = self._require_session(), self._known_schedule(step)

        def send(numbers: Numbers) -> None:
            self._require_one_timeline(self._describe_shards())

            def take(shards: Iterable[int], identity: bytes) -> list[Any]:
                one = partial(request, identity=identity)
                outcomes = self._changed(session, numbers, "Checkpoint", one, step, schedule, shards=shards)
                _raise_first(outcomes)
                return outcomes

            shard_0, *others = range(len(self._connect()))
            (first,) = take([shard_0], os.urandom(16))  # of calls that take the same one, all use what it has
            if others:
                take(others, first.identity)

        session.change(send)

    def checkpoints(self) -> list[Checkpoint]:
        """Those that every shard retains, in the order of their steps."""
        shards = [
            {(known.identity, known.name): known for known in _checkpoints(answer)}
            for answer in self._describe_shards()
        ]
        common = [
            replace(known, marks=tuple(mark for shard in shards for mark in shard[key].marks))
            for key, known in shards[0].items()
            if all(key in shard for shard in shards)
        ]
        return sorted(common, key=lambda known: (known.step, known.name))

    def _checkpoint_on_all_shards(self, name: str) -> Checkpoint:
        """The checkpoint of that name, if it is one and the same on every shard."""
        for known in self.checkpoints():
            if known.name == name:
                return known
        having = self._shards_with(name)
        if all(having):
            raise NoTableError(f"the shards' checkpoints {name!r} are not of one call: use one of checkpoints()")
        raise NoTableError(
            f"shard {having.index(False)} has no checkpoint {name!r}: call checkpoints() for those of all shards"
        )

    def _checkpoint_fields(self, checkpoint: str | Checkpoint) -> dict[str, Any]:
        """The fields of a request that name a checkpoint, or none."""
        if not checkpoint:
            return {}
        known = self._checkpoint_on_all_shards(checkpoint) if isinstance(checkpoint, str) else checkpoint
        return {"checkpoint": known.name, "identity": known.identity}

    def rollback(self, name: str) -> None:
        """Takes all rows and the clock back to a checkpoint; later checkpoints are forgotten.

        Writes of this client that failed are given up: they never come after it. Other writers of the session must
        have stopped; those of older sessions are fenced anyway. When it fails on one of several shards, this client
        writes nothing else before it was repeated.

        Raises:
            NoTableError: a shard has no such checkpoint, or one of another call; then no shard was changed.
            InvalidRequestError: other threads' writes are under way.
        """
        meant, session = self._checkpoint_on_all_shards(name), self._require_session()
        request = partial(
            pb.CheckpointRequest, name=name, identity=meant.identity, peers=self.marks(), timeline=os.urandom(16)
        )

        def send(write: Write) -> None:
            outcomes = self._changed(session, write.numbers, "Rollback", request)
            write.not_applied = _not_applied(outcomes)
            _raise_first(outcomes)

        session.roll_back(name, send)

    def release(self, name: str) -> None:
        """Forgets a checkpoint. The disk space that only it needed is reused as its rows are written again.

        Raises:
            NoTableError: no shard has such a checkpoint.
        """
        if not any(self._shards_with(name)):
            raise NoTableError(f"no shard has a checkpoint {name!r}: call checkpoints() for what there is")
        self._change_all("Release", partial(pb.CheckpointRequest, name=name))

    def copy_checkpoint(self, source: str | Checkpoint, name: str) -> None:
        """Keeps the checkpoint `source` under `name` too: its rows stay readable when `source` is released.

        Raises:
            NoTableError: a shard has no checkpoint `source`, or one of another call.
            InvalidRequestError: `name` is that of another one.
        """
        kept = self._checkpoint_on_all_shards(source) if isinstance(source, str) else source
        request = partial(pb.CopyCheckpointRequest, name=_name(name), source=kept.name, identity=kept.identity)
        self._change_all("CopyCheckpoint", request)

    def _shards_with(self, name: str) -> list[bool]:
        """Whether each shard has a checkpoint of that name."""
        return [any(known.name == name for known in answer.checkpoints) for answer in self._describe_shards()]

    def _change_all(self, method: str, make_request: Callable[..., Message]) -> None:
        """One change of every shard, once, however often it is tried."""
        session = self._require_session()
        session.change(lambda numbers: _raise_first(self._changed(session, numbers, method, make_request)))

    def _changed(
        self,
        session: Session,
        numbers: Numbers,
        method: str,
        make_request: Callable[..., Message],
        step: int = 0,
        schedule: int = 0,
        *,
        shards: Iterable[int] | None = None,
    ) -> list[Any]:
        """The answer or error of each of `shards`, or of all."""
        table, connections = self._table().digest, self._connect()

        def change(shard: int) -> Any:
            header = session.header(shard, numbers[shard], step=step, table=table, schedule=schedule)
            return connections[shard].call(method, make_request(header=header))

        return self._outcomes(change, zip(range(len(connections)) if shards is None else shards, strict=False))

    # ---- one shard

    def call_shard(self, shard: int, method: str, request: Message) -> Any:
        """The answer of one shard to a call of one message that changes nothing: what backups are made of."""
        return self._connect()[shard].call(method, request)

    # ---- closing

    def close(self) -> None:
        """Closes the connections, which ends calls of other threads, and those that interrupts left behind. Safe to
        repeat."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections or [], None
        self._end(connections)
        self._workers.end()
        self._workers.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- fan-out

    def _connect(self) -> list[ShardConnection]:
        """The connections in the order of shards."""
        if self._closed:
            raise ValueError("the client is closed: make a new one")
        if self._connections is None:
            self._adopt(self._identify())  # not under the lock: no caller waits for another's attempts
        return self._connections or self._connect()

    def _adopt(self, connections: list[ShardConnection]) -> None:
        """Keeps the connections that were made first."""
        with self._lock:
            if self._connections is None and not self._closed:
                self._connections = connections
                return
        self._end(connections)

    def _end(self, connections: list[ShardConnection]) -> None:
        self._workers.outcomes(ShardConnection.close, zip(connections, strict=True))

    def _identify(self) -> list[ShardConnection]:
        """Asks each address which shard it is."""
        connections = [ShardConnection(address, workers=self._workers, **self._options) for address in self._addresses]
        try:
            answers = self._in_parallel(
                lambda connection: connection.call("Describe", pb.DescribeRequest()), zip(connections, strict=True)
            )
            by_shard: dict[int, ShardConnection] = {}
            for connection, answer in zip(connections, answers, strict=True):
                if not is_understood(answer.server_version):
                    raise ClusterError(
                        f"{connection.address} is a shard of version {answer.server_version}, this client is of "
                        f"{__version__}: update the shard"
                    )
                if answer.num_shards != answers[0].num_shards:
                    raise ClusterError(
                        f"{connection.address} is a shard of {answer.num_shards}, {connections[0].address} one of "
                        f"{answers[0].num_shards}: give the addresses of one cluster"
                    )
                if (other := by_shard.setdefault(answer.shard, connection)) is not connection:
                    raise ClusterError(
                        f"{other.address} and {connection.address} are both shard {answer.shard}: give each shard once"
                    )
                connection.name = f"shard {answer.shard} at {connection.address}"
            missing = [str(shard) for shard in range(answers[0].num_shards) if shard not in by_shard]
            if missing:
                raise ClusterError(
                    f"{len(connections)} of {answers[0].num_shards} shards were given: add the address of shard "
                    + ", ".join(missing)
                )
        except BaseException:
            self._end(connections)
            raise
        return [by_shard[shard] for shard in sorted(by_shard)]

    def _in_parallel(self, call: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        """Calls once for each shard's arguments; all the calls end before the first error is raised."""
        outcomes = self._outcomes(call, arguments)
        _raise_first(outcomes)
        return outcomes

    def _outcomes(self, call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Calls once for each shard's arguments; the answers, and the errors of calls that raised.

        An interrupt of the caller leaves them behind: see `_Lent` and `Workers.check`.
        """

        def noting_loss(*arguments: Any) -> Any:
            try:
                return call(*arguments)
            except DataLossError as error:
                self._lost = error
                raise

        return self._workers.outcomes(noting_loss, arguments)

    def _on_all(self, method: str, request: Message) -> list[Any]:
        return self._in_parallel(lambda connection: connection.call(method, request), zip(self._connect(), strict=True))

    def _describe_shards(self) -> list[pb.DescribeResponse]:
        return self._on_all("Describe", pb.DescribeRequest())

    def _table(self) -> _Table:
        if self._known is None:
            self._known = self._described_table(self._describe_shards())
        return self._known

    def _described_table(self, answers: list[pb.DescribeResponse]) -> _Table:
        return _Table(_common_spec(answers), self._one_identity(answers))

    def _one_identity(self, answers: list[pb.DescribeResponse]) -> bytes:
        """That of the table of all shards.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards hold tables of several clusters.
        """
        for answer, connection in zip(answers, self._connect(), strict=True):
            _spec_of(answer)
            if answer.table_identity != answers[0].table_identity:
                raise ClusterError(
                    f"{connection.name} holds the table of another cluster than {self._connect()[0].name}: give the "
                    "addresses of one cluster"
                )
        first_of_epoch: dict[int, pb.DescribeResponse] = {}
        for answer, connection in zip(answers, self._connect(), strict=True):
            first = first_of_epoch.setdefault(answer.epoch, answer) if answer.opener else answer
            if answer.opener != first.opener:  # shards of one cluster are never in two sessions of one epoch
                raise ClusterError(
                    f"{connection.name} is in another session {answer.epoch} (run {answer.run!r}) than "
                    f"{self._connect()[first.shard].name} (run {first.run!r}): give the addresses of one cluster"
                )
        return bytes(answers[0].table_identity)

    def _known_schedule(self, num_steps: int) -> int:
        """Digest of the learning rates that this client knows, or learns where they are not so many.

        Raises:
            TableMismatchError: others than it knew were changed too.
        """
        known = self._schedule
        if known is None or num_steps > known.horizon:
            answers = self._describe_shards()
            now = self._common_schedule(answers)
            if now.horizon < num_steps <= max(answer.horizon for answer in answers):
                raise StepError(
                    f"a shard has learning rates for {now.horizon} steps, others for more: call extend_schedule() with "
                    "all of them"
                )
            if known and now != known and ScheduleHash(self.learning_rates()[: known.horizon]).digest != known.digest:
                raise TableMismatchError(
                    f"learning rates of steps below {known.horizon} were changed by another call: call describe() to "
                    "use those of now"
                )
            self._schedule = known = now
        return known.digest

    def _common_schedule(self, answers: list[pb.DescribeResponse]) -> KnownSchedule:
        """Of shards that described themselves. ClusterError where they differ, also at a second look: the first may
        have met a change on its way."""
        with contextlib.suppress(ClusterError):
            return common_schedule(answers, lambda shard: self.learning_rates(shard=shard))
        return common_schedule(self._describe_shards(), lambda shard: self.learning_rates(shard=shard))

    def _fetch(
        self,
        rows: Int64Array,
        request: pb.FetchRequest,
        out: Output,
    ) -> None:
        """Fetches each distinct row once and fills the arrays in the order of `rows`."""
        if not _increasing(rows):
            distinct, inverse = np.unique(rows, return_inverse=True)

            def distinct_like(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
                return np.empty((len(distinct), *array.shape[1:]), array.dtype)

            weight, momentum, last_step = out
            part: Output = (
                distinct_like(weight),
                None if momentum is None else distinct_like(momentum),
                None if last_step is None else distinct_like(last_step),
            )
            self._fetch(distinct, request, part)
            for whole, some in zip(out, part, strict=True):
                if whole is not None and some is not None:
                    whole[:] = some[inverse]
            return
        connections = self._connect()
        request.table = self._table().digest

        with _Lent() as lent:
            fetches = [
                connections[shard].fetch(request, FetchedRows(rows, positions, out, lent.in_use))
                for shard, positions in self._sharding().positions_by_shard(rows).items()
            ]
            if sum(array.nbytes for array in out if array is not None) <= CHUNK_BYTES:
                self._workers.run(partial(ShardFetch.try_together, fetches))  # one thread is faster than several
            self._in_parallel(ShardFetch.run, ((fetch,) for fetch in fetches if not fetch.is_complete))

    def _require_session(self) -> Session:
        if self._lost is not None:
            raise DataLossError(f"this client writes nothing any more since {self._lost}")
        if self._session is None:
            raise FencedError("no session is open: call open_session() before the first write")
        return self._session

    def _sharding(self) -> Sharding:
        return Sharding(self._table().spec.rows_per_block, len(self._connect()))

    def _write(
        self,
        method: str,
        step: int,
        num_steps: int,
        rows: Int64Array,
        arrays: dict[str, Float32Array | Int64Array],
        make_message: Callable[[pb.WriteHeader | None, pb.Rows, dict[str, bytes]], Message],
    ) -> None:
        """Sends one write, under one sequence number on each shard that has rows of it; it uses the learning rates of
        the first `num_steps` steps."""
        session, schedule = self._require_session(), self._known_schedule(num_steps)
        by_shard = self._sharding().positions_by_shard(rows)
        if not by_shard:
            return
        bytes_per_row = 8 + sum(array.nbytes // len(rows) for array in arrays.values())
        most = min(MAX_WRITE_ROWS, MAX_WRITE_BYTES // bytes_per_row)
        if len(rows) > most and (largest := max(len(rows[positions]) for positions in by_shard.values())) > most:
            raise ValueError(f"{largest} rows of one shard in one write, at most {most} are taken: split it")

        def digest() -> bytes:
            """Recognises the same write again."""
            hasher = xxhash.xxh3_128(f"{method} {step}".encode())
            for array in [rows, *arrays.values()]:
                hasher.update(to_bytes(array))
            return hasher.digest()

        connections, table = self._connect(), self._table().digest

        def messages(shard: int, number: int, lent: _Lent) -> Iterator[Message]:
            positions = by_shard[shard]
            with lent.in_use():
                mine = rows[positions]
                parts = {name: array[positions] for name, array in arrays.items()}
            header: pb.WriteHeader | None = session.header(
                shard, number, step=step, num_rows=len(mine), table=table, schedule=schedule
            )
            rows_per_message = max(1, CHUNK_BYTES // sum(array.nbytes // len(rows) for array in arrays.values()))
            for start in range(0, len(mine), rows_per_message):
                chunk = slice(start, start + rows_per_message)
                with lent.in_use():
                    values = {name: to_bytes(part[chunk]) for name, part in parts.items()}
                    message = make_message(header, rows_to_proto(mine[chunk]), values)
                yield message
                header = None

        def send(write: Write) -> None:
            with _Lent() as lent:
                outcomes = self._outcomes(
                    lambda shard, number: connections[shard].write(method, partial(messages, shard, number, lent)),
                    ((shard, write.numbers[shard]) for shard in by_shard),
                )
            write.not_applied = _not_applied(outcomes)
            _raise_first(outcomes)

        session.write(by_shard, digest, send)

    # ---- checks of what the caller gives

    def _rows(self, rows: npt.ArrayLike) -> Int64Array:
        array = _int64(rows, "rows")
        if array.ndim != 1:
            raise ValueError(f"rows must have shape [n], got {list(array.shape)}")
        num_rows = self._table().spec.num_rows
        if len(array) and array.max() >= num_rows:
            num_rows = self.describe().spec.num_rows  # another client may have made a larger table
        if len(array) and (array.min() < 0 or array.max() >= num_rows):
            bad = array[(array < 0) | (array >= num_rows)][0]
            raise ValueError(f"row {bad} does not exist: the table has rows 0..{num_rows - 1}")
        return array

    def _values(self, values: npt.ArrayLike, rows: Int64Array, name: str) -> Float32Array:
        if not hasattr(values, "dtype"):
            values = np.asarray(values, np.float32)
        try:
            array = np.asarray(values)
        except RuntimeError as error:  # a torch tensor with a gradient, or on another device
            raise TypeError(f"{name} cannot be read as a NumPy array: {error}") from None
        if array.dtype != np.float32:
            raise TypeError(f"{name} must be float32, got {array.dtype}: convert it first")
        shape = (len(rows), self._table().spec.dim)
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
        if not all_finite(array):
            raise ValueError(f"{name} holds NaN or infinite values: nothing was sent")
        return array


@dataclass(frozen=True)
class _Table:
    """The table as this client knows it."""

    spec: TableSpec
    identity: bytes

    @cached_property
    def digest(self) -> int:
        """By which requests name it."""
        return table_digest(self.spec, self.identity)


class _Lent:
    """The caller's arrays, which threads of a fan-out use until the context is left. Where an exception of the caller
    leaves it early, they touch them no more, and end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a thread uses the arrays. Raises CancelledError where the caller has left."""
        with self._lock:
            if self._returned:
                raise CancelledError
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._returned = True


def _spec_of(answer: pb.DescribeResponse) -> TableSpec:
    """The table's; NoTableError where the shard holds none."""
    if not answer.HasField("spec"):
        raise NoTableError(f"shard {answer.shard} holds no table: call create_table() first")
    return spec_from_proto(answer.spec)


def _common_spec(answers: list[pb.DescribeResponse]) -> TableSpec:
    """The spec of the one table that all shards hold."""
    first, *others = (_spec_of(answer) for answer in answers)
    for shard, spec in enumerate(others, start=1):
        if spec.is_another_size_of(first):
            most = max(spec.num_rows, first.num_rows)
            raise ClusterError(
                f"the table of shard 0 has {first.num_rows} rows, that of shard {shard} {spec.num_rows}, as after "
                f"an extend_table() that failed halfway: repeat extend_table({most}), or 'weightserver extend'"
            )
        if spec != first:
            raise ClusterError(f"shards 0 and {shard} hold different tables: give the addresses of one cluster")
    return first


def _checkpoints(answer: pb.DescribeResponse) -> tuple[Checkpoint, ...]:
    return tuple(Checkpoint(known.name, known.step, known.identity, (known.mark,)) for known in answer.checkpoints)


def _errors(outcomes: list[Any]) -> list[BaseException]:
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]


def _not_applied(outcomes: list[Any]) -> bool:
    """Whether every shard is proven to have done nothing."""
    return all(isinstance(outcome, WeightServerError) and outcome.not_applied for outcome in outcomes)


def _raise_first(outcomes: list[Any]) -> None:
    for error in _errors(outcomes):
        raise error


def _name(name: str) -> str:
    if not isinstance(name, str) or not name or not name.encode(errors="ignore").decode() == name:
        raise ValueError(f"name must be a non-empty text that UTF-8 can hold, got {name!r}")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"name has {len(name)} characters: give one of at most {MAX_NAME_CHARACTERS}")
    return name


def _integer(value: int, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return operator.index(value)


def _step(value: int, name: str) -> int:
    step = _integer(value, name)
    if not 0 <= step < 2**63:
        raise ValueError(f"{name} must not be negative, and less than 2⁶³, got {step}")
    return step


def _int64(value: npt.ArrayLike, name: str) -> Int64Array:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    return array.astype(np.int64, copy=False)


def _increasing(rows: Int64Array) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def _add_repeats(rows: Int64Array, gradients: Float32Array) -> tuple[Int64Array, Float32Array]:
    """Sorted distinct rows, and the sum of each one's gradients in the order given."""
    order = np.argsort(rows, kind="stable")
    distinct, starts = np.unique(rows[order], return_index=True)
    with np.errstate(over="ignore"):
        return distinct, np.add.reduceat(gradients[order], starts, axis=0)
