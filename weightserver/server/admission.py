"""What a shard takes on at a time, so that no load makes it grow or stand still.

Three things are bounded, and what is beyond them is refused with a hint when to try again:

- calls in progress, in lanes (`LANES`), so that callers of one kind keep out no others, and a thread for each of them;
  and the calls that wait for a place in their lane, in a thread too (`MAX_WAITING`), of which nothing is received yet;
- the bytes that requests and their answers hold (`RequestMemory`), taken as they arrive and before they are made, given
  back when the call ends; no lane may take all of them;
- the time that a silent caller is waited for: one that neither sends nor takes a message is cut off, and much sooner
  when others find its lane, or the memory, full.

A lane is fair: a place that becomes free goes to the call that has tried for the longest time. A client says so when it
tries again (`WAITED_KEY`), so a call that was refused, or whose deadline passed while it waited, is not behind those
that came later. When more calls want to wait than may, the one that has tried for the shortest time is refused. So
clients that ask equally often are served equally often, however many they are.

A shard's memory stays below

    BASE_BYTES + limit of `RequestMemory` + MAX_CALLS · MAX_REQUEST_BYTES + SCHEDULE_BYTES_PER_STEP · horizon

where the third term is messages that have not arrived whole yet. This project's own clients send messages of 1 MiB,
which makes it 72 MiB; only callers that begin the largest message and never end it reach its 2.3 GiB.
"""

from __future__ import annotations

import bisect
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from weightserver.common.logs import follow_request
from weightserver.common.malloc import own_bytes, return_free_memory
from weightserver.common.stages import arrive
from weightserver.core.errors import InvalidRequestError, OverloadedError, WeightServerError
from weightserver.core.spec import TableSpec
from weightserver.protocol.codec import CHUNK_BYTES, RETRY_HINT, WAITED_KEY
from weightserver.protocol.status import status_of

BASE_BYTES = 384 << 20
"""A shard without requests, what gRPC holds of the connections, and what malloc keeps."""
_KEPT_BYTES = 160 << 20
"""Beyond this, and what requests have reserved, the allocator's free memory goes back to the kernel."""
LANES = {"Fetch": 24, "write": 16, "short": 16, "health": 16, "watch": 64}
"""Calls at a time. A watch of the health takes no thread once its message is there; until then it is in "health"."""
MAX_CALLS = sum(calls for lane, calls in LANES.items() if lane != "watch")
"""Calls at a time that are received, worked on or answered."""
MAX_WAITING = {"Fetch": 64, "write": 64, "short": 64, "health": 0, "watch": 0}
"""Calls that wait for a place in their lane. Health is asked without a token: none of its calls takes a thread so."""
MAX_THREADS = MAX_CALLS + sum(MAX_WAITING.values()) + 16
"""One for each of these, and some that refuse."""
MAX_UNSORTED_CALLS = 1024
"""Those too that have no thread yet, which refuses them within milliseconds. gRPC refuses more by itself."""
SCHEDULE_BYTES_PER_STEP = 24
"""A learning rate and its transfer products, twice while the schedule is extended."""
_LANE_OF_METHOD = {
    "Fetch": "Fetch",
    "PushGradients": "write",
    "WriteState": "write",
    "Check": "health",
    "List": "health",
    "Watch": "watch",
}
_RETRY_AFTER_MS = 100
"""Time in which the calls of a lane are thought to end."""
_PRESSED_SECONDS = 1.0
"""How long a caller of a full lane, or while the memory is full, may be silent while others ask for its place."""
_WATCH_SECONDS = 0.25
_LONGEST_WAIT_SECONDS = 86_400.0
_PAGE = 4096
_BYTES_PER_ROW_NAMED = 48
"""A row's number, and the arrays that checking and dealing it to blocks makes meanwhile."""
_SHARE_KEPT = 8
"""One part in so many of the memory is kept for other lanes than the one that holds the rest."""


# ---- what requests cost


