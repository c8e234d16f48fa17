"""Proto <-> arrays: checks what arrives, calls the shard, and turns errors into statuses."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from weightserver.common.stages import StageClock, arrived
from weightserver.common.version import __version__
from weightserver.core.arrays import Int64Array
from weightserver.core.errors import (
    DataLossError,
    FencedError,
    InvalidRequestError,
    StorageError,
    WeightServerError,
)
from weightserver.core.lineage import split_mark
from weightserver.core.spec import MAX_ROWS, TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    ACKNOWLEDGED_KEY,
    CHUNK_BYTES,
    MARK_KEY,
    MAX_NAME_CHARACTERS,
    MAX_WRITE_BYTES,
    MAX_WRITE_ROWS,
    VERSION_KEY,
    count_rows,
    encode_fetch_response,
    float32_from_bytes,
    is_understood,
    rows_from_proto,
    spec_from_proto,
    spec_to_proto,
    to_bytes,
)
from weightserver.protocol.status import status_of
from weightserver.server.admission import (
    RequestMemory,
    Reservation,
    abort,
    answer_bytes,
    blocks_bytes,
    fetch_bytes,
    write_bytes,
)
from weightserver.server.metrics import ShardMetrics
from weightserver.server.write_stream import ReceivedWrite, write_header
from weightserver.shard.group_commit import Committer
from weightserver.shard.schedule_change import Part, ScheduleState
from weightserver.shard.shard import READ_BYTES, Rows, Shard, WriteHeader, WriteTransaction
from weightserver.storage.records import State

NAME = pb.DESCRIPTOR.services_by_name["WeightServer"].full_name
_ID_BYTES = 16
_CHECKPOINT_BYTES = 4 * MAX_NAME_CHARACTERS + 64
_EVENTS = {
    "Checkpoint": "checkpoint taken",
    "CopyCheckpoint": "checkpoint copied",
    "Release": "checkpoint released",
    "Rollback": "rolled back",
}

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class WeightServerService:
    """Serves one shard; its methods run in gRPC's threads."""

    def __init__(self, shard: Shard, committer: Committer, metrics: ShardMetrics, memory: RequestMemory) -> None:
        self._shard = shard
        self._committer = committer
        self._metrics = metrics
        self._memory = memory
        self._refusal_logged: dict[str, float] = {}

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> Iterator[pb.DescribeResponse]:
        with self._answering("Describe", context), self._memory.reservation("short") as reserved:
            shard, state, schedule = self._shard, self._shard.state, self._shard.schedule
            reserved.take(answer_bytes(len(state.checkpoints) * _CHECKPOINT_BYTES))
            yield pb.DescribeResponse(
                shard=shard.shard,
                num_shards=shard.num_shards,
                spec=None if shard.spec is None else spec_to_proto(shard.spec),
                epoch=state.epoch,
                clock=state.clock,
                horizon=schedule.hash.horizon,
                rows_stored=state.rows_stored,
                disk_bytes=shard.disk_bytes(),
                run=state.run,
                generation=state.generation,
                server_version=__version__,
                schedule_version=state.schedule_version,
                table_identity=shard.table_identity,
                opener=bytes.fromhex(state.opener),
                peers=shard.peers,
                timeline=bytes.fromhex(state.timeline),
                checkpoints=[
                    pb.Checkpoint(
                        name=known.name,
                        step=known.step,
                        identity=bytes.fromhex(known.identity),
                        clock=known.clock,
                        rows_stored=known.rows_stored,
                        mark=known.mark,
                    )
                    for known in state.checkpoints
                ],
                schedule_digest=schedule.digest,
                pending_schedule=None
                if schedule.pending is None
                else pb.PendingSchedule(
                    change=bytes.fromhex(schedule.pending.change), schedule_digest=schedule.pending.digest
                ),
            )

    def CreateTable(self, request: pb.CreateTableRequest, context: grpc.ServicerContext) -> pb.CreateTableResponse:
        return self._create_table("CreateTable", request, context, single_rate=False)

    def CreateSingleRateTable(
        self, request: pb.CreateTableRequest, context: grpc.ServicerContext
    ) -> pb.CreateTableResponse:
        return self._create_table("CreateSingleRateTable", request, context, single_rate=True)

    def _create_table(
        self, method: str, request: pb.CreateTableRequest, context: grpc.ServicerContext, *, single_rate: bool
    ) -> pb.CreateTableResponse:
        with self._answering(method, context):
            if request.spec.single_rate != single_rate:
                raise ValueError("CreateSingleRateTable is for specs with single_rate, CreateTable for all others")
            spec, before = spec_from_proto(request.spec), self._shard.spec
            epoch = request.epoch if request.HasField("epoch") else None
            _require(len(request.identity) in (0, _ID_BYTES), f"identity must be {_ID_BYTES} bytes")
            identity = self._commit(
                context, lambda batch: self._shard.create_table(batch, spec, request.identity, epoch)
            )
            if before is None:
                _log.info("table created", extra=asdict(spec))
            return pb.CreateTableResponse(identity=identity)

    def ExtendTable(self, request: pb.ExtendTableRequest, context: grpc.ServicerContext) -> pb.ExtendTableResponse:
        with self._answering("ExtendTable", context):
            self._shard.check_table(request.table)
            epoch = request.epoch if request.HasField("epoch") else None
            if self._commit(context, lambda batch: self._shard.extend_table(batch, request.num_rows, epoch)):
                _log.info("table extended", extra={"num_rows": request.num_rows})
            return pb.ExtendTableResponse()

    def DropTable(self, request: pb.DropTableRequest, context: grpc.ServicerContext) -> pb.DropTableResponse:
        with self._answering("DropTable", context):
            epoch = request.epoch if request.HasField("epoch") else None
            before = self._shard.state
            self._commit(context, lambda batch: self._shard.drop_table(batch, epoch))
            _log.info("table dropped", extra={"run": before.run, "stored_rows": before.rows_stored})
            return pb.DropTableResponse()

    def ExtendSchedule(
        self, request: pb.ExtendScheduleRequest, context: grpc.ServicerContext
    ) -> pb.ExtendScheduleResponse:
        with self._answering("ExtendSchedule", context), self._memory.reservation("short") as reserved:
            reserved.take(4 * len(request.learning_rates))  # merged with those that are stored, and in the transaction
            _require(len(request.change) == _ID_BYTES, f"change must be {_ID_BYTES} bytes")
            self._shard.check_table(request.table)
            part = None
            if request.phase == pb.SCHEDULE_PHASE_PREPARE:
                rates = float32_from_bytes(request.learning_rates, "learning_rates")
                _require((rates >= 0).all(), "learning rates must be finite and not negative")
                _require(request.start_step >= 0, f"start_step must not be negative, got {request.start_step}")
                part = Part(request.change.hex(), request.start_step, rates, request.last)
                state, schedule = self._shard.state, self._shard.schedule
                if self._shard.has_learning_rates(part):
                    return _schedule_answer(state, schedule, part.change)
            done, answer = self._commit(context, lambda batch: self._change_schedule(batch, request, part))
            if done:
                _log.info(f"schedule change {done}", extra={"horizon": answer.horizon})
            return answer

    def _change_schedule(
        self, batch: WriteTransaction, request: pb.ExtendScheduleRequest, part: Part | None
    ) -> tuple[str, pb.ExtendScheduleResponse]:
        """What was done, and the answer."""
        change, done = request.change.hex(), ""
        if part is not None:
            self._shard.prepare_schedule(batch, part, version=request.version, epoch=request.epoch)
        elif request.phase == pb.SCHEDULE_PHASE_COMMIT:
            if self._shard.commit_schedule(batch, change, digest=request.schedule, epoch=request.epoch):
                done = "committed"
        elif request.phase == pb.SCHEDULE_PHASE_GIVE_UP:
            if self._shard.give_up_schedule(batch, change):
                done = "given up"
        else:
            raise InvalidRequestError(f"phase {request.phase} is unknown: is the client of the same version?")
        return done, _schedule_answer(batch.state, batch.schedule, change)

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionResponse:
        with self._answering("OpenSession", context):
            _require(request.epoch > 0, "epoch must be positive")
            _require(len(request.name) <= MAX_NAME_CHARACTERS, f"name has more than {MAX_NAME_CHARACTERS} characters")
            if request.opener or not request.join:  # of an epoch that is nobody's there is none, which nobody joins
                _require(len(request.opener) == _ID_BYTES, f"opener must be {_ID_BYTES} bytes")
            _require(len(request.keep_writer) in (0, _ID_BYTES), f"keep_writer must be {_ID_BYTES} bytes")
            self._shard.require_table()
            if request.join:
                self._shard.join_session(request.epoch, request.opener)
            else:
                peers = self._peers(request.peers)
                self._commit(
                    context,
                    lambda batch: self._shard.open_session(
                        batch,
                        request.name,
                        request.epoch,
                        request.opener,
                        keep_writer=request.keep_writer,
                        peers=peers,
                        force=request.force,
                    ),
                )
                _log.info("session opened", extra={"run": request.name})
            return pb.OpenSessionResponse()

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answers serialized FetchResponses: see `wire`."""
        with self._answering("Fetch", context) as clock, self._memory.reservation("Fetch") as reserved:
            clock.start("read")
            self._shard.check_table(request.table)
            reserved.take(fetch_bytes(self._shard.require_table().spec, count_rows(request.rows)))
            rows = rows_from_proto(request.rows)
            self._shard.check_rows(rows)
            step = None if request.raw else request.step
            chunks = self._shard.fetch(
                rows,
                step=step,
                state=request.state,
                checkpoint=request.checkpoint or None,
                identity=request.identity.hex(),
                schedule=request.schedule,
                clock=clock,
            )
            self._metrics.rows.requested("fetch", len(rows))
            num_rows = num_bytes = 0
            try:
                for part, message in _encoded(chunks, clock):
                    clock.start("send")
                    num_rows += part
                    num_bytes += len(message)
                    yield message
            finally:
                self._metrics.rows.fetched(num_rows, num_bytes)
            clock.start("end")
            self._metrics.rows.fetch_stages(clock.seconds)

    def PushGradients(
        self, request_iterator: Iterator[pb.PushGradientsRequest], context: grpc.ServicerContext
    ) -> pb.WriteResponse:
        with self._answering("PushGradients", context), self._memory.reservation("write") as reserved:
            write = self._receive(request_iterator, ("gradients",), reserved)
            header, rows, (gradients,) = write.header, write.rows(), write.values()
            self._check_written(rows, reserved)
            applied = self._commit(context, lambda batch: self._shard.push_gradients(batch, header, rows, gradients))
            self._metrics.rows.requested("push", len(rows))
            self._metrics.rows.pushed(len(rows), gradients.nbytes, duplicate=not applied)
            return pb.WriteResponse(duplicate=not applied, mark=self._shard.state.mark)

    def WriteState(
        self, request_iterator: Iterator[pb.WriteStateRequest], context: grpc.ServicerContext
    ) -> pb.WriteResponse:
        with self._answering("WriteState", context), self._memory.reservation("write") as reserved:
            write = self._receive(request_iterator, ("weight", "momentum_buffer"), reserved)
            header, rows, (weight, momentum) = write.header, write.rows(), write.values()
            last_step = write.last_step()
            self._check_written(rows, reserved)
            applied = self._commit(
                context, lambda batch: self._shard.write_state(batch, header, rows, weight, momentum, last_step)
            )
            self._metrics.rows.requested("write_state", len(rows))
            self._metrics.rows.written(len(rows), 2 * weight.nbytes, duplicate=not applied)
            return pb.WriteResponse(duplicate=not applied, mark=self._shard.state.mark)

    def Checkpoint(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def take(batch: WriteTransaction, header: WriteHeader, name: str, identity: str) -> bool:
            return self._shard.checkpoint(batch, header, name, identity, self._peers(request.peers))

        answer = self._on_checkpoint("Checkpoint", take, request, context)
        kept = [known for known in self._shard.state.checkpoints if known.name == request.name]
        answer.identity = bytes.fromhex(kept[0].identity) if kept else b""  # released meanwhile
        return answer

    def Rollback(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def go_back(batch: WriteTransaction, header: WriteHeader, name: str, identity: str) -> bool:
            _require(len(request.timeline) == _ID_BYTES, f"timeline must be {_ID_BYTES} bytes")
            return self._shard.rollback(
                batch, header, name, identity, self._peers(request.peers), request.timeline.hex()
            )

        return self._on_checkpoint("Rollback", go_back, request, context)

    def Release(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        return self._on_checkpoint("Release", self._shard.release, request, context)

    def CopyCheckpoint(self, request: pb.CopyCheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def copy(batch: WriteTransaction, header: WriteHeader, name: str, identity: str) -> bool:
            _check_name(request.source)
            return self._shard.copy_checkpoint(batch, header, name, request.source, identity)

        return self._on_checkpoint("CopyCheckpoint", copy, request, context)

    def ReadBlocks(
        self, request: pb.ReadBlocksRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadBlocksResponse]:
        with self._answering("ReadBlocks", context), self._memory.reservation("short") as reserved:
            self._shard.check_table(request.table)
            _check_name(request.checkpoint)
            _require(request.first_block <= MAX_ROWS, f"there is no block {request.first_block}")
            reserved.take(answer_bytes(max(READ_BYTES, self._shard.require_table().codec.num_bytes)))
            yield self._read_blocks(request)

    def _read_blocks(self, request: pb.ReadBlocksRequest) -> pb.ReadBlocksResponse:
        blocks, next_block = self._shard.read_blocks(request.first_block, checkpoint=request.checkpoint)
        return pb.ReadBlocksResponse(
            blocks=[pb.Block(number=number, content=content) for number, content in blocks],
            next_block=next_block or 0,
            lineage=[] if next_block else self._shard.lineage_of(request.checkpoint).marks,
        )

    def ReadSchedule(
        self, request: pb.ReadScheduleRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ReadScheduleResponse]:
        with self._answering("ReadSchedule", context), self._memory.reservation("short") as reserved:
            _require(request.start_step >= 0, f"start_step must not be negative, got {request.start_step}")
            reserved.take(answer_bytes(CHUNK_BYTES))
            digest = self._shard.schedule.digest
            rates = self._shard.learning_rates(request.start_step)
            yield pb.ReadScheduleResponse(learning_rates=to_bytes(rates), schedule=digest)

    def _peers(self, marks: Sequence[str]) -> list[str]:
        """Raises InvalidRequestError unless they are marks, none or one of each shard."""
        _require(len(marks) in (0, self._shard.num_shards), f"{len(marks)} marks of {self._shard.num_shards} shards")
        for mark in marks:
            split_mark(mark)
        return list(marks)

    def _on_checkpoint(
        self,
        method: str,
        change: Callable[[WriteTransaction, WriteHeader, str, str], bool],
        request: pb.CheckpointRequest | pb.CopyCheckpointRequest,
        context: grpc.ServicerContext,
    ) -> pb.WriteResponse:
        with self._answering(method, context):
            _check_header(request.header)
            self._shard.check_table(request.header.table)
            name = request.name
            _check_name(name)
            _require(request.header.step >= 0, "step must not be negative")
            _require(len(request.identity) in (0, _ID_BYTES), f"identity must be {_ID_BYTES} bytes")
            identity = request.identity.hex()
            applied = self._commit(context, lambda batch: change(batch, write_header(request.header), name, identity))
            if applied:
                _log.info(_EVENTS[method], extra={"checkpoint": name})
            return pb.WriteResponse(duplicate=not applied, mark=self._shard.state.mark)

    # ---- what the handlers share

    @contextlib.contextmanager
    def _answering(self, method: str, context: grpc.ServicerContext) -> Iterator[StageClock]:
        """Times the call from its arrival and turns whatever is raised into a status."""
        clock, status = StageClock("queue", arrived()), grpc.StatusCode.OK
        try:
            self._check_caller(context)
            yield clock
            context.set_trailing_metadata(self._trailer())
        except WeightServerError as error:
            status = status_of(type(error))
            if isinstance(error, FencedError):
                self._metrics.calls.fenced()
            if isinstance(error, FencedError | StorageError | DataLossError) and self._may_log(method):
                _log.warning("%s refused: %s", method, error)
            abort(context, error, self._trailer())
        except (ValueError, TypeError) as error:  # TableSpec's own checks
            status = grpc.StatusCode.INVALID_ARGUMENT
            abort(context, InvalidRequestError(str(error)), self._trailer())
        except (GeneratorExit, CancelledError, grpc.RpcError):  # the caller went away
            status = grpc.StatusCode.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - the boundary: nothing foreign crosses the wire
            _log.exception("%s failed", method)
            status = grpc.StatusCode.INTERNAL
            abort(context, WeightServerError(f"shard {self._shard.shard} failed on {method}"), self._trailer())
        finally:
            self._metrics.calls.answered(method, status.name, clock.elapsed_seconds())

    def _check_caller(self, context: grpc.ServicerContext) -> None:
        """Refuses callers of older versions, and those that were told more than the shard's data holds."""
        metadata = dict(context.invocation_metadata())
        version = str(metadata.get(VERSION_KEY, "0.1"))
        if not is_understood(version):
            raise InvalidRequestError(
                f"this shard is of version {__version__}, the caller of {version[:20]}: update the caller"
            )
        if acknowledged := metadata.get(ACKNOWLEDGED_KEY):
            self._shard.check_acknowledged(str(acknowledged))

    def _trailer(self) -> tuple[tuple[str, str], ...]:
        """What every answer ends with."""
        return ((MARK_KEY, self._shard.state.mark),)

    def _may_log(self, method: str) -> bool:
        """Refusals of a method have a line a second; the metrics count all."""
        now = time.monotonic()
        if now - self._refusal_logged.get(method, -math.inf) < 1.0:
            return False
        self._refusal_logged[method] = now
        return True

    def _commit(self, context: grpc.ServicerContext, operation: Callable[[WriteTransaction], Result]) -> Result:
        """Runs `operation` in the committer; returns once it is durable."""
        future = self._committer.submit(operation)
        if not context.add_callback(future.cancel):  # called too when the deadline passes
            future.cancel()
        return future.result()

    def _receive(
        self,
        messages: Iterator[pb.PushGradientsRequest] | Iterator[pb.WriteStateRequest],
        names: tuple[str, ...],
        reserved: Reservation,
    ) -> ReceivedWrite:
        """All messages of one write, whose float32 fields are `names`.

        Room is taken for twice as much as has arrived: little is received in vain, and who announces much and sends
        little holds little.
        """
        write: ReceivedWrite | None = None
        for message in messages:
            if write is None:
                header = message.header
                _require(message.HasField("header"), "the first message of a write has no header")
                _check_header(header)
                _require(
                    0 <= header.num_rows <= MAX_WRITE_ROWS,
                    f"{header.num_rows} rows in one write, at most {MAX_WRITE_ROWS} are taken: split it",
                )
                self._shard.check_table(header.table)
                spec = self._shard.require_table().spec
                _require(
                    header.num_rows * (8 + 4 * len(names) * spec.dim) <= MAX_WRITE_BYTES,
                    f"more than {MAX_WRITE_BYTES} bytes in one write: split it",
                )
                reserved.require(_received_bytes(spec, header.num_rows, header.num_rows, len(names)))
                write = ReceivedWrite(header, spec.dim, names)
            num_named, num_rows = write.rows_with(message)
            reserved.take_up_to(_received_bytes(spec, num_named, min(2 * num_rows, write.num_rows), len(names)))
            write.add(message)
        if write is None:
            raise InvalidRequestError("the first message of a write has no header")
        return write

    def _check_written(self, rows: Int64Array, reserved: Reservation) -> None:
        """The rows live here, and there is room for their blocks in the transaction."""
        self._shard.check_rows(rows)
        spec = self._shard.require_table().spec
        num_blocks = int(np.count_nonzero(np.diff(rows // spec.rows_per_block, prepend=-1)))
        reserved.take(blocks_bytes(spec, max(0, num_blocks - _fewest_blocks(spec, len(rows)))))


def _received_bytes(spec: TableSpec, num_named: int, num_rows: int, num_arrays: int) -> int:
    """What a write takes until it is done, of which so many rows are named, and so many here with their values."""
    blocks = blocks_bytes(spec, _fewest_blocks(spec, num_rows))
    return 8 * num_named + write_bytes(spec, num_rows, num_arrays * spec.dim) + blocks


def _fewest_blocks(spec: TableSpec, num_rows: int) -> int:
    return -(-num_rows // spec.rows_per_block)


def _encoded(chunks: Iterator[Rows], clock: StageClock) -> Iterator[tuple[int, bytes]]:
    """(number of rows, serialized FetchResponse) of each chunk."""
    for chunk in chunks:
        clock.start("serialise")
        yield len(chunk.weight), encode_fetch_response(chunk.weight, chunk.momentum_buffer, chunk.last_step)


def add_to_server(service: WeightServerService, server: grpc.Server) -> None:
    """Registers every method of the contract. Fetch alone serializes its answers itself."""
    contract = pb.DESCRIPTOR.services_by_name["WeightServer"]
    handlers = {}
    for method in contract.methods:
        behaviour = getattr(service, method.name)
        kind = (
            grpc.unary_stream_rpc_method_handler
            if inspect.isgeneratorfunction(behaviour)  # of one message too, where room for it is held until it is taken
            else (
                grpc.stream_unary_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
            )
        )
        request, response = (GetMessageClass(message) for message in (method.input_type, method.output_type))
        handlers[method.name] = kind(
            behaviour,
            request_deserializer=request.FromString,
            response_serializer=None if method.name == "Fetch" else response.SerializeToString,
        )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(contract.full_name, handlers)])


def _schedule_answer(state: State, schedule: ScheduleState, change: str) -> pb.ExtendScheduleResponse:
    pending = schedule.pending if schedule.pending is not None and schedule.pending.change == change else None
    return pb.ExtendScheduleResponse(
        horizon=max(schedule.hash.horizon, pending.stop_step if pending else 0),
        version=state.schedule_version,
        pending=pending is not None,
        schedule=pending.digest if pending else schedule.digest,
    )


def _check_header(header: pb.WriteHeader) -> None:
    _require(len(header.writer) == _ID_BYTES, f"writer must be {_ID_BYTES} bytes")
    _require(header.sequence > 0, "sequence must be positive")


def _check_name(name: str) -> None:
    _require(0 < len(name) <= MAX_NAME_CHARACTERS, f"name must have 1 to {MAX_NAME_CHARACTERS} characters")


def _require(good: bool | np.bool_, message: str) -> None:
    if not good:
        raise InvalidRequestError(message)
