"""A gRPC server before one shard that treats what passes as a bad network would: at random, from a seed.

Messages are opaque bytes here; which calls there are, and which of them stream, is read from the contract.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeAlias, TypeVar

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
Card = TypeVar("Card")


class Fault(StrEnum):
    """The faults of a call. One is counted only if it really happened."""

    REFUSED = "refused"
    """Not forwarded; UNAVAILABLE at once."""
    SWALLOWED = "swallowed"
    """Not forwarded; no answer before the caller's deadline."""
    REPLY_LOST = "reply lost"
    """Forwarded and answered by the shard; UNAVAILABLE for the caller."""
    TWIN = "twin"
    """Forwarded twice at the same time; both were answered."""
    REPLAYED = "replayed"
    """Forwarded again some time after it was answered, long after the caller continued."""
    DELAYED = "delayed"
    """Forwarded later than it came, so that others overtake it."""
    OVERTAKEN = "overtaken"
    """Delayed until the caller's attempt was over, then forwarded all the same."""
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


Answer: TypeAlias = bytes | grpc.StatusCode
"""What a shard said: a message, or the status of an error."""


@dataclass(frozen=True)
class LateAnswer:
    """A shard's answer to a request that it had answered with OK before."""

    request: Request
    answer: Answer


class _Deck(Generic[Card]):
    """A hundred cards, dealt in a random order, all of them before any comes again: what has a probability of 0.02
    happens twice in a hundred calls. Safe to call from any thread.

    Args:
        cards: makes the cards of a hundred calls that are not blank.
    """

    def __init__(self, cards: Callable[[random.Random], list[Card]], blank: Card, seed: str) -> None:
        self._cards, self._blank = cards, blank
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._left: list[Card] = []

    def deal(self) -> Card:
        with self._lock:
            if not self._left:
                self._left = self._cards(self._random)
                self._left += [self._blank] * (100 - len(self._left))
                self._random.shuffle(self._left)
            return self._left.pop()