def fetch_bytes(spec: TableSpec, num_rows: int) -> int:
    """The most that a fetch holds: its rows' numbers, and one chunk read, corrected, framed and sent."""
    rows_per_chunk = max(1, CHUNK_BYTES // (4 * spec.dim)) + spec.rows_per_block
    return _BYTES_PER_ROW_NAMED * num_rows + 4 * min(num_rows, rows_per_chunk) * (8 + 8 * spec.dim)


def write_bytes(spec: TableSpec, num_rows: int, values_per_row: int) -> int:
    """What a write becomes: its rows' numbers, and float32 values with a flag each that they are finite."""
    return num_rows * (_BYTES_PER_ROW_NAMED + 5 * values_per_row)


def blocks_bytes(spec: TableSpec, num_blocks: int) -> int:
    """Blocks in the memory of a transaction until it is on disk: whole pages, and one for each one's key."""
    block_bytes = 64 + spec.rows_per_block * (9 + 8 * spec.dim)
    return num_blocks * (-(-block_bytes // _PAGE) + 1) * _PAGE


def answer_bytes(num_bytes: int) -> int:
    """An answer of one message: its parts, the message of them or the bytes of that, and gRPC's copy."""
    return 3 * num_bytes


class RequestMemory:
    """The bytes that the calls in progress may hold together, those of one lane seven eighths of them. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lane_bytes = limit_bytes - limit_bytes // _SHARE_KEPT
        self.on_full: Callable[[str | None], None] = lambda lane: None
        """Told when there is no room: the lane that has taken all it may, None where all of them together have."""
        self._lock = threading.Lock()
        self._used = Counter(dict.fromkeys(LANES, 0))

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    @contextmanager
    def reservation(self, lane: str) -> Iterator[Reservation]:
        """Takes bytes as they are asked for, and gives all of them back when the context is left."""
        reserved = Reservation(self, lane)
        try:
            yield reserved
        finally:
            with self._lock:
                self._used[lane] -= reserved.num_bytes

    def _take(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            lane_full = self._used[lane] + num_bytes > self.lane_bytes
            full = lane_full or self._used.total() + num_bytes > self.limit_bytes
            if not full:
                self._used[lane] += num_bytes
        if full:
            self.on_full(lane if lane_full else None)
            raise OverloadedError("the shard has no memory for another request now: try again")


class Reservation:
    """What one call has taken of `RequestMemory`."""

    def __init__(self, memory: RequestMemory, lane: str) -> None:
        self._memory = memory
        self._lane = lane
        self.num_bytes = 0

    def require(self, num_bytes: int) -> None:
        """Raises InvalidRequestError where there is never room for so many in all. Takes nothing."""
        if num_bytes > self._memory.lane_bytes:
            raise InvalidRequestError(
                f"the request needs {num_bytes >> 20} MiB of memory, the shard has {self._memory.lane_bytes >> 20} MiB "
                "for all of its kind: split it, or give the shard more --request-memory-mib"
            )

    def take(self, num_bytes: int) -> None:
        """Raises OverloadedError while there is no room, InvalidRequestError where there is never."""
        if num_bytes > 0:
            self.require(self.num_bytes + num_bytes)
            self._memory._take(self._lane, num_bytes)
            self.num_bytes += num_bytes

    def take_up_to(self, num_bytes: int) -> None:
        """Takes what lacks to so many in all. Raises as `take`."""
        self.take(num_bytes - self.num_bytes)


# ---- calls


class _LaneFullError(OverloadedError):
    """As many calls of this kind are in progress, and wait, as may."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


@dataclass(order=True)
class _Turn:
    """A call that waits for a place. `place` becomes None when it has one, or the error with which it is refused."""

    since: float
    """When its caller first tried, on the clock of `time.monotonic`."""
    place: Future[None] = field(default_factory=Future, compare=False)


class Lane:
    """The places for calls of one kind, and the calls that wait for one. Thread-safe.

    Args:
        on_refused: told the lane's name for each call that is refused.
    """

    def __init__(self, name: str, on_refused: Callable[[str], None]) -> None:
        self.name = name
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._num_free = LANES[name]
        self._waiting: list[_Turn] = []  # nobody while a place is free; who first tried earliest comes first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, context: grpc.ServicerContext) -> None:
        """Takes a place, waits for one where none is free.

        Raises:
            OverloadedError: others have waited for longer, and no more may wait.
            CancelledError: the caller is gone.
        """
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return
            turn = _Turn(time.monotonic() - _waited_seconds(context))
            bisect.insort(self._waiting, turn)
            refused = self._waiting.pop() if len(self._waiting) > MAX_WAITING[self.name] else None
        if refused is not None:
            self._refuse(refused)
        if not context.add_callback(lambda: self._give_up(turn)):  # called too when the deadline passes
            self._give_up(turn)
        turn.place.result()

    def leave(self) -> None:
        """Gives a place back, or to the call that has waited for the longest time."""
        with self._lock:
            if self._waiting:
                self._waiting.pop(0).place.set_result(None)
            else:
                self._num_free += 1

    def _give_up(self, turn: _Turn) -> None:
        with self._lock:
            if any(other is turn for other in self._waiting):
                self._waiting = [other for other in self._waiting if other is not turn]
                turn.place.cancel()

    def _refuse(self, turn: _Turn) -> None:
        places, waiting = LANES[self.name], len(self._waiting)
        self._on_refused(self.name)
        turn.place.set_exception(
            _LaneFullError(
                f"the shard is busy with {places} {self.name} calls, and {waiting} wait: try again",
                retry_after_ms=_RETRY_AFTER_MS * (1 + waiting // places),
            )
        )


class _Call:
    """A call in progress."""

    def __init__(self, lane: str, context: grpc.ServicerContext) -> None:
        self.lane = lane
        self.context = context
        self.waits_since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the caller has to do something."""
        self.waits_since = time.monotonic()
        try:
            yield
        finally:
            self.waits_since = None


class CallLimiter(grpc.ServerInterceptor):  # type: ignore[misc]
    """Keeps every call of every service within the bounds.

    It reads all requests as streams, also those of one message: gRPC would wait for that one without end, in a thread.
    It answers all of them as streams too, which are the same on the wire: gRPC would take an answer of one message from
    the call that made it, and keep it without end for a caller that does not read.

    Args:
        stall_seconds: how long a caller may neither send nor take a message.
        on_refused: told the lane of each call that was refused because it is full.
        on_cut_off: told the lane of each call whose caller was silent for too long.
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
        lane = _LANE_OF_METHOD.get(handler_call_details.method.rpartition("/")[2], "short")
        return self._watching(handler) if lane == "watch" else self._answering(lane, handler)

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
                    answers.close()  # what the caller does not wait for is not made

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    def _watching(self, handler: Any) -> Any:
        """A call that goes on without a thread once its request is there."""

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
        """A call that is cut off when it stalls; errors become its status."""
        call = _Call(lane, context)
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
        parse = handler.request_deserializer

        def requests() -> Generator[Any, None, None]:
            while True:
                try:
                    with call.waiting():
                        data = next(received, None)
                except grpc.RpcError as error:
                    error.__traceback__ = None  # gRPC keeps it in a cycle, with all that the frames hold
                    raise CancelledError from None
                if data is None:
                    return
                with self._memory.reservation(call.lane) as reserved:
                    reserved.take(3 * len(data))  # as it came, parsed, and the field that is worked on
                    yield _parsed(parse, data)

        messages = requests()
        try:
            yield messages
        finally:
            messages.close()

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._stall_seconds / 4, _WATCH_SECONDS))
            self._cut_off(self._stall_seconds)
            for lane in self._lanes.values():
                if lane.num_waiting:
                    self._cut_off(_PRESSED_SECONDS, lane.name)
            if own_bytes() > _KEPT_BYTES + self._memory.used_bytes:
                gc.collect()  # exceptions keep frames, and those the arrays of calls that failed
                return_free_memory()  # malloc keeps what requests gave back

    def _cut_off(self, seconds: float, lane: str | None = None) -> None:
        """Ends the calls whose callers have been silent for so long."""
        latest = time.monotonic() - seconds
        for call in list(self._calls):
            since = call.waits_since
            if since is not None and since < latest and lane in (None, call.lane):
                call.waits_since = None
                call.context.cancel()
                self._on_cut_off(call.lane)


def abort(
    context: grpc.ServicerContext, error: WeightServerError, trailer: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """Ends the call with the error's status; one that may succeed later says how soon."""
    if isinstance(error, OverloadedError):
        retry_after_ms = error.retry_after_ms if isinstance(error, _LaneFullError) else _RETRY_AFTER_MS
        trailer = (*trailer, (RETRY_HINT, str(retry_after_ms)))
    context.set_trailing_metadata(trailer)
    context.abort(status_of(type(error)), str(error))
    raise AssertionError("abort() raises")


def _waited_seconds(context: grpc.ServicerContext) -> float:
    """For how long the caller says it has tried; 0 where it says nothing."""
    for key, value in context.invocation_metadata():
        if key == WAITED_KEY and value.isascii() and value.isdigit():
            return min(int(value[:12]) / 1000, _LONGEST_WAIT_SECONDS)
    return 0.0


def _only(requests: Iterator[Any]) -> Any:
    for request in requests:
        return request
    raise InvalidRequestError("the call brought no message")


def _one(answer: Any) -> Generator[Any, None, None]:
    yield answer


def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidRequestError("the message is none of this contract: is the client of the same version?") from None
