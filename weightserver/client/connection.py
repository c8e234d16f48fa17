"""One shard as the client sees it: a channel, a deadline for every attempt, and attempts until a budget is spent.

Rows that an attempt of a fetch brought are kept: the next one asks for the others, and has the whole budget again. So a
fetch ends well however long it takes, as long as a message of it arrives within each attempt.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from weightserver.client.fetched_rows import FetchedRows
from weightserver.client.tls_diagnosis import tls_failure
from weightserver.client.workers import Workers
from weightserver.common.logs import REQUEST_ID, new_request_id
from weightserver.common.version import __version__
from weightserver.core.errors import (
    AuthenticationError,
    ClusterError,
    DataLossError,
    OverloadedError,
    ShardUnavailableError,
    WeightServerError,
)
from weightserver.core.lineage import split_mark
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    ACKNOWLEDGED_KEY,
    MARK_KEY,
    MAX_MESSAGE_BYTES,
    RETRY_HINT,
    VERSION_KEY,
    WAITED_KEY,
)
from weightserver.protocol.status import ERROR_OF_STATUS

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightServer"]
_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,  # by a shard that stops; the client itself cancels nothing before it closes
)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 1.0
_OPTIONS = [
    (ChannelOptions.SingleThreadedUnaryStream, 1),  # an answer's chunks pass through no second thread
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),  # one that the environment names would read the token of a call without TLS
]

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel straight to a shard, with TLS where there are credentials."""
    if credentials is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, credentials, _OPTIONS)


class _AskAgain(Exception):
    """What was answered is to be asked for once more: the same again does nothing, and is answered as newer."""


@dataclass
class _Begun:
    """When the attempts at a call began, and its id."""

    at: float = field(default_factory=lambda: time.monotonic())
    request_id: str = field(default_factory=new_request_id)


