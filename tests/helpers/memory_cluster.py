"""A cluster in memory, for tests that drive real `WeightClient`s: client, service, shard and group commit are the real
code, and so is LMDB. gRPC, failures of the disk, threads and the clock are replaced.

The test decides the fate of each attempt (`Fate`), the scheduling of the client's threads, and where a signal
interrupts its caller. Nothing else is random: the same decisions make the same run.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import dis
import functools
import inspect
import math
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import grpc
import pytest
from google.protobuf.message import Message as Proto
from google.protobuf.message_factory import GetMessageClass

import weightserver.client.calls
import weightserver.client.channels
import weightserver.client.retries
import weightserver.client.threads
import weightserver.client.transfer
import weightserver.client.writer
from tests.helpers.disk_storage import DiskStorage
from weightserver.core.errors import (
    DataLossError,
    FencedError,
    MissingRatesError,
    NoTableError,
    OverloadedError,
    StepError,
    TableMismatchError,
    WeightServerError,
)
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.status import ERROR_OF_STATUS, error_fields
from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory
from weightserver.server.service import WeightServerService, add_to_server
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import CancellableFuture, commit_group
from weightserver.shard.shard import Shard

RETRY_SECONDS = 5.0
"""Retry budget of the clients, on the simulated clock."""
READS = ("Describe", "Fetch", "ReadBlocks", "ReadSchedule")
_MAX_MESSAGES = 40


class Fate(Enum):
    """The fate of one attempt of a call."""

    ANSWERED = "answered"
    UNHEARD = "arrives, and its answer is lost"
    LOST = "never arrives"
    LATE = "arrives later, if ever"
    DIES_BEFORE = "the shard dies before its commit"
    DIES_AFTER = "the shard dies after its commit"
    DISK_FAILS = "its commit fails, and the shard restarts"
    DISK_FAILS_TOO_LATE = "its commit fails, but is stored when the shard restarts"

    def __repr__(self) -> str:
        return self.name


SILENT = (Fate.UNHEARD, Fate.LOST, Fate.LATE, Fate.DIES_BEFORE, Fate.DIES_AFTER)
"""Fates after which the client receives no answer."""
STATES_REFUSE = (NoTableError, TableMismatchError, MissingRatesError, StepError, FencedError)
"""Refusals of a write from which a client learns the shard's state."""


class Known(NamedTuple):
    """The newest state of a shard that a client knows of: numbers of events, 0 for none."""

    event: int = 0
    change: int = 0
    """The newest applied write."""


@dataclass
class Run:
    """One run of a client's method, and the test's decisions about it."""

    call: Any = None
    """The test's own object, to which the requests belong."""
    client: str = ""
    """Name of the client."""
    fates: Sequence[Fate] = ()
    """Fates of its first attempts, in order; all others are answered."""
    patient: bool = True
    """Whether the client retries; otherwise its budget is spent."""
    turns: Sequence[bool] = ()
    """At each wait, whether another thread runs first; later, threads run when they are waited for."""
    interrupt: int | None = None
    """The number of the wait in which a KeyboardInterrupt is raised."""
    knew: tuple[Known, ...] = ()
    """Knowledge of each shard at the beginning."""
    attempts: list[Fate] = field(default_factory=list)
    refusals: list[type[WeightServerError]] = field(default_factory=list)
    unnoticed: list[Message] = field(default_factory=list)
    """Requests that a shard answered although it lacks a state that the client knows of."""
    num_waits: int = 0

    @property
    def silent(self) -> bool:
        """Whether an attempt was not answered."""
        return any(fate in SILENT for fate in self.attempts)

    def next_fate(self) -> Fate:
        number = len(self.attempts)
        self.attempts.append(self.fates[number] if number < len(self.fates) else Fate.ANSWERED)
        return self.attempts[-1]


_run: contextvars.ContextVar[Run] = contextvars.ContextVar("run")


