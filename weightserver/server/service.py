"""Serves the contract: checks requests, calls the shard, and answers with protobuf messages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial

import grpc
from google.protobuf.message_factory import GetMessageClass

from weightserver.common.logs import follow_request
from weightserver.common.stages import arrive, call_clock
from weightserver.core.errors import InvalidRequestError
from weightserver.core.spec import MAX_ROWS
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    CHUNK_BYTES,
    MAX_NAME_CHARACTERS,
    ONE_MESSAGE_KEY,
    named_rows,
    spec_from_proto,
    to_bytes,
)
from weightserver.server.admission import StallWatch
from weightserver.server.answers import (
    describe_response,
    read_blocks_response,
)
from weightserver.server.calls import Calls
from weightserver.server.checks import (
    check_mark,
    check_name,
    given_rates,
    needed_blocks,
    require,
    require_id,
    write_header,
)
from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory, answer_bytes, fetch_bytes
from weightserver.server.write_stream import ReceivedWrite, WriteRequest, receive
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import Committer
from weightserver.shard.reading import READ_BYTES, read_blocks
from weightserver.shard.sessions import check_epoch
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

NAME = pb.DESCRIPTOR.services_by_name["WeightServer"].full_name
_CHECKPOINT_BYTES = 4 * MAX_NAME_CHARACTERS + 64
_EVENTS = {
    "Checkpoint": "checkpoint taken",
    "CopyCheckpoint": "checkpoint copied",
    "Release": "checkpoint released",
    "Rollback": "rolled back",
}

_MOST_SECONDS = 1e9
"""More than a process lives."""
_log = logging.getLogger(__name__)


class WeightServerService:
    """Handlers of one shard's calls; they run in gRPC's threads."""

    def __init__(
        self,
        shard: Shard,
        committer: Committer,
        metrics: ShardMetrics,
        memory: RequestMemory,
        *,
        stalls: StallWatch | None = None,
        slow_seconds: float = math.inf,
        on_write: Callable[[str], object] = lambda refused: None,
    ) -> None:
        self._shard = shard
        self._metrics = metrics
        self._memory = memory
        self.calls = Calls(
            shard, committer, metrics, stalls or StallWatch(memory), slow_seconds=slow_seconds, on_write=on_write
        )

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        self._memory.reserve(answer_bytes(len(self._shard.state.checkpoints) * _CHECKPOINT_BYTES), context)
        return describe_response(self._shard)

    def CreateTable(self, request: pb.CreateTableRequest, context: grpc.ServicerContext) -> pb.CreateTableResponse:
        spec, before = spec_from_proto(request.spec), self._shard.spec
        epoch = request.epoch if request.HasField("epoch") else None
        require_id(request.identity, "identity", optional=True)
        identity = self.calls.commit(context, lambda batch: batch.create_table(spec, request.identity, epoch))
        if before is None:
            _log.info("table created", extra=asdict(spec))
        return pb.CreateTableResponse(identity=identity)

    def ExtendTable(self, request: pb.ExtendTableRequest, context: grpc.ServicerContext) -> pb.ExtendTableResponse:
        self._shard.require_table(request.table)
        require(request.num_rows <= MAX_ROWS, f"num_rows must lie in 1..{MAX_ROWS}, got {request.num_rows}")
        epoch = request.epoch if request.HasField("epoch") else None
        if self.calls.commit(context, lambda batch: batch.extend_table(request.num_rows, epoch)):
            _log.info("table extended", extra={"num_rows": request.num_rows})
        return pb.ExtendTableResponse()

    def DropTable(self, request: pb.DropTableRequest, context: grpc.ServicerContext) -> pb.DropTableResponse:
        epoch = request.epoch if request.HasField("epoch") else None
        before = self._shard.state
        self.calls.commit(context, lambda batch: batch.drop_table(epoch))
        _log.info("table dropped", extra={"run": before.run, "stored_rows": before.rows_stored})
        return pb.DropTableResponse()

    def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.ServicerContext) -> pb.OpenSessionResponse:
        require(request.epoch > 0, "epoch must be positive")
        require(len(request.name) <= MAX_NAME_CHARACTERS, f"name has more than {MAX_NAME_CHARACTERS} characters")
        if request.session_id or not request.join:  # joining an epoch that nobody opened needs no id
            require_id(request.session_id, "session_id")
        self._shard.require_table()
        if request.leave:  # nothing to do if the session was superseded meanwhile
            self._shard.lease.release(request.session_id, request.holder.id)
        elif request.join:
            check_epoch(self._shard.state, request.epoch, request.session_id)
            self._note_lease(request)
        else:
            peers = self._peers(request.peers)
            self.calls.commit(
                context,
                lambda batch: batch.open_session(
                    request.name,
                    request.epoch,
                    request.session_id,
                    peers=peers,
                    force=request.force,
                    take_over=request.take_over,
                    holder_id=request.holder.id,
                ),
            )
            _log.info("session opened", extra={"run": request.name})
        return pb.OpenSessionResponse()

    def _note_lease(self, request: pb.OpenSessionRequest) -> None:
        if request.HasField("holder"):
            holder = request.holder
            is_name = holder.name.isprintable() and 0 < len(holder.name) <= MAX_NAME_CHARACTERS
            require(is_name, f"holder must have a printable name of at most {MAX_NAME_CHARACTERS} characters")
            require_id(holder.id, "holder's id")
            require(0 <= holder.held_seconds < _MOST_SECONDS, "held_seconds must be the time of one process")
            self._shard.lease.renew(request.session_id, holder.id, holder.name, holder.held_seconds)

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Generator[bytes, None, None]:
        """Yields serialized FetchResponses."""
        clock = call_clock()
        table = self._shard.require_table(request.table)
        named, rates = named_rows(request.rows), given_rates(request.rates)
        num_bytes = fetch_bytes(table.spec, named.count, self._shard.num_other_rates(rates))
        self._memory.reserve(num_bytes, context)
        rows = named.array()
        clock.num_rows = len(rows)
        self._shard.check_rows(rows)
        step = None if request.raw else request.step
        chunks = self._shard.fetch(
            rows,
            step=step,
            state=request.state,
            checkpoint=request.checkpoint or None,
            checkpoint_id=request.identity,
            rates=rates,
            number=request.table,  # again: it may have been replaced while the call waited for memory
            clock=clock,
        )
        num_rows = num_bytes = 0
        try:
            for part, message in chunks:
                clock.start("send")
                num_rows += part
                num_bytes += len(message)
                yield message
        finally:
            self._metrics.count("fetch", len(rows), num_rows, num_bytes)
        clock.start("end")
        self._metrics.fetch_stages(clock.seconds)

    def fetch_at_once(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> bytes:
        """The only message of a fetch, which gRPC sends together with the status."""
        with closing(self.Fetch(request, context)) as messages:
            message = next(messages, None)
            if message is None or next(messages, None) is not None:
                raise InvalidRequestError(
                    f"the answer is not one message: ask for fewer rows, or omit {ONE_MESSAGE_KEY}"
                )
            return message

    def PushGradients(
        self, request_iterator: Iterator[pb.PushGradientsRequest], context: grpc.ServicerContext
    ) -> pb.WriteResponse:
        def push(batch: ShardChange, write: ReceivedWrite) -> bool:
            return batch.push_gradients(write.header, write.rows, write.values["gradients"])

        return self._write("push", ("gradients",), push, request_iterator, context)

    def WriteState(
        self, request_iterator: Iterator[pb.WriteStateRequest], context: grpc.ServicerContext
    ) -> pb.WriteResponse:
        def replace(batch: ShardChange, write: ReceivedWrite) -> bool:
            weight, momentum_buffer = write.values["weight"], write.values["momentum_buffer"]
            return batch.write_state(write.header, write.rows, weight, momentum_buffer, write.last_step)

        return self._write("write_state", ("weight", "momentum_buffer"), replace, request_iterator, context)

    def _write(
        self,
        operation: str,
        names: tuple[str, ...],
        change: Callable[[ShardChange, ReceivedWrite], bool],
        messages: Iterator[WriteRequest],
        context: grpc.ServicerContext,
    ) -> pb.WriteResponse:
        """Receives a write, whose fields of values are `names`, and commits it."""
        clock = call_clock()
        write = receive(messages, names, self._shard, partial(self._memory.reserve, context=context))
        clock.num_rows = len(write.rows)
        self._shard.check_rows(write.rows)
        applied = self.calls.commit(context, lambda batch: change(batch, write))
        clock.start("end")
        num_bytes = sum(values.nbytes for values in write.values.values())
        self._metrics.wrote(operation, len(write.rows), num_bytes, clock.seconds, duplicate=not applied)
        return pb.WriteResponse(duplicate=not applied)

    def SettleWrite(self, request: pb.SettleWriteRequest, context: grpc.ServicerContext) -> pb.SettleWriteResponse:
        header = write_header(request.header)
        self._shard.require_table(request.header.table)
        applied = self.calls.commit(context, lambda batch: batch.settle_write(header))
        return pb.SettleWriteResponse(applied=applied)

    def Checkpoint(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def take(batch: ShardChange, header: WriteHeader) -> bool:
            return batch.checkpoint(header, request.name, request.identity, self._peers(request.peers))

        answer = self._on_checkpoint("Checkpoint", take, request, context, self._shard.check_contents)
        kept = [known for known in self._shard.state.checkpoints if known.name == request.name]
        answer.identity = kept[0].checkpoint_id if kept else b""  # empty if released meanwhile
        return answer

    def Rollback(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def go_back(batch: ShardChange, header: WriteHeader) -> bool:
            require_id(request.timeline, "timeline")
            peers, timeline = self._peers(request.peers), request.timeline.hex()
            return batch.rollback(header, request.name, request.identity, peers, timeline)

        return self._on_checkpoint("Rollback", go_back, request, context)

    def Release(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        return self._on_checkpoint(
            "Release", lambda batch, header: batch.release(header, request.name), request, context
        )

    def CopyCheckpoint(self, request: pb.CopyCheckpointRequest, context: grpc.ServicerContext) -> pb.WriteResponse:
        def copy(batch: ShardChange, header: WriteHeader) -> bool:
            check_name(request.source)
            return batch.copy_checkpoint(header, request.name, request.source, request.identity)

        return self._on_checkpoint("CopyCheckpoint", copy, request, context)

    def ReadBlocks(self, request: pb.ReadBlocksRequest, context: grpc.ServicerContext) -> pb.ReadBlocksResponse:
        table = self._shard.require_table(request.table)
        check_name(request.checkpoint)
        require(request.first_block <= MAX_ROWS, f"there is no block {request.first_block}")
        num_bytes = max(READ_BYTES, table.codec.num_bytes)
        self._memory.reserve(answer_bytes(num_bytes), context)
        is_needed = needed_blocks(request, table.spec.rows_per_block)
        found = read_blocks(
            self._shard.storage,
            table,
            request.first_block,
            checkpoint=request.checkpoint,
            since=request.since,
            is_needed=is_needed,
        )
        return read_blocks_response(found)

    def ReadSchedule(self, request: pb.ReadScheduleRequest, context: grpc.ServicerContext) -> pb.ReadScheduleResponse:
        require(request.start_step >= 0, f"start_step must not be negative, got {request.start_step}")
        self._memory.reserve(answer_bytes(CHUNK_BYTES), context)
        return pb.ReadScheduleResponse(learning_rates=to_bytes(self._shard.learning_rates(request.start_step)))

    def _peers(self, marks: Sequence[str]) -> list[str]:
        """Raises InvalidRequestError unless `marks` is empty or has one valid mark per shard."""
        require(len(marks) in (0, self._shard.num_shards), f"{len(marks)} marks for {self._shard.num_shards} shards")
        for mark in marks:
            check_mark(mark)
        return list(marks)

    def _on_checkpoint(
        self,
        method: str,
        change: Callable[[ShardChange, WriteHeader], bool],
        request: pb.CheckpointRequest | pb.CopyCheckpointRequest,
        context: grpc.ServicerContext,
        first: Callable[[], None] = lambda: None,
    ) -> pb.WriteResponse:
        header = write_header(request.header)
        self._shard.require_table(request.header.table)
        check_name(request.name)
        require(header.step >= 0, "step must not be negative")
        require_id(request.identity, "identity", optional=True)
        applied = self.calls.commit(context, lambda batch: change(batch, header), first)
        if applied:
            _log.info(_EVENTS[method], extra={"checkpoint": request.name})
        return pb.WriteResponse(duplicate=not applied)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handlers by method, and that of a fetch whose caller wants one message."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler], fetch_at_once: grpc.RpcMethodHandler) -> None:
        self._handlers = handlers
        self._fetch_at_once = fetch_at_once

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method not in self._handlers:
            return None
        arrive()
        follow_request(metadata)
        if method == f"/{NAME}/Fetch" and any(key == ONE_MESSAGE_KEY for key, _ in metadata):
            return self._fetch_at_once
        return self._handlers[method]


def add_to_server(service: WeightServerService, server: grpc.Server) -> None:
    """Registers every method of the contract. Fetch serializes its answers itself."""
    calls, handlers = service.calls, {}
    for method in pb.DESCRIPTOR.services_by_name["WeightServer"].methods:
        request, response = (GetMessageClass(message) for message in (method.input_type, method.output_type))
        behaviour = getattr(service, method.name)
        if method.server_streaming:
            handler = calls.handler_in_parts(method.name, behaviour, request.FromString)
        else:
            handler = calls.handler(
                method.name,
                behaviour,
                request.FromString,
                response.SerializeToString,
                of_one=not method.client_streaming,
            )
        handlers[f"/{NAME}/{method.name}"] = handler
    fetch_at_once = calls.handler("Fetch", service.fetch_at_once, pb.FetchRequest.FromString, of_one=True)
    server.add_generic_rpc_handlers([_Handlers(handlers, fetch_at_once)])
