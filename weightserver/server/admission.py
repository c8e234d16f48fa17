"""Admission of calls: bounds what a shard takes on at a time, so that no load makes it grow or stall.

Three things are bounded; calls beyond a bound are refused with a hint when to retry:

- calls in progress and calls that wait, in lanes (`lanes`);
- bytes that requests and their answers hold (`request_memory`), reserved as they arrive and before they are made, and
  released when the call ends;
- the time for which a silent caller is waited for: a call whose caller neither sends nor receives a message is
  cancelled, and much sooner if others find its lane, or the memory, full.

A shard's memory stays below

    BASE_BYTES + limit of `RequestMemory` + MAX_CALLS · MAX_REQUEST_BYTES + SCHEDULE_BYTES_PER_STEP · horizon

where the third term is messages that have not arrived completely. This project's own clients send messages of 1 MiB,
which makes it 73 MiB; only callers that begin the largest message and never finish it reach its 2.3 GiB.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from weightserver.common.logs import follow_request
from weightserver.common.malloc import own_bytes, return_free_memory
from weightserver.common.stages import arrive, call_clock
from weightserver.core.errors import InvalidRequestError, OverloadedError, WeightServerError
from weightserver.protocol.codec import ONE_MESSAGE_KEY, RETRY_HINT
from weightserver.protocol.status import status_of
from weightserver.server.awake_clock import AwakeClock
from weightserver.server.lanes import LANES, MAX_CALLS, MAX_WAITING, RETRY_AFTER_MS, Lane, LaneFullError, lane_of
from weightserver.server.request_memory import RequestMemory

BASE_BYTES = 384 << 20
"""A shard without requests, gRPC's memory for connections, and what malloc keeps."""
_KEPT_BYTES = 160 << 20
"""Free memory of the allocator beyond this, and beyond the reservations, is returned to the kernel."""
MAX_THREADS = MAX_CALLS + sum(MAX_WAITING.values()) + 16
"""One for each of these calls, and some that refuse others."""
MAX_UNSORTED_CALLS = 1024
"""Includes calls that have no thread yet, which refuses them within milliseconds. gRPC refuses further ones itself."""
SCHEDULE_BYTES_PER_STEP = 24
"""A learning rate and its transfer products, twice while the schedule is extended."""
_PRESSED_SECONDS = 1.0
"""How long a caller may be silent while others wait for its place or its memory."""
_WATCH_SECONDS = 0.25