@dataclass(frozen=True, eq=False)
class _Work:
    """Work of one thread."""

    do: Callable[[], object]
    arguments: tuple[Any, ...]


class _Answers(deque[Any]):
    """A queue of threads' answers."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def put(self, answer: Any) -> None:
        self.append(answer)

    def get(self, timeout: float | None = None) -> Any:
        """Runs the threads that this one waits for, unless others run first."""
        while not self:
            self._threads.wait()
            if not self:
                self._threads.go_on(next(work for work in self._threads.ready if self in work.arguments))
        return self.popleft()


class Threads:
    """Simulates threads in one: while one waits, others may run."""

    def __init__(self) -> None:
        self.ready: list[_Work] = []
        """Work that has not begun."""
        self.in_others = 0

    def start(self, work: Callable[..., object], arguments: tuple[Any, ...] = ()) -> None:
        """Starts a thread of the same run."""
        do = functools.partial(contextvars.copy_context().run, work, *arguments)
        self.ready.append(_Work(do, arguments))

    def shutdown(self) -> None:
        while self.ready:
            self.go_on(self.ready[0])

    def go_on(self, work: _Work) -> None:
        """Runs another thread's work."""
        self.ready.remove(work)
        self.in_others += 1
        try:
            work.do()
        finally:
            self.in_others -= 1

    def wait(self) -> None:
        """Called where a thread waits for an external event: others may run meanwhile."""
        run = _run.get()
        number = run.num_waits
        run.num_waits += 1
        if number < len(run.turns) and run.turns[number] and self.ready:
            self.go_on(self.ready[0])
        self._interrupt(run, number)

    def _interrupt(self, run: Run, number: int) -> None:
        if run.interrupt == number and not self.in_others:
            raise KeyboardInterrupt


class _Turn(_thread.RLock):
    """A lock that one of the simulated threads holds: another is interrupted while it waits, since the former is below
    it on the one stack."""

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():  # type: ignore[attr-defined]
            run = _run.get()
            run.interrupt = run.num_waits
            raise KeyboardInterrupt
        return super().__enter__()


@dataclass(frozen=True, eq=False)
class Message:
    """The request of one attempt, in transit to a shard."""

    shard: int
    method: str
    requests: tuple[Proto, ...]
    run: Run
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    known: Known = Known()  # noqa: RUF009 - it is immutable
    """Knowledge of its shard when it was sent."""

    @property
    def first(self) -> Any:
        """The first message, which has the header of a write."""
        return self.requests[0]

    @property
    def session(self) -> tuple[int, bytes]:
        """Epoch and id of the session in the request."""
        names = self.first.header if hasattr(self.first, "header") else self.first
        return names.epoch, getattr(names, "session_id", b"")


@dataclass(frozen=True)
class Event:
    """A shard committed the change of a message, with a result, or refused it."""

    message: Message
    result: Any
    """Result of the operation, or class of the error."""
    alone: bool
    """Whether no other message shared the commit."""
    behind: bool
    """Whether the shard lacks a state that the message's client knows of."""
    disk_fails: bool
    """Whether no commit of the shard succeeded at that time."""

    @property
    def refused(self) -> bool:
        return isinstance(self.result, type)


Note = Callable[[Message, Any, bool], None]
"""Records an event: message, result, alone."""


@dataclass
class Directory:
    """A shard's directory, and the events that led to its contents."""

    storage: DiskStorage
    history: list[int] = field(default_factory=list)

    def copy(self, root: Path) -> Directory:
        return Directory(self.storage.copy(root), self.history[:])


class Crash(BaseException):
    """The shard dies; not caught by its code."""


class CallFailed(grpc.RpcError):
    """An error as gRPC raises it in a client."""

    def __init__(self, status: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str]] = ()) -> None:
        self._status, self._details, self._trailing = status, details, tuple(trailing)

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailing


