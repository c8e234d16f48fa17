"""A gRPC server before one shard that treats what passes as a bad network would: at random, from a seed.

Messages are opaque bytes here; which calls there are, and which of them stream, is read from the contract.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NoReturn, Self

import grpc

from weightserver.protocol._generated import weight_server_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightServer"]
_NUM_THREADS = 256
"""More than all attempts of callers and those held after their callers continued: none may wait for another."""
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
]


class Fault(StrEnum):
    """The faults of a call, besides a delay."""

    REFUSED = "refused"
    """Not forwarded; UNAVAILABLE at once."""
    SWALLOWED = "swallowed"
    """Not forwarded; no answer before the caller's deadline."""
    REPLY_LOST = "reply lost"
    """Forwarded and answered by the shard; UNAVAILABLE for the caller."""
    TWIN = "twin"
    """Forwarded twice at the same time."""
    WRITE_CUT = "write cut"
    """Some of a write's messages forwarded, but never its end; UNAVAILABLE for the caller."""
    FETCH_CUT = "fetch cut"
    """Some messages of an answer passed on, then UNAVAILABLE though there were more."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The probability of each fault of a call, and its duration."""

    refuse: float = 0
    swallow: float = 0
    lose_reply: float = 0
    twin: float = 0
    replay_seconds: float = math.inf
    """Mean time between two old calls forwarded again, each drawn from all that were ever answered but fetches."""
    delay: float = 0
    """Forwarded later, so that others overtake it, even if the caller's attempt is over then."""
    delay_seconds: tuple[float, float] = (0.001, 1.0)
    """Shortest and longest delay; the logarithm is uniform between them."""
    cut_write: float = 0
    cut_fetch: float = 0
    timeout_seconds: float = 5
    """Deadline of requests that are forwarded without a waiting caller."""

    def __post_init__(self) -> None:
        if self.refuse + self.swallow + max(self.lose_reply + self.twin + self.cut_write, self.cut_fetch) > 1:
            raise ValueError(f"a call meets one fault at most, but their probabilities add up beyond 1: {self}")


@dataclass(frozen=True)
class Request:
    """One call as it came."""

    method: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...]


