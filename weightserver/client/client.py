"""`WeightClient`, the public class: one table over all shards of a weight server.

The contract of its calls, for a table of N rows of D values:

- Rows may be given in any order and repeated: fetch answers in order, a push adds repeats up, write_state refuses them.
- A write returns when it is durable on every shard. It is atomic on each shard, not across shards. When it fails, the
  error says on which shard, and the same call made again is applied where it has not been. If that is only some of its
  shards, it must be repeated, or rolled back, before another write. After another write, a push that is repeated still
  counts once, but a write_state is a new one: it replaces what the other wrote.
- Calls may come from any thread; writes of one client take turns. Every attempt has a deadline of `timeout_seconds`;
  calls of a shard that is unreachable, overloaded or silent are retried for `retry_seconds` in all. Rows of a fetch
  that have arrived are kept, and both times restart for the others: a fetch may take any time.
- Invalid arguments raise ValueError or TypeError before anything is sent. Whatever a shard refuses, or fails to do,
  raises a subclass of WeightServerError.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from weightserver.client import arguments, metrics, sessions
from weightserver.client.channels import Credentials
from weightserver.client.checkpoints import checkpoint_in, checkpoints_of, find_checkpoint, take_checkpoint
from weightserver.client.connection import ShardConnection
from weightserver.client.fan_out import Shards
from weightserver.client.lease import HeldLease
from weightserver.client.results import RowState, TableInfo, table_info
from weightserver.client.schedule import ClientSchedule
from weightserver.client.table import common_identity, common_table, create_table, drop_table, extend_table
from weightserver.client.transfer import RowWrite, fetch_rows, write_rows
from weightserver.client.writer import Session, Writer
from weightserver.common.closing import Closing
from weightserver.core.arrays import Float32Array, Int64Array, StoredArray, checked_integer
from weightserver.core.checkpoints import Checkpoint, common_checkpoints
from weightserver.core.correction import checked_rates
from weightserver.core.errors import DataLossError, FencedError, NoTableError, SessionInUseError
from weightserver.core.precision import GRADIENT, MOMENTUM_BUFFER, WEIGHT, precision_of
from weightserver.core.spec import MAX_ROWS, TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import table_number

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_SILENT_SECONDS = 3
"""A run that holds a session says something each second: one that has missed two renewals may have died."""
_WAIT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class WeightClient(Closing):
    """A table's rows over all shards of a weight server. Thread-safe; a context manager; connects lazily.

    Args:
        addresses: host:port of every shard, in any order; each shard says which one it is. ws-{0..63}.ws:50051 stands
            for 64 of them.
        credentials: gRPC channel credentials (TLS), or what makes them for each new channel; without them only loopback
            addresses are accepted.
        token: bearer token sent with every call, or what returns it; it leaves this machine over TLS only, or with
            `insecure`.
        timeout_seconds: deadline of one attempt; for a fetch, the time in which some of its rows must arrive.
        retry_seconds: how long calls are retried of a shard that has answered before and cannot be reached now.
        connect_seconds: how long the first call of each shard is tried, also while another program answers.
        insecure: accept addresses other than loopback without credentials.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        credentials: Credentials = None,
        token: str | Callable[[], str] | None = None,
        timeout_seconds: float = 30,
        retry_seconds: float = 300,
        connect_seconds: float = 15,
        insecure: bool = False,
    ) -> None:
        parsed = arguments.checked_addresses(addresses, credentials=credentials, token=token, insecure=insecure)
        seconds = arguments.checked_seconds(
            timeout_seconds=timeout_seconds, retry_seconds=retry_seconds, connect_seconds=connect_seconds
        )
        metrics.register_once()
        self._shards = Shards(parsed, credentials=credentials, token=token, **seconds)
        self._known_spec: TableSpec | None = None
        self._schedule = ClientSchedule(self._shards)
        self._writer = Writer(self._shards, self._schedule.were_used)
        self._lease: HeldLease | None = None
        self._opening: tuple[str, dict[str, bool], bytes] | None = None
        """Name, options and id of a session whose opening may still reach the shards, although its call has failed."""

    # ---- the table

    def create_table(self, spec: TableSpec) -> TableSpec:
        """Creates the table on every shard; does nothing if the same table exists. Raises TableMismatchError, and
        creates nothing, if another one does."""
        if not isinstance(spec, TableSpec):
            raise TypeError(f"spec must be a TableSpec, got {type(spec).__name__}")
        return self._know(*create_table(self._shards, spec))

    def extend_table(self, num_rows: int) -> TableSpec:
        """Enlarges the table to `num_rows` rows; does nothing if it has as many.

        New rows begin as if they had been there from the start, old rows stay, and clients that know the smaller table
        continue. A rollback does not shrink it. If the call fails on one of several shards, repeat it: until then
        describe() refuses.

        Raises:
            ValueError: fewer rows than the table has.
            FencedError: the session was superseded; or, without one, another client opened one or dropped the table.
        """
        num_rows, session = checked_integer(num_rows, "num_rows", 1, MAX_ROWS), self._writer.session
        return self._know(*extend_table(self._shards, num_rows, session.epoch if session else None))

    def drop_table(self) -> None:
        """Deletes the table, its rows and its schedule on every shard, and fences every session. A call that failed
        halfway may be repeated. Raises ClusterError, and deletes nothing, if the shards are of several clusters."""
        drop_table(self._shards)
        self._leave()
        self._forget_table()

    def describe(self, *, rates: bool = True) -> TableInfo:
        """Describes the table and its progress. Later calls of this client use the learning rates that the shards used.

        Args:
            rates: whether to read these. Without them `horizon` is the clock, and shards may have used different ones.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards do not hold one table, or have used different learning rates for a step.
        """
        answers = self._shards.describe()
        spec = self._know(*common_table(self._shards, answers))
        horizon = len(self._schedule.learn(answers)) if rates else max(answer.clock for answer in answers)
        return table_info(spec, horizon, answers, [shard.address for shard in self._shards.connections()])

    @property
    def _spec(self) -> TableSpec:
        """The spec of the table; asks the shards if it is not known yet."""
        return self._known_spec or self._know(*common_table(self._shards, self._shards.describe()))

    def _know(self, spec: TableSpec, identity: bytes) -> TableSpec:
        """Takes note of the table that the shards hold; what is known of another one is forgotten."""
        if self._known_spec is not None and identity != self._shards.identity:
            self._forget_table()
        self._shards.name_table(identity, table_number(spec, identity))
        self._known_spec = spec
        return spec

    def _forget_table(self) -> None:
        self._known_spec = None
        self._shards.name_table(b"", 0)
        self._schedule.forget()
        self._writer = Writer(self._shards, self._schedule.were_used)

    def table_identity(self) -> bytes:
        """16 random bytes, drawn when the table was created. Unlike describe(), also works while an extension of the
        table is incomplete. Raises as describe()."""
        return common_identity(self._shards.describe(), self._shards.names)

    def learning_rates(self, *, shard: int | None = None) -> Float32Array:
        """The learning rates that this client knows, float32 [horizon]: those that the shards have used, and those
        that it was given for later steps. With `shard`, those that this shard has used."""
        return self._schedule.rates.copy() if shard is None else self._schedule.used_by(shard)

    def extend_schedule(self, start_step: int, learning_rates: npt.ArrayLike) -> None:
        """Appends learning rates (float32 [n]) from `start_step` on, or rewrites those that no write has reached.

        They are kept in this client, and sent with the calls that need them. A write makes those up to its step the
        shards' own: they no longer change, and other clients use them too; each client needs to be given later ones.
        If two clients give different ones for a step, the first write to use one decides, and calls of the other
        client are refused until it calls describe().

        Raises:
            ValueError: a learning rate η with η·λ ≥ 2·(1 + m), which makes rows grow without a gradient.
            StepError: a gap would remain before `start_step`.
            TableMismatchError: a step that was used, or may have been by a write that failed, would change.
            ClusterError: two shards have used different learning rates for a step.
        """
        self._shards.require_usable()
        start_step = arguments.checked_step(start_step, "start_step")
        spec = self._spec
        rates = checked_rates(
            learning_rates, momentum=spec.momentum, weight_decay=spec.weight_decay, start_step=start_step
        )
        self._schedule.extend(start_step, rates, self._writer)

    # ---- sessions and states

    def open_session(
        self,
        name: str,
        *,
        join: int | None = None,
        force: bool = False,
        hold: bool = True,
        take_over: bool = False,
    ) -> int:
        """Opens a session under the run's `name`, which fences every older one; or joins session `join` as one more
        writer. Returns the session's epoch. Needed before a write.

        Args:
            force: the shards need no common state: for a caller that rolls all of them back next.
            hold: until this client is closed, its process ends or has been silent for a minute, another process that
                opens a session is refused without `take_over`. Three seconds of silence are enough to resume the run of
                this name by `force`. A thread says each second that the process lives. Without it, any process may open
                the next session.
            take_over: open it although a live run holds the newest session; that run's next write is refused.

        Raises:
            SessionInUseError: a live run of another process holds the newest session. One that has been silent for
                seconds is waited for, and one of the same name until it is heard of once more.
            FencedError: the session to join was superseded, or another client opened one at the same time.
            DataLossError: a shard lacks what the others know it to have acknowledged.
            ClusterError: the shards' rows are not of one time, as after restoring only one of them.
        """
        name = arguments.checked_name(name)
        if join is not None:
            answers, epoch = self._shards.describe(), checked_integer(join, "join", 1, 2**63 - 1)
            session = self._writer.enter(lambda: sessions.join_session(self._shards, answers, epoch))
        else:
            session = self._open_session(name, force=force, take_over=take_over)
        if self._lease is None or not self._lease.holds(session):
            self._leave()
            if hold:
                self._lease = HeldLease(self._shards.connections()[0], session)
        return session.epoch

    def _open_session(self, name: str, *, force: bool, take_over: bool) -> Session:
        """Waits for the end of the lease of a silent run, from which `force` takes over if it has this name.

        One of this name that was heard of before the first refusal may have been killed since, and a supervisor starts
        it again: it is alive once it is heard of afterwards.
        """
        is_told, has_died, refused_at = False, False, math.inf
        while True:
            answers = self._shards.describe()
            asked_at = time.monotonic()
            options = {"force": force, "take_over": take_over or has_died}
            if self._opening is None or self._opening[:2] != (name, options):
                self._opening = name, options, os.urandom(16)
            open_session = partial(
                sessions.open_session, self._shards, answers, name, session_id=self._opening[2], **options
            )
            try:
                session = self._writer.enter(open_session)
                self._opening = None
                return session
            except SessionInUseError as error:
                is_own = all(answer.run == name for answer in answers)
                is_silent = error.silent_seconds >= _SILENT_SECONDS
                has_died = force and is_own and is_silent
                if has_died:
                    continue
                is_heard = error.silent_seconds + 1 <= asked_at - refused_at  # of whole seconds; since the refusal
                if not is_silent and (is_heard or not is_own):
                    raise
                if is_silent and not is_told:
                    _log.warning("waiting for a run that seems to have died: %(error)s", {"error": error})
                    is_told = True
                refused_at = min(refused_at, time.monotonic())
                time.sleep(_WAIT_SECONDS)

    def require_session(self) -> None:
        """Raises FencedError if another run has taken over the session that this client holds, or held; for a trainer
        whose steps need no write. It is noticed within a second or two."""
        if self._lease is not None and self._lease.lost is not None:
            raise self._lease.lost

    def join_newest_session(self) -> int:
        """Joins the newest session, for operations on the table of a running trainer; opens a new one of the same run
        if no client opened that, as after a restore or a reshard. Returns the session's epoch.

        Raises:
            FencedError: the shards are at different epochs, or another client opened a session at the same time.
        """
        answers = self._shards.describe()
        return self._writer.enter(lambda: sessions.join_newest_session(self._shards, answers)).epoch

    def require_common_state(self) -> None:
        """Checks that the shards' rows are of one time, for reading them without a session. Raises as open_session."""
        sessions.require_common_state(self._shards, self._shards.describe())

    def marks(self) -> list[str]:
        """The newest mark of each shard that this client has seen, which covers all that it was told is durable: the
        argument of `expect`."""
        return self._shards.marks()

    def expect(self, marks: Sequence[str]) -> None:
        """Checks that every shard holds the state of its mark, as `marks` returned it earlier. Raises DataLossError if
        its data does not descend from that."""
        connections = self._shards.connections()
        if len(marks) != len(connections):
            raise ValueError(f"{len(marks)} marks were given, one for each of {len(connections)} shards is needed")
        self._shards.in_parallel(ShardConnection.require, zip(connections, marks, strict=True))

    # ---- rows

    def fetch(
        self, rows: npt.ArrayLike, *, step: int, out: Float32Array | None = None, checkpoint: str | Checkpoint = ""
    ) -> Float32Array:
        """Weights of `rows` (int64 [n]) before update `step`: float32 [n, D], into `out` if given. Never writes.

        The rows of one shard arrive in messages of about 1 MiB, each a snapshot. With `checkpoint` they are those of
        the retained checkpoint of that name, or of that one of `checkpoints()`.

        Raises:
            StepError: `step` lies beyond the horizon, or before an update that a row has seen, or SGD makes a row
                infinite or NaN.
            NoTableError: there is no such checkpoint.
        """
        rows = self._rows(rows)
        out = arguments.output_array(out, (len(rows), self._spec.dim))
        step = arguments.checked_step(step, "step")
        fetch_rows(self._shards, self._schedule, self._spec, rows, (out, None, None), step, checkpoint)
        return out

    def fetch_state(
        self, rows: npt.ArrayLike, *, step: int | None = None, checkpoint: str | Checkpoint = ""
    ) -> RowState:
        """All state of `rows` (int64 [n]): before update `step`, or raw as stored if it is None. Raises as `fetch`."""
        rows, dim = self._rows(rows), self._spec.dim
        weight, momentum_buffer = (np.empty((len(rows), dim), np.float32) for _ in range(2))
        last_step = np.empty(len(rows), np.int64)
        step = None if step is None else arguments.checked_step(step, "step")
        out = weight, momentum_buffer, last_step
        fetch_rows(self._shards, self._schedule, self._spec, rows, out, step, checkpoint)
        return RowState(*out)

    def push_gradients(self, rows: npt.ArrayLike, gradients: npt.ArrayLike, *, step: int) -> None:
        """Applies update `step` with `gradients` (float32 [n, D]) to `rows` (int64 [n]); returns when durable.

        Pushes for one step add up, whichever clients send them, and may arrive in any order, because an update is
        linear in its gradient (docs/design.md, section 2). With correction=False or "paper" they must arrive before a
        row's next update.

        Raises:
            FencedError: no session is open, or it was superseded.
            StepError: no learning rate is known for `step`, or a row would be infinite or NaN; nothing was written.
        """
        rows, step = self._rows(rows), arguments.checked_step(step, "step")
        gradients = arguments.checked_values(gradients, (len(rows), self._spec.dim), "gradients")
        if not arguments.is_strictly_increasing(rows):
            rows, gradients = arguments.sum_repeats(rows, gradients)
        sent = precision_of(self._spec).rounded(gradients, rows, step, GRADIENT)
        self._write(RowWrite(pb.PushGradientsRequest, step, rows, {"gradients": sent}))

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
            FencedError: no session is open, or it was superseded.
            StepError: a last_step beyond the horizon, or below that of the stored row.
        """
        rows = self._rows(rows)
        shape = (len(rows), self._spec.dim)
        weight = arguments.checked_values(weight, shape, "weight")
        momentum_buffer = arguments.checked_values(momentum_buffer, shape, "momentum_buffer")
        steps = arguments.checked_last_step(last_step, len(rows))
        if not arguments.is_strictly_increasing(rows):
            order = arguments.distinct_order(rows)
            rows, weight, momentum_buffer, steps = rows[order], weight[order], momentum_buffer[order], steps[order]
        last, precision = int(steps.max(initial=0)), precision_of(self._spec)
        arrays: dict[str, StoredArray | Int64Array] = {
            "weight": precision.rounded(weight, rows, steps, WEIGHT),
            "momentum_buffer": precision.rounded(momentum_buffer, rows, steps, MOMENTUM_BUFFER),
            "last_step": steps,
        }
        self._write(RowWrite(pb.WriteStateRequest, last, rows, arrays))

    def _write(self, write: RowWrite) -> None:
        writer = self._require_session()
        write_rows(self._shards, self._spec, writer, write, self._schedule.used(write.num_steps))

    def _rows(self, rows: npt.ArrayLike) -> Int64Array:
        self._shards.require_usable()
        array = arguments.row_numbers(rows)
        num_rows = self._spec.num_rows
        if len(array) and array.max() >= num_rows:
            num_rows = self.describe().spec.num_rows  # another client may have enlarged the table
        arguments.check_rows_exist(array, num_rows)
        return array

    def _require_session(self) -> Writer:
        """The writer, if it is in a session."""
        self._shards.require_usable()
        if self._shards.data_loss is not None:
            raise DataLossError(
                f"this client stopped writing after a loss of data ({self._shards.data_loss}); open a new session "
                "once the shards hold their data again"
            )
        if self._writer.session is None:
            raise FencedError("no session is open: call open_session() before the first write")
        return self._writer

    # ---- checkpoints

    def checkpoint(self, name: str, *, step: int) -> None:
        """Keeps all rows as they are now, after `step` finished updates, under `name`, until it is released.

        Every write that is to be part of it must have returned. Takes no copy, but each block that is written later
        takes the disk space of a second version.

        Raises:
            FencedError: no session is open, or it was superseded.
            InvalidRequestError: the name was used for another step, or rows were written since the call began or since
                the name was used.
        """
        step, name = arguments.checked_step(step, "step"), arguments.checked_name(name)
        writer = self._require_session()
        take_checkpoint(self._shards, writer, self._schedule, name, step)

    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that every shard retains, oldest first."""
        return common_checkpoints(self.checkpoints_by_shard())

    def checkpoints_by_shard(self) -> list[tuple[Checkpoint, ...]]:
        """All checkpoints that each shard retains, oldest first, whether or not other shards do."""
        return [checkpoints_of(answer) for answer in self._shards.describe()]

    def rollback(self, name: str) -> None:
        """Returns all rows and the clock to a checkpoint; later checkpoints are forgotten.

        A write of this client that failed is abandoned: the same call makes a new one. Other writers of the session
        must have stopped. If it fails on some of the shards, this client writes nothing until it has been repeated.

        Raises:
            NoTableError: a shard has no such checkpoint, or one of another call; no shard was changed.
            ClusterError: the shards do not hold one table, as after half an extend_table(); no shard was changed.
        """
        name, answers = arguments.checked_name(name), self._shards.describe()
        self._know(*common_table(self._shards, answers))
        kept = checkpoint_in(answers, name)
        request = pb.CheckpointRequest(
            name=name, identity=kept.checkpoint_id, peers=self._shards.marks(), timeline=os.urandom(16)
        )
        self._require_session().roll_back(request)
        self._schedule.forget_used()

    def release(self, name: str, *, join: bool = False) -> None:
        """Forgets a checkpoint: the disk space that only it needed is used again. Raises NoTableError if no shard has
        it; otherwise, with `join`, this client joins the newest session first."""
        name = arguments.checked_name(name)
        if all(kept.name != name for shard in self.checkpoints_by_shard() for kept in shard):
            raise NoTableError(
                f"no shard has a checkpoint {name!r}: checkpoints(), or 'weightserver checkpoints', lists those of all"
            )
        if join:
            self.join_newest_session()
        self._require_session().change("Release", pb.CheckpointRequest(name=name))

    def copy_checkpoint(self, source: str | Checkpoint, name: str) -> None:
        """Keeps the checkpoint `source` under `name` too: its rows stay readable when `source` is released.

        Raises:
            NoTableError: a shard has no checkpoint `source`, or one of another call.
            InvalidRequestError: `name` is that of another checkpoint.
        """
        kept, name = find_checkpoint(self._shards, source), arguments.checked_name(name)
        request = pb.CopyCheckpointRequest(name=name, source=kept.name, identity=kept.checkpoint_id)
        self._require_session().change("CopyCheckpoint", request)

    # ---- one shard

    def call_shard(self, shard: int, method: str, request: Message) -> Any:
        """Makes a call of one message that changes nothing on one shard, and returns the answer; backups need it."""
        return self._shards.connections()[shard].call(method, request)

    # ---- watching

    @staticmethod
    def metrics() -> Collector:
        """Prometheus metrics of all clients of this process, for another registry than the default one, which has
        them from the first client on."""
        return metrics.registry

    # ---- closing

    def close(self) -> None:
        """Closes the connections, which ends calls of other threads and those left by interrupts. Safe to repeat. In a
        forked process it does nothing.

        A signal's handler must not call it, as it may have interrupted a call that holds the client's locks: let the
        handler raise, or set a flag.
        """
        if not self._shards.are_inherited:
            self._leave()
            self._shards.close()

    def _leave(self) -> None:
        """Ends the lease of the session that this client holds."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