def _error(refused: CallFailed) -> type[WeightServerError]:
    """The error that a client raises in the end."""
    fields = error_fields(refused.trailing_metadata())
    if "num_used" in fields:
        return MissingRatesError
    if fields.get("is_empty"):
        return DataLossError
    return ERROR_OF_STATUS.get(refused.code(), WeightServerError)


class _Context:
    """gRPC's context of a call."""

    def __init__(self, metadata: Sequence[tuple[str, Any]]) -> None:
        self._metadata = metadata
        self._trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        return self._metadata

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._trailing = list(metadata)

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        return self._trailing

    def time_remaining(self) -> None: ...

    def is_active(self) -> bool:
        return True

    def add_callback(self, callback: Callable[[], object]) -> bool:
        return True

    def abort(self, status: grpc.StatusCode, details: str) -> NoReturn:
        raise CallFailed(status, details, self._trailing)


class _CommittedWhenAsked(CancellableFuture[Any]):
    """A future whose operation is committed when a caller waits for it."""

    def __init__(self, operation: Callable[[ShardChange], Any], commit: Callable[[], None]) -> None:
        super().__init__(operation)
        self._commit = commit

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self._commit()
        return super().result(timeout)


@functools.cache
def _metrics(shard: int, num_shards: int) -> ShardMetrics:
    return ShardMetrics(shard=shard, num_shards=num_shards, version="0")


class Process:
    """One shard's process, without gRPC: service and shard; takes the committer's place."""

    def __init__(self, storage: DiskStorage, shard: int, num_shards: int, note: Note) -> None:
        self.shard = Shard(storage, shard=shard, num_shards=num_shards)
        self.dying = False
        """Whether the next commit ends it."""
        self._storage, self._note = storage, note
        self._arriving: deque[Message] = deque()
        self._handling: list[Message] = []
        self._group: list[CancellableFuture[Any]] = []
        self._done: list[tuple[Message, Any]] = []
        memory = RequestMemory(1 << 40)  # contexts end no call, so none gives anything back
        service = WeightServerService(self.shard, self, _metrics(shard, num_shards), memory)  # type: ignore[arg-type]
        registered: list[Any] = []
        add_to_server(service, SimpleNamespace(add_generic_rpc_handlers=registered.extend))
        self._registered = registered[0]

    def call(self, message: Message, sharing: Sequence[Message] = ()) -> tuple[list[bytes], Sequence[tuple[str, str]]]:
        """The serialized answers and the trailing metadata; `sharing` arrive in time for the same commit.

        Raises:
            CallFailed: the call ended with a status.
        """
        self._arriving, self._is_alone = deque(sharing), not sharing
        return self._call(message)

    def _call(self, message: Message) -> tuple[list[bytes], Sequence[tuple[str, str]]]:
        context = _Context(message.metadata)
        details = SimpleNamespace(
            method=f"/{pb.DESCRIPTOR.services_by_name['WeightServer'].full_name}/{message.method}",
            invocation_metadata=message.metadata,
        )
        handler = self._registered.service(details)
        behaviour = handler.stream_unary or handler.stream_stream
        requests = (request.SerializeToString() for request in message.requests)
        self._handling.append(message)
        try:
            answers = behaviour(requests, context)
            answers = list(answers) if handler.response_streaming else [answers]
        except CallFailed as refused:
            self._note(message, _error(refused), self._is_alone)
            raise
        finally:
            self._handling.pop()
        serialize = handler.response_serializer or bytes
        return [serialize(answer) for answer in answers], context.trailing_metadata()

    def submit(self, operation: Callable[[ShardChange], Any]) -> CancellableFuture[Any]:
        """Same as `Committer.submit`; further messages arrive before the commit."""
        message = self._handling[-1]

        def noted(batch: ShardChange) -> Any:
            result = operation(batch)
            self._done.append((message, result))
            return result

        self._group.append(_CommittedWhenAsked(noted, self._commit))
        return self._group[-1]

    def _commit(self) -> None:
        while self._arriving:
            with contextlib.suppress(CallFailed):
                self._call(self._arriving.popleft())
        group, self._group = self._group, []
        if group:
            commit_group(self._transaction, group)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[ShardChange]:
        self._done.clear()
        landed = self._storage.num_landed
        try:
            with self.shard.batch() as batch:
                yield batch
                if self.dying:
                    raise Crash
        finally:
            if self._storage.num_landed > landed:
                for message, result in self._done:
                    self._note(message, result, len(self._done) == 1)