class ShardConnection:
    """Calls one shard; safe to use from any thread. Its calls are made by `workers`."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        token: str | None,
        timeout_seconds: float,
        retry_seconds: float,
        workers: Workers,
    ) -> None:
        self._workers = workers
        self.address = self.name = address
        self._tls = credentials is not None
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._metadata = [(VERSION_KEY, __version__), *([("authorization", f"Bearer {token}")] if token else [])]
        self._lock = threading.Lock()
        self.acknowledged = ""
        """The newest mark of the shard that was seen; every attempt carries it. Empty before the first answer."""
        self._channel = open_channel(address, credentials)
        self._stubs = {method.name: self._stub(method) for method in _SERVICE.methods}

    def _stub(self, method: Any) -> Any:
        if method.server_streaming:
            kind = self._channel.unary_stream
        elif method.client_streaming:
            kind = self._channel.stream_unary
        else:
            kind = self._channel.unary_unary
        return kind(
            f"/{_SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            # Fetch answers are taken apart without a copy.
            response_deserializer=None if method.name == "Fetch" else GetMessageClass(method.output_type).FromString,
        )

    def call(self, method: str, request: Message, *, acknowledged: str = "", once: bool = False) -> Any:
        """The answer of a call of one message, which is tried again unless `once`; with `acknowledged` it tells the
        shard of another mark than the newest."""

        def attempt(options: dict[str, Any]) -> Any:
            answer, call = self._stubs[method].with_call(request, **options)
            if not self._note_mark(call, options) and not acknowledged:
                raise _AskAgain
            return answer

        return self._workers.run(partial(self._attempts, attempt, acknowledged, once=once))

    def require(self, mark: str) -> None:
        """Raises DataLossError unless the shard's data descends from the state of that mark."""
        if mark and mark != self.acknowledged and not _is_behind(mark, self.acknowledged):
            self.call("Describe", pb.DescribeRequest(), acknowledged=mark)

    def write(self, method: str, messages: Callable[[], Iterator[Message]]) -> pb.WriteResponse:
        """The answer of a write; `messages` makes its messages anew for each attempt."""

        def attempt(options: dict[str, Any]) -> pb.WriteResponse:
            answer: pb.WriteResponse
            answer, call = self._stubs[method].with_call(messages(), **options)
            if not self._note_mark(call, options):
                raise _AskAgain
            return answer

        return self._workers.run(partial(self._attempts, attempt))

    def fetch(self, request: pb.FetchRequest, rows: FetchedRows) -> ShardFetch:
        """A fetch of all of `rows`, asked for as `request` says; nothing is sent yet."""
        return ShardFetch(self, request, rows)

    def _options(self, acknowledged: str, request_id: str, waited: float = 0.0) -> dict[str, Any]:
        """Deadline and metadata of an attempt."""
        mark = acknowledged or self.acknowledged
        metadata = [*self._metadata, *([(ACKNOWLEDGED_KEY, mark)] if mark else []), (REQUEST_ID, request_id)]
        if waited:
            metadata.append((WAITED_KEY, str(round(1000 * waited))))
        return {"timeout": self._timeout_seconds, "metadata": metadata}

    def _attempts(
        self,
        attempt: Callable[[dict[str, Any]], Result],
        acknowledged: str = "",
        *,
        rows: FetchedRows | None = None,
        once: bool = False,
        begun: _Begun | None = None,
    ) -> Result:
        """The result of the first attempt that succeeds, or of the only one. After one in which some of `rows` arrived
        the next follows at once, and `retry_seconds` begin anew. Runs in a worker."""
        begun = begun or _Begun()
        started, pause, warned, request_id = begun.at, _FIRST_PAUSE_SECONDS, False, begun.request_id
        in_doubt, waited, num_arrived = False, 0.0, rows.num_arrived if rows else 0
        while True:
            self._workers.check()
            try:
                return attempt(self._options(acknowledged, request_id, waited))
            except _AskAgain:
                in_doubt = True
                continue
            except grpc.RpcError as error:
                status, details, hint = error.code(), error.details() or "", _retry_hint(error)
            if status is grpc.StatusCode.UNIMPLEMENTED:
                raise ClusterError(
                    f"{self.name} does not know this call: it runs an older version, or is no weight server: update it"
                )
            if status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION):
                details += f" (its log tells more of request {request_id})"
            if status not in _RETRIED:
                refusal = ERROR_OF_STATUS.get(status, WeightServerError)(f"{self.name}: {details}")
                refusal.not_applied &= not in_doubt
                raise refusal
            if reason := tls_failure(self.address, status, details, tls=self._tls):
                raise AuthenticationError(f"{self.name} cannot be called: {reason}")
            if rows and rows.num_arrived > num_arrived:
                started, pause, waited, num_arrived = time.monotonic(), _FIRST_PAUSE_SECONDS, 0.0, rows.num_arrived
                continue
            in_doubt |= status is not grpc.StatusCode.RESOURCE_EXHAUSTED
            waited = time.monotonic() - started
            if once or waited >= self._retry_seconds:
                arrived = f", {rows.num_arrived} of {rows.num_rows} rows had arrived" if rows else ""
                if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    overloaded = OverloadedError(f"{self.name} was overloaded for {waited:.1f} s{arrived}: {details}")
                    overloaded.not_applied &= not in_doubt
                    raise overloaded
                raise ShardUnavailableError(
                    f"{self.name} did not answer for {waited:.1f} s ({status.name}){arrived}: check that it runs and "
                    "can be reached, then repeat the call"
                )
            if pause == _LONGEST_PAUSE_SECONDS and not warned:
                warned = True
                _log.warning(
                    "%s does not answer (%s), trying again for %.0f s",
                    self.name,
                    status.name,
                    self._retry_seconds - waited,
                    extra={"request": request_id},
                )
            wanted = max(pause * random.uniform(0.5, 1.0), hint * random.uniform(1.0, 1.5))  # not all at one time
            time.sleep(min(wanted, self._retry_seconds - waited))
            waited = time.monotonic() - started
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _note_mark(self, call: Any, options: dict[str, Any]) -> bool:
        """Keeps the shard's mark, which the answer ends with; False where nobody can tell whether it is newer than the
        one that another thread has seen meanwhile: of a process before it, or behind it.

        Raises:
            DataLossError: the shard has gone back behind what it had acknowledged.
        """
        mark = next((value for key, value in call.trailing_metadata() or () if key == MARK_KEY), "")
        told = dict(options["metadata"]).get(ACKNOWLEDGED_KEY, "")
        if not mark or mark == told:
            return True
        if _is_behind(mark, told):
            lost = DataLossError(f"{self.name} answers from {mark}, behind {told}, which it had acknowledged")
            lost.not_applied = False
            raise lost
        with self._lock:
            before = self.acknowledged
            # The shard has held `told` against its data, and nothing else that other threads have seen meanwhile.
            if before == told or _is_behind(before, mark):
                self.acknowledged = mark
            return self.acknowledged == mark or _is_behind(mark, before)

    def close(self) -> None:
        self._channel.close()