class FaultyProxy:
    """Stands at `address` before the shard at `target`. A context manager; safe to call from any thread.

    What the shard really answers, errors included, is passed on unchanged. Each attempt of a caller meets at most
    one fault in addition to a delay. The seed gives their order; which attempt meets which depends on when it arrives.
    """

    def __init__(self, target: str, *, seed: int, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        dropped = {Fault.REFUSED: faults.refuse, Fault.SWALLOWED: faults.swallow}
        self._call_faults = dropped | {Fault.TWIN: faults.twin, Fault.REPLY_LOST: faults.lose_reply}
        self._write_faults = self._call_faults | {Fault.WRITE_CUT: faults.cut_write}
        self._fetch_faults = dropped | {Fault.FETCH_CUT: faults.cut_fetch}
        self._old: list[Request] = []
        self._closing = threading.Event()
        self._channel = grpc.insecure_channel(target, _OPTIONS)
        self._stubs: dict[str, Any] = {}
        handlers = {}
        stub: Any
        handler: Any
        behaviour: Any
        for method in _SERVICE.methods:
            if method.server_streaming:
                stub, handler, behaviour = self._channel.unary_stream, grpc.unary_stream_rpc_method_handler, self._fetch
            elif method.client_streaming:
                stub, handler, behaviour = self._channel.stream_unary, grpc.stream_unary_rpc_method_handler, self._write
            else:
                stub, handler, behaviour = self._channel.unary_unary, grpc.unary_unary_rpc_method_handler, self._call
            self._stubs[method.name] = stub(f"/{_SERVICE.full_name}/{method.name}")
            handlers[method.name] = handler(partial(behaviour, method.name))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="faulty-proxy")
        self._server = grpc.server(self._threads, options=_OPTIONS)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._replayer = threading.Thread(target=self._replay_at_random, name="faulty-proxy-replayer")
        self._replayer.start()

    def replay(self) -> list[Request]:
        """Forwards all old requests again, newest first, without a pause; returns them."""
        with self._lock:
            requests = self._old[::-1]
        for future in [self._forward(request, self._faults.timeout_seconds) for request in requests]:
            _outcome(future)
        return requests

    def close(self) -> None:
        """Ends all calls and threads."""
        self._closing.set()
        self._server.stop(None).wait()
        self._threads.shutdown()
        self._replayer.join()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the three kinds of calls

    def _call(self, method: str, message: bytes, context: grpc.ServicerContext) -> bytes:
        return self._unary(Request(method, (message,), _metadata(context)), self._draw(self._call_faults), context)

    def _write(self, method: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        request = Request(method, tuple(messages), _metadata(context))
        return self._unary(request, self._draw(self._write_faults), context)

    def _unary(self, request: Request, fault: Fault | None, context: grpc.ServicerContext) -> bytes:
        """A call with one answer."""
        timeout = self._hold(context)
        if fault in (Fault.REFUSED, Fault.SWALLOWED):
            self._drop(fault, context)
        if fault is Fault.WRITE_CUT:
            self._cut(request)
            self._abort(fault, context)
        future = self._forward_twice(request) if fault is Fault.TWIN else self._forward(request, timeout)
        outcome = _outcome(future)
        if not isinstance(outcome, bytes):
            _pass_on(outcome, context)
        with self._lock:
            self._old.append(request)
        if fault is Fault.REPLY_LOST:
            self._abort(fault, context)
        context.set_trailing_metadata(future.trailing_metadata())
        return outcome

    def _fetch(self, method: str, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """A call whose answer is a stream."""
        timeout, fault = self._hold(context), self._draw(self._fetch_faults)
        if fault in (Fault.REFUSED, Fault.SWALLOWED):
            self._drop(fault, context)
        call = self._stubs[method](message, timeout=timeout, metadata=_metadata(context))
        try:
            for number, answer in enumerate(call):
                if number and fault is Fault.FETCH_CUT:
                    self._abort(fault, context)
                yield answer
            context.set_trailing_metadata(call.trailing_metadata())
        except grpc.RpcError as error:
            _pass_on(error, context)
        finally:
            call.cancel()

    # ---- faults

    def _draw(self, chances: dict[Fault, float]) -> Fault | None:
        with self._lock:
            left = self._random.random()
        for fault, chance in chances.items():
            left -= chance
            if left < 0:
                return fault
        return None

    def _abort(self, fault: Fault, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNAVAILABLE, f"the faulty proxy: {fault}")

    def _drop(self, fault: Fault, context: grpc.ServicerContext) -> NoReturn:
        """Answers UNAVAILABLE, after the caller has gone where the request is swallowed."""
        gone = threading.Event()
        if fault is Fault.SWALLOWED and context.add_callback(gone.set):
            gone.wait()  # close() ends all calls
        self._abort(fault, context)

    def _hold(self, context: grpc.ServicerContext) -> float | None:
        """Delays some calls. The seconds that are left to forward this one, None where it has no deadline."""
        low, high = self._faults.delay_seconds
        with self._lock:
            is_delayed = self._random.random() < self._faults.delay
            seconds = low * (high / low) ** self._random.random()
        if is_delayed:
            self._closing.wait(seconds)
            if not context.is_active():
                return self._faults.timeout_seconds
        return context.time_remaining()

    def _cut(self, request: Request) -> None:
        """Forwards some of a write's messages, then cancels; the shard never sees the end of the stream."""
        with self._lock:
            num_sent = self._random.randint(1, len(request.messages))
        sent, cancelled = threading.Event(), threading.Event()

        def messages() -> Iterator[bytes]:
            yield from request.messages[:num_sent]
            sent.set()  # gRPC asks for the next message when it has sent the one before
            cancelled.wait()

        call = self._stubs[request.method].future(
            messages(), timeout=self._faults.timeout_seconds, metadata=request.metadata
        )
        call.add_done_callback(lambda _: sent.set())  # where the shard is away
        sent.wait()
        call.cancel()
        cancelled.set()

    def _forward_twice(self, request: Request) -> Any:
        """The future of one of two copies that are on their way together, when both have ended."""
        futures = [self._forward(request, self._faults.timeout_seconds) for _ in range(2)]
        for future in futures:
            _outcome(future)
        return futures[0]

    def _replay_at_random(self) -> None:
        """Until close()."""
        if math.isinf(self._faults.replay_seconds):
            return
        while True:
            with self._lock:
                pause = self._random.expovariate(1 / self._faults.replay_seconds)
            if self._closing.wait(pause):
                return
            with self._lock:
                request = self._random.choice(self._old) if self._old else None
            if request is not None:
                _outcome(self._forward(request, self._faults.timeout_seconds))

    # ---- forwarding

    def _forward(self, request: Request, timeout: float | None) -> Any:
        """A future of the shard's answer."""
        streams = _SERVICE.methods_by_name[request.method].client_streaming
        message = iter(request.messages) if streams else request.messages[0]
        return self._stubs[request.method].future(message, timeout=timeout, metadata=request.metadata)


def _metadata(context: grpc.ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata of the call; gRPC adds its own keys to each call itself."""
    given: Sequence[tuple[str, str | bytes]] = context.invocation_metadata()
    return tuple((key, value) for key, value in given if not key.startswith(("grpc-", "user-agent")))


def _pass_on(error: Any, context: grpc.ServicerContext) -> NoReturn:
    """Ends the call as the shard did, with all that it said."""
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details())


def _outcome(future: Any) -> bytes | Any:
    """The answer of a call, or the grpc.RpcError that it failed with."""
    try:
        return future.result()
    except grpc.RpcError as error:
        return error