class MemoryCluster:
    """Shards, their network, and the threads and clock of their clients."""

    def __init__(self, num_shards: int, root: Path) -> None:
        self.num_shards, self.root = num_shards, root
        self.threads = Threads()
        self.messages: list[Message] = []
        """The last changes that were sent; any of them may arrive, for the first time or again, but for those whose
        sender has been told that the shard was overloaded: their refusals are the proof that they were not applied."""
        self.log: list[Event] = []
        """The events of all shards, in order."""
        self.directories = [Directory(DiskStorage(root)) for _ in range(num_shards)]
        self.known: dict[tuple[str, int], Known] = {}
        """Knowledge, by client and shard."""
        self.told_of_loss: set[str] = set()
        """Clients that a shard has refused because it lacks a state they know of."""
        self._num_events = 0
        self._changes: set[int] = set()
        self._now = 0.0
        self._patches = pytest.MonkeyPatch()
        for directory in self.directories:
            directory.storage.restart()
        self.processes = [self._process(shard) for shard in range(num_shards)]

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{shard}" for shard in range(self.num_shards)]

    def take_over(self) -> None:
        """Makes clients that are created from now on reach these shards and no others."""
        here = threading.get_ident()

        def only_here(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
            """Threads that earlier tests left keep the real one, and change nothing here."""
            return lambda *given: (simulated if threading.get_ident() == here else real)(*given)

        clock = SimpleNamespace(
            monotonic=only_here(lambda: self._now, time.monotonic), sleep=only_here(self._sleep, time.sleep)
        )
        chance = SimpleNamespace(uniform=only_here(random.Random(0).uniform, random.uniform))
        for module, name, value in (
            (
                weightserver.client.channels,
                "open_channel",
                lambda address, _: _Channel(self, int(address.split(":")[1])),
            ),
            (weightserver.client.calls, "time", clock),
            (weightserver.client.retries, "time", clock),
            (weightserver.client.retries, "random", chance),
            (weightserver.client.transfer, "time", clock),
            (weightserver.client.threads, "start_new_thread", only_here(self.threads.start, _thread.start_new_thread)),
            (weightserver.client.threads, "Answers", lambda: _Answers(self.threads)),
            (weightserver.client.calls, "SILENT_SECONDS", math.inf),  # of real time
            (weightserver.client.writer, "Lock", _Turn),
        ):
            self._patches.setattr(module, name, value)

    def let_go(self) -> None:
        """Ends the shards."""
        self._patches.undo()
        for directory in self.directories:
            directory.storage.close()

    @contextlib.contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Calls of clients in this context belong to the run."""
        token = _run.set(run)
        try:
            yield
        finally:
            _run.reset(token)

    def restart(self, shard: int) -> None:
        self.directories[shard].storage.restart()
        self.processes[shard] = self._process(shard)

    def replace(self, shard: int, directory: Directory) -> Directory:
        """Replaces the shard's directory; returns the former one."""
        before, self.directories[shard] = self.directories[shard], directory
        before.storage.close()
        self.restart(shard)
        return before

    def known_to(self, client: str) -> tuple[Known, ...]:
        """The client's knowledge of each shard."""
        return tuple(self.known.get((client, shard), Known()) for shard in range(self.num_shards))

    def forget(self, client: str) -> None:
        """Discards the client's knowledge."""
        for shard in range(self.num_shards):
            self.known.pop((client, shard), None)

    def lacks(self, shard: int, number: int) -> bool:
        """Whether the shard's directory does not descend from that event."""
        return number != 0 and number not in self.directories[shard].history

    def _process(self, shard: int) -> Process:
        return Process(self.directories[shard].storage, shard, self.num_shards, self._note)

    def _note(self, message: Message, result: Any, alone: bool) -> None:
        self._num_events += 1
        shard, refused = message.shard, isinstance(result, type)
        behind = self.lacks(shard, message.known.event if refused else message.known.change)
        self.log.append(Event(message, result, alone, behind, self.directories[shard].storage.fails))
        if not refused:
            self.directories[shard].history.append(self._num_events)
            if result is True and message.method != "SettleWrite":  # which says that it was applied before
                self._changes.add(self._num_events)

    def _newest(self, shard: int) -> Known:
        """The newest events in the shard's directory."""
        history = self.directories[shard].history
        return Known(max(history, default=0), max(self._changes.intersection(history), default=0))

    def _tell(self, message: Message, newest: Known) -> None:
        """A client has read an answer that was given when `newest` was the shard's state."""
        key = message.run.client, message.shard
        self.known[key] = max(newest, self.known.get(key, Known()))

    def _sleep(self, seconds: float) -> None:
        self.threads.wait()
        self._now += max(seconds, 1e-6)  # a shorter pause could be lost in rounding, and a real one takes longer

    def attempt(self, message: Message) -> _Replies:
        """The outcome of an attempt for the client: the answer, or `CallFailed`."""
        fate = message.run.next_fate()
        if message.method not in READS:
            self.messages = [*self.messages, message][-_MAX_MESSAGES:]
        self.threads.wait()
        refused_at = Known()
        try:
            if fate not in (Fate.LOST, Fate.LATE):
                answers, trailing = self.arrive(message, fate)
                newest = self._newest(message.shard)
        except CallFailed as refused:
            if message.method != "Fetch" and _error(refused) in STATES_REFUSE:
                refused_at = self._newest(message.shard)
            if refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC delivers a request once
                self.messages = [known for known in self.messages if known is not message]
            raise
        finally:
            self.threads.wait()
            self._tell(message, refused_at)
        if fate not in SILENT:
            if self.lacks(message.shard, message.known.change):
                message.run.unnoticed.append(message)
            return _Replies(answers, trailing, when_read=lambda: self._tell(message, newest))
        if not message.run.patient:
            self._now += RETRY_SECONDS
        raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "")

    def arrive(
        self, message: Message, fate: Fate = Fate.ANSWERED, sharing: Sequence[Message] = ()
    ) -> tuple[list[bytes], Sequence[tuple[str, str]]]:
        """A message reaches its shard, with others that share its commit."""
        process, storage = self.processes[message.shard], self.directories[message.shard].storage
        process.dying = fate is Fate.DIES_BEFORE
        storage.fails = fate in (Fate.DISK_FAILS, Fate.DISK_FAILS_TOO_LATE)
        storage.fails_too_late = fate is Fate.DISK_FAILS_TOO_LATE
        try:
            answer = process.call(message, sharing)
        except Crash:
            answer = [], ()
        except CallFailed as refused:
            if _error(refused) not in (OverloadedError, MissingRatesError):
                message.run.refusals.append(_error(refused))
            if _error(refused) is DataLossError:
                self.told_of_loss.add(message.run.client)
            raise
        finally:
            if fate not in (Fate.ANSWERED, Fate.UNHEARD):
                self.restart(message.shard)
        return answer