class ShardFetch:
    """A fetch of one shard's rows. An attempt asks for those that have not arrived yet.

    One thread can have the first attempts of several shards under way: it begins them all before it ends the first.
    """

    def __init__(self, connection: ShardConnection, request: pb.FetchRequest, rows: FetchedRows) -> None:
        self._connection = connection
        self._request = request
        self._rows = rows
        self._begun: _Begun | None = None
        self._first: tuple[Any, dict[str, Any]] | None = None
        """The call that `_begin` made, and its options."""
        self._failure: Exception | None = None
        """What `_end_first` caught."""

    @staticmethod
    def try_together(fetches: Sequence[ShardFetch]) -> None:
        """Makes the first attempt of each. What fails is left to `run`."""
        try:
            for fetch in fetches:
                fetch._begin()
            for fetch in fetches:
                fetch._end_first()
        finally:
            for fetch in fetches:
                if fetch._first:
                    fetch._first[0].cancel()

    @property
    def is_complete(self) -> bool:
        return self._rows.num_arrived == self._rows.num_rows

    def run(self) -> None:
        """Returns when all rows have arrived; raises what a call of the shard raises."""
        while not self.is_complete:
            attempts = partial(self._connection._attempts, self._attempt, rows=self._rows, begun=self._begun)
            self._connection._workers.run(attempts)
            self._begun = None

    def _begin(self) -> None:
        Workers.check()
        self._begun = _Begun()
        options = self._connection._options("", self._begun.request_id)
        self._first = self._send(options), options

    def _end_first(self) -> None:
        assert self._first is not None
        try:
            self._receive(*self._first)
        except Exception as error:  # noqa: BLE001 - raised by the first attempt of `run`
            self._failure = error

    def _attempt(self, options: dict[str, Any]) -> None:
        if failure := self._failure:
            self._failure = None
            raise failure
        call = self._send(options)
        try:
            self._receive(call, options)
        finally:
            call.cancel()

    def _send(self, options: dict[str, Any]) -> Any:
        return self._connection._stubs["Fetch"](self._rows.request(self._request), **options)

    def _receive(self, call: Any, options: dict[str, Any]) -> None:
        rows = self._rows
        for message in call:
            rows.add(message)
        self._connection._note_mark(call, options)
        if rows.num_arrived < rows.num_asked:
            raise ClusterError(f"{self._connection.name} answered {rows.num_arrived} of {rows.num_asked} rows")


def _is_behind(mark: str, other: str) -> bool:
    """Whether it is an earlier state of the same incarnation."""
    if not (mark and other):
        return False
    (incarnation, commit), (of_other, commit_of_other) = split_mark(mark), split_mark(other)
    return incarnation == of_other and commit < commit_of_other


def _retry_hint(error: grpc.RpcError) -> float:
    """Seconds after which the shard wants to be asked again; 0 where it says nothing."""
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_HINT and value.isdigit():
            return min(int(value) / 1000, _LONGEST_PAUSE_SECONDS)
    return 0.0