class FaultyProxy:
    """Stands at `address` before the shard at `target`. A context manager; safe to call from any thread.

    What the shard really answers, errors included, is passed on unchanged. Each attempt of a caller meets at most
    one fault in addition to a delay. The seed gives their order; which attempt meets which depends on when it arrives.
    """

    address: str
    counts: Counter[Fault]

    def __init__(self, target: str, *, seed: int, faults: Faults) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._delays = _Deck(partial(_delays, faults), 0.0, f"{seed} delays")
        dropped = {Fault.REFUSED: faults.refuse, Fault.SWALLOWED: faults.swallow}
        calls = dropped | {Fault.TWIN: faults.twin, Fault.REPLY_LOST: faults.lose_reply}
        writes, fetches = calls | {Fault.WRITE_CUT: faults.cut_write}, dropped | {Fault.FETCH_CUT: faults.cut_fetch}
        self._call_faults = _Deck(partial(_faults, calls), None, f"{seed} calls")
        self._write_faults = _Deck(partial(_faults, writes), None, f"{seed} writes")
        self._fetch_faults = _Deck(partial(_faults, fetches), None, f"{seed} fetches")
        self._old: list[Request] = []
        self._closing = threading.Event()
        self.counts = Counter()

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
            handlers[method.name] = handler(_with_method(behaviour, method.name))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="faulty-proxy")
        self._server = grpc.server(self._threads, options=_OPTIONS)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._replayer = threading.Thread(target=self._replay_at_random, name="faulty-proxy-replayer")
        self._replayer.start()

    def replay(self, num_newest: int, num_others: int) -> list[LateAnswer]:
        """Forwards old requests again, without a pause: the newest ones, newest first, and any others. Returns
        the shard's answers."""
        with self._lock:
            requests = self._old[: -num_newest - 1 : -1]
            requests += self._random.sample(self._old, min(num_others, len(self._old)))
        futures = [self._forward(request, self._faults.timeout_seconds) for request in requests]
        late = [
            LateAnswer(request, _answer(_outcome(future))) for request, future in zip(requests, futures, strict=True)
        ]
        with self._lock:
            self.counts[Fault.REPLAYED] += sum(isinstance(one.answer, bytes) for one in late)
        return late

    def close(self) -> None:
        """Ends all calls and threads."""
        self._closing.set()
        self._server.stop(None).wait()
        self._threads.shutdown()
        self._replayer.join()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- the three kinds of calls

    def _call(self, method: str, message: bytes, context: grpc.ServicerContext) -> bytes:
        return self._unary(Request(method, (message,), _metadata(context)), self._call_faults.deal(), context)

    def _write(self, method: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return self._unary(Request(method, tuple(messages), _metadata(context)), self._write_faults.deal(), context)

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
        timeout, fault = self._hold(context), self._fetch_faults.deal()
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

    def _count(self, fault: Fault) -> None:
        with self._lock:
            self.counts[fault] += 1

    def _abort(self, fault: Fault, context: grpc.ServicerContext) -> NoReturn:
        self._count(fault)
        context.abort(grpc.StatusCode.UNAVAILABLE, f"the faulty proxy: {fault}")

    def _drop(self, fault: Fault, context: grpc.ServicerContext) -> NoReturn:
        """Answers UNAVAILABLE, after the caller has gone where the request is swallowed."""
        gone = threading.Event()
        if fault is Fault.SWALLOWED and context.add_callback(gone.set):
            gone.wait()  # close() ends all calls
        self._abort(fault, context)

    def _hold(self, context: grpc.ServicerContext) -> float | None:
        """Delays some calls. The seconds that are left to forward this one, None where it has no deadline."""
        if seconds := self._delays.deal():
            self._closing.wait(seconds)
            self._count(Fault.DELAYED)
            if not context.is_active():
                self._count(Fault.OVERTAKEN)
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
        """The ended future of one of two copies that are on their way together."""
        futures = [self._forward(request, self._faults.timeout_seconds) for _ in range(2)]
        one, other = map(_outcome, futures)
        if isinstance(one, bytes) and isinstance(other, bytes):
            self._count(Fault.TWIN)
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
            self.replay(0, 1)

    # ---- forwarding

    def _forward(self, request: Request, timeout: float | None) -> Any:
        """A future of the shard's answer."""
        streams = _SERVICE.methods_by_name[request.method].client_streaming
        message = iter(request.messages) if streams else request.messages[0]
        return self._stubs[request.method].future(message, timeout=timeout, metadata=request.metadata)


def _times(probability: float, generator: random.Random) -> int:
    """The number of times in a hundred calls: the share, rounded up or down at random."""
    return int(100 * probability + generator.random())


def _faults(probabilities: dict[Fault, float], generator: random.Random) -> list[Fault | None]:
    """Each fault as often as it happens in a hundred calls."""
    return [fault for fault, chance in probabilities.items() for _ in range(_times(chance, generator))]


def _delays(faults: Faults, generator: random.Random) -> list[float]:
    """The delays of a hundred calls, from the shortest to the longest."""
    low, high = faults.delay_seconds
    num_delays = _times(faults.delay, generator)
    return [low * (high / low) ** ((number + generator.random()) / num_delays) for number in range(num_delays)]


def _with_method(behaviour: Callable[..., Any], method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
    return lambda request, context: behaviour(method, request, context)


def _metadata(context: grpc.ServicerContext) -> tuple[tuple[str, str | bytes], ...]:
    """The caller's metadata of the call; gRPC adds its own keys to each call itself."""
    given: Sequence[tuple[str, str | bytes]] = context.invocation_metadata()
    return tuple((key, value) for key, value in given if not key.startswith(("grpc-", "user-agent")))


def _pass_on(error: Any, context: grpc.ServicerContext) -> NoReturn:
    """Ends the call as the shard did, with all that it said."""
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details())


def _outcome(future: Any) -> bytes | Any:
    """The answer of a call, or the grpc.RpcError that it failed with, with its code() and details()."""
    try:
        answer: bytes = future.result()
    except grpc.RpcError as error:
        return error
    return answer


def _answer(outcome: bytes | Any) -> Answer:
    return outcome if isinstance(outcome, bytes) else outcome.code()