class _Call:
    """A call in progress."""

    def __init__(self, lane: str, context: grpc.ServicerContext, clock: AwakeClock) -> None:
        self.lane = lane
        self.context = context
        self.waits_since: float | None = None
        self._clock = clock

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the time in which the caller must send or receive a message."""
        self.begin_to_wait()
        try:
            yield
        finally:
            self.waits_since = None

    def begin_to_wait(self) -> None:
        self.waits_since = self._clock.now()


class CallLimiter(grpc.ServerInterceptor):  # type: ignore[misc]
    """Keeps every call of every service within the bounds.

    Reads all requests as streams, even those of one message, for which gRPC would wait in a thread without a deadline.
    Answers all of them as streams too, which look the same on the wire: gRPC would take the answer of a unary handler
    out of the reservation and keep it as long as the caller does not read. Only a fetch that asks for one message is
    answered by a unary handler, and what it holds is released when gRPC says that the call has ended.

    Args:
        stall_seconds: how long a caller may neither send nor receive a message.
        on_refused: called with the lane of each call that is refused because the lane is full.
        on_cut_off: called with the lane of each call that is cancelled because its caller was silent.
    """

    def __init__(
        self,
        memory: RequestMemory,
        *,
        stall_seconds: float,
        on_refused: Callable[[str], None],
        on_cut_off: Callable[[str], None],
    ) -> None:
        self._memory = memory
        memory.on_full = lambda lane: self._cut_off(_PRESSED_SECONDS, lane)
        self._stall_seconds = stall_seconds
        self._on_refused = on_refused
        self._on_cut_off = on_cut_off
        self._lanes = {name: Lane(name, self._refused) for name in LANES}
        self._calls: set[_Call] = set()
        self._clock = AwakeClock()

    def start(self) -> None:
        """Starts the thread that cuts silent callers off and returns free memory, for as long as the process lives."""
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def num_waiting(self, lane: str) -> int:
        """Calls that wait for a place in their lane."""
        return self._lanes[lane].num_waiting

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        arrive()
        follow_request(handler_call_details.invocation_metadata)
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        lane = lane_of(handler_call_details.method)
        if lane == "watch":
            return self._watching(handler)
        if lane == "Fetch" and any(key == ONE_MESSAGE_KEY for key, _ in handler_call_details.invocation_metadata):
            return self._answering_at_once(lane, handler)
        return self._answering(lane, handler)

    def _answering(self, lane: str, handler: Any) -> Any:
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        def answer(received: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._admitted(lane, context) as call, self._requests(received, call, handler) as requests:
                answers = behaviour(requests if handler.request_streaming else _only(requests), context)
                if not handler.response_streaming:
                    answers = _one(answers)
                try:
                    for message in answers:
                        with call.waiting():
                            yield message
                finally:
                    answers.close()  # answers that the caller does not wait for are not made

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    def _answering_at_once(self, lane: str, handler: Any) -> Any:
        """Answers a fetch with the only message of its handler's stream, sent together with the status. No thread waits
        until it is sent, but the call keeps its place, and memory for the message, until then."""

        def answer(received: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with ExitStack() as until_sent:
                call = until_sent.enter_context(self._admitted(lane, context))
                reserved = until_sent.enter_context(self._memory.reservation(lane))
                with self._requests(received, call, handler) as requests:
                    message = _only_answer(handler.unary_stream(_only(requests), context))
                reserved.take(2 * len(message))  # the message, and gRPC's copy
                call.begin_to_wait()
                leave = until_sent.pop_all().close
            if not context.add_callback(leave):  # the caller is gone
                leave()
            return message

        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    def _watching(self, handler: Any) -> Any:
        """Handles a call that needs no thread once its request has arrived."""

        def answer(received: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[Any], None]) -> None:
            with self._admitted("health", context) as call:
                with self._requests(received, call, handler) as requests:
                    request = _only(requests)
                watch = self._lanes["watch"]
                watch.enter(context)
                if not context.add_callback(watch.leave):
                    watch.leave()
                    return
            handler.unary_stream(request, context, send)

        answer.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _admitted(self, name: str, context: grpc.ServicerContext) -> Iterator[_Call]:
        lane = self._lanes[name]
        with self._waited_for(name, context) as call:
            lane.enter(context)
            try:
                yield call
            finally:
                lane.leave()

    def _refused(self, lane: str) -> None:
        self._on_refused(lane)
        self._cut_off(_PRESSED_SECONDS, lane)

    @contextmanager
    def _waited_for(self, lane: str, context: grpc.ServicerContext) -> Iterator[_Call]:
        """Registers a call for cancellation if it stalls; errors become its status."""
        call = _Call(lane, context, self._clock)
        self._calls.add(call)
        try:
            yield call
        except WeightServerError as error:
            abort(context, error)
        except CancelledError:
            context.abort(grpc.StatusCode.CANCELLED, "the caller is gone")
        finally:
            self._calls.discard(call)

    @contextmanager
    def _requests(self, received: Iterator[bytes], call: _Call, handler: Any) -> Iterator[Iterator[Any]]:
        """The call's messages, each in memory until the next is asked for."""
        parse, clock = handler.request_deserializer, call_clock()

        def requests() -> Generator[Any, None, None]:
            while True:
                stage = clock.start("receive")
                try:
                    with call.waiting():
                        data = next(received, None)
                except grpc.RpcError as error:
                    error.__traceback__ = None  # gRPC keeps the error in a cycle, with everything that its frames hold
                    raise CancelledError from None
                finally:
                    clock.start(stage)
                if data is None:
                    return
                with self._memory.reservation(call.lane) as reserved:
                    reserved.take(3 * len(data))  # as received, parsed, and the field being processed
                    yield _parsed(parse, data)

        messages = requests()
        try:
            yield messages
        finally:
            messages.close()

    def _watch(self) -> None:
        seconds = min(self._stall_seconds / 4, _WATCH_SECONDS)
        while True:
            self._clock.look(seconds)
            time.sleep(seconds)
            self._cut_off(self._stall_seconds)
            for lane in self._lanes.values():
                if lane.num_waiting:
                    self._cut_off(_PRESSED_SECONDS, lane.name)
            if own_bytes() > _KEPT_BYTES + self._memory.used_bytes:
                gc.collect()  # exceptions keep frames, which keep the arrays of failed calls
                return_free_memory()  # malloc keeps what requests have freed

    def _cut_off(self, seconds: float, lane: str | None = None) -> None:
        """Cancels the calls whose callers have been silent for `seconds`."""
        latest = self._clock.now() - seconds
        for call in list(self._calls):
            since = call.waits_since
            if since is not None and since < latest and lane in (None, call.lane):
                call.waits_since = None
                call.context.cancel()
                self._on_cut_off(call.lane)


def abort(
    context: grpc.ServicerContext, error: WeightServerError, trailer: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """Ends the call with the error's status, with a hint when to retry if it may succeed later."""
    if isinstance(error, OverloadedError):
        retry_after_ms = error.retry_after_ms if isinstance(error, LaneFullError) else RETRY_AFTER_MS
        trailer = (*trailer, (RETRY_HINT, str(retry_after_ms)))
    context.set_trailing_metadata(trailer)
    context.abort(status_of(type(error)), str(error))
    raise AssertionError("abort() raises")


def _only(requests: Iterator[Any]) -> Any:
    for request in requests:
        return request
    raise InvalidRequestError("the call contains no message")


def _only_answer(answers: Generator[bytes, None, None]) -> bytes:
    """The message of a stream of one, whose handler has ended."""
    with closing(answers):
        message = next(answers, None)
        if message is None or next(answers, None) is not None:
            raise InvalidRequestError(f"the answer is not one message: ask for fewer rows, or omit {ONE_MESSAGE_KEY}")
        return message


def _one(answer: Any) -> Generator[Any, None, None]:
    yield answer


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidRequestError("the message cannot be parsed: does the client have the same version?") from None