_INTERRUPTED = {str(path) for path in Path(weightserver.client.__file__).parent.glob("*.py")}
_CALLED = {contextlib.__file__, threading.__file__}
"""Modules whose frames are interrupted too if the client calls them."""


@contextlib.contextmanager
def interrupted_at(number: int, threads: Threads) -> Iterator[SimpleNamespace]:
    """Raises a KeyboardInterrupt in the caller's thread, as a signal does, at the given place among those in the client
    where CPython checks for signals. `happened` says whether there were so many places.

    It checks when a function begins or a generator resumes, when a function in C has returned, and where a loop
    repeats; so also inside the `with` of an object whose methods are Python code, such as `threading.Condition`.
    """
    interrupt = SimpleNamespace(happened=False, left=number)
    before: dict[Any, int | None] = {}  # frame -> its last instruction, if that was no call of a Python function

    def is_place(frame: Any, event: str) -> bool:
        names, handlers = _instructions(frame.f_code)
        if event == "call":
            return names[frame.f_lasti] == "RESUME"  # a generator that is closed does not resume
        last = before.get(frame)
        # With another handler it would be raised outside of the `try` in which a signal comes.
        return (
            last is not None
            and names[last].startswith(("CALL", "JUMP_BACKWARD"))
            and handlers(last) == handlers(frame.f_lasti)
        )

    def trace(frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if interrupt.happened or event not in ("call", "opcode"):
            return trace
        if event == "call":
            frame.f_trace_opcodes = True
            known = frame in before or frame.f_back in before
            if frame.f_back in before and not frame.f_code.co_flags & inspect.CO_GENERATOR:
                before[frame.f_back] = None
            if name not in _INTERRUPTED and not (name in _CALLED and known):
                return None
        if not threads.in_others:
            interrupt.left -= is_place(frame, event)
            if interrupt.left < 0:
                interrupt.happened = True
                before.clear()
                raise KeyboardInterrupt
        before[frame] = frame.f_lasti
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        yield interrupt
    finally:
        sys.settrace(tracing)


@functools.cache
def _instructions(code: Any) -> tuple[dict[int, str], Callable[[int], int | None]]:
    """Offset -> name; and the handler of an exception at an offset."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}, handler


class _Channel:
    """gRPC's channel to one shard."""

    def __init__(self, cluster: MemoryCluster, shard: int) -> None:
        self._cluster, self._shard = cluster, shard

    def unary_unary(self, path: str) -> Any:
        return SimpleNamespace(with_call=lambda request, **options: self._only(self._call(path, [request], options)))

    def stream_unary(self, path: str) -> Any:
        return SimpleNamespace(with_call=lambda requests, **options: self._only(self._call(path, requests, options)))

    def unary_stream(self, path: str) -> Any:
        def begin(request: bytes, **options: Any) -> _Replies:
            try:
                return self._call(path, [request], options)
            except grpc.RpcError as error:
                return _Replies([], (), error)

        return begin

    def close(self) -> None: ...

    def _call(self, path: str, sent: Iterable[bytes], options: Any) -> _Replies:
        service, _, method = path[1:].rpartition("/")
        parse = GetMessageClass(pb.DESCRIPTOR.pool.FindMethodByName(f"{service}.{method}").input_type).FromString
        requests, run = map(parse, sent), _run.get()
        known = self._cluster.known.get((run.client, self._shard), Known())
        message = Message(self._shard, method, tuple(requests), run, tuple(options["metadata"]), known)
        return self._cluster.attempt(message)

    def _only(self, answers: _Replies) -> tuple[Any, _Replies]:
        (answer,) = answers
        return answer, answers


class _Replies(list[Any]):
    """A call whose answers have arrived."""

    def __init__(
        self,
        answers: Iterable[Any],
        trailing: Sequence[tuple[str, str]],
        failure: grpc.RpcError | None = None,
        when_read: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(answers)
        self._trailing = trailing
        self._failure = failure
        self._when_read = when_read

    def __iter__(self) -> Iterator[Any]:
        """Raises the call's error when its answers are read."""
        if self._failure is not None:
            raise self._failure
        yield from super().__iter__()
        self._when_read()

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        return self._trailing

    def cancel(self) -> None: ...
