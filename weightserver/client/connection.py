"""One shard as the client sees it: a channel, a deadline for every attempt, and attempts until a budget is spent.

Rows that an attempt of a fetch received are kept: the next attempt asks for the others, and the budget restarts. So a
fetch succeeds however long it takes, as long as one of its messages arrives within each attempt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from weightserver.client.calls import STATISTICS, Call, CallWatch
from weightserver.client.fetched_rows import FetchedRows
from weightserver.client.retries import AnswerInDoubtError, Failure, Retries
from weightserver.client.tls_diagnosis import tls_failure
from weightserver.client.workers import Workers
from weightserver.common.logs import REQUEST_ID
from weightserver.common.version import __version__
from weightserver.core.errors import (
    AuthenticationError,
    ClusterError,
    DataLossError,
    OverloadedError,
    ShardUnavailableError,
    StorageError,
    WeightServerError,
)
from weightserver.core.lineage import is_earlier
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    ACKNOWLEDGED_KEY,
    MARK_KEY,
    MAX_MESSAGE_BYTES,
    ONE_MESSAGE_KEY,
    OWN_TIME_KEY,
    VERSION_KEY,
)
from weightserver.protocol.status import ERROR_OF_STATUS, status_of

_SERVICE = pb.DESCRIPTOR.services_by_name["WeightServer"]
_OPTIONS = [
    (ChannelOptions.SingleThreadedUnaryStream, 1),  # an answer's chunks pass through no second thread
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),  # one that the environment names would read the token of a call without TLS
]

Result = TypeVar("Result")


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel straight to a shard, with TLS if credentials are given."""
    if credentials is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, credentials, _OPTIONS)


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
        watch: CallWatch,
    ) -> None:
        self._workers = workers
        self.watch = watch
        self.address = self.name = self.label = address
        """`name` and `label` are the address until `identify`."""
        self._tls = credentials is not None
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._metadata = [(VERSION_KEY, __version__), *([("authorization", f"Bearer {token}")] if token else [])]
        self._lock = threading.Lock()
        self.acknowledged = ""
        """The shard's newest mark that was seen; every attempt sends it. Empty before the first answer."""
        self._channel = open_channel(address, credentials)
        self._stubs = {method.name: self._stub(method) for method in _SERVICE.methods}
        self._fetch_of_one_message = self._stub(_SERVICE.methods_by_name["Fetch"], one_message=True)

    def _stub(self, method: Any, *, one_message: bool = False) -> Any:
        if method.server_streaming and not one_message:
            kind = self._channel.unary_stream
        elif method.client_streaming:
            kind = self._channel.stream_unary
        else:
            kind = self._channel.unary_unary
        return kind(
            f"/{_SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            # Fetch answers are decoded without a copy.
            response_deserializer=None if method.name == "Fetch" else GetMessageClass(method.output_type).FromString,
        )

    def identify(self, shard: int) -> None:
        """The shard at the address has said which one it is."""
        self.name, self.label = f"shard {shard} at {self.address}", str(shard)

    def new_call(self, method: str, num_rows: int = 0, rows: FetchedRows | None = None) -> Call:
        return Call(self.label, self.name, method, num_rows, rows)

    def call(self, method: str, request: Message, *, acknowledged: str = "", once: bool = False) -> Any:
        """Makes a call of one message, and retries it unless `once`; returns the answer.

        Args:
            acknowledged: a mark to send instead of the newest.
        """
        made = self.new_call(method)

        def attempt(options: dict[str, Any]) -> Any:
            STATISTICS.attempted(made)
            answer, call = self._stubs[method].with_call(request, **options)
            if not self._note_mark(call, options) and not acknowledged:
                raise AnswerInDoubtError
            return answer

        return self._workers.run(partial(self._attempts, made, attempt, acknowledged, once=once))

    def require(self, mark: str) -> None:
        """Raises DataLossError unless the shard's data descends from the state of that mark."""
        if mark and mark != self.acknowledged and not is_earlier(mark, self.acknowledged):
            self.call("Describe", pb.DescribeRequest(), acknowledged=mark)

    def write(self, method: str, messages: Callable[[], Iterator[Message]], num_rows: int) -> pb.WriteResponse:
        """Makes a write of `num_rows` rows and returns its answer; each attempt sends new `messages`."""
        made = self.new_call(method, num_rows)

        def attempt(options: dict[str, Any]) -> pb.WriteResponse:
            STATISTICS.attempted(made)
            answer: pb.WriteResponse
            answer, call = self._stubs[method].with_call(messages(), **options)
            if not self._note_mark(call, options):
                raise AnswerInDoubtError
            return answer

        return self._workers.run(partial(self._attempts, made, attempt))

    def fetch(self, request: pb.FetchRequest, rows: FetchedRows) -> ShardFetch:
        """A fetch of `rows` like `request`; nothing is sent yet."""
        return ShardFetch(self, request, rows)

    def _options(self, acknowledged: str, call: Call) -> dict[str, Any]:
        """Deadline and metadata of an attempt."""
        mark = acknowledged or self.acknowledged
        metadata = [*self._metadata, *([(ACKNOWLEDGED_KEY, mark)] if mark else []), (REQUEST_ID, call.request_id)]
        return {"timeout": self._timeout_seconds, "metadata": metadata}

    def _attempts(
        self, call: Call, attempt: Callable[[dict[str, Any]], Result], acknowledged: str = "", *, once: bool = False
    ) -> Result:
        """Makes attempts until one succeeds, or the budget is spent, or only one with `once`. Runs in a worker. When
        rows of a fetch arrive the budget restarts.
        """
        retries = Retries(call, self._retry_seconds)
        with self.watch.whole(call):
            while True:
                self._workers.check()
                try:
                    return attempt(self._options(acknowledged, call))
                except (AnswerInDoubtError, grpc.RpcError) as error:
                    failure = Failure.of(error)
                self._note_failure(call, failure)
                self._raise_permanent(failure, call, retries)
                if retries.restart_if_rows_arrived():
                    continue
                retries.note_failure(failure)
                if retries.is_spent or once:
                    raise self._unanswered(failure, retries)
                retries.pause()

    @staticmethod
    def _note_failure(call: Call, failure: Failure) -> None:
        call.failure = failure.status.name
        STATISTICS.failed(call, call.failure)

    def _raise_permanent(self, failure: Failure, call: Call, retries: Retries) -> None:
        """Raises the error of a failure that no retry would heal; returns after any other."""
        if failure.status is grpc.StatusCode.UNIMPLEMENTED:
            raise ClusterError(
                f"{self.name} does not know this call: it runs an older version, or is no weight server: update it"
            )
        if not failure.is_retried:
            details = failure.details
            if failure.status in (status_of(WeightServerError), status_of(StorageError)):
                details += f" (its log tells more of request {call.request_id})"
            kind = ERROR_OF_STATUS.get(failure.status, WeightServerError)
            refusal = kind(f"{self.name}: {details}", **failure.fields)
            refusal.not_applied &= not retries.in_doubt
            raise refusal
        if reason := tls_failure(self.address, failure.status, failure.details, tls=self._tls):
            raise AuthenticationError(f"{self.name} cannot be called: {reason}")

    def _unanswered(self, failure: Failure, retries: Retries) -> WeightServerError:
        """The error after the last attempt."""
        if failure.is_overload:
            overloaded = OverloadedError(
                f"{self.name} was overloaded for {retries.waited:.1f} s{retries.progress}: {failure.details}"
            )
            overloaded.not_applied &= not retries.in_doubt
            return overloaded
        return ShardUnavailableError(
            f"{self.name} did not answer for {retries.waited:.1f} s ({failure.cause}){retries.progress}: check "
            "that it runs and can be reached, then repeat the call"
        )

    def _note_mark(self, call: Any, options: dict[str, Any]) -> bool:
        """Remembers the shard's mark, with which the answer ends.

        Returns False if the mark cannot be ordered: another thread has meanwhile seen one of another process of the
        shard, which may be older or newer.

        Raises:
            DataLossError: the shard's state is older than one that it had acknowledged.
        """
        mark = next((value for key, value in call.trailing_metadata() or () if key == MARK_KEY), "")
        sent = dict(options["metadata"]).get(ACKNOWLEDGED_KEY, "")
        if not mark or mark == sent:
            return True
        if is_earlier(mark, sent):
            lost = DataLossError(f"{self.name} answers from {mark}, which precedes {sent}, which it had acknowledged")
            lost.not_applied = False
            raise lost
        with self._lock:
            before = self.acknowledged
            # The shard has checked its data against `sent` only, not against what other threads have seen meanwhile.
            if before == sent or is_earlier(before, mark):
                self.acknowledged = mark
            return self.acknowledged == mark or is_earlier(mark, before)

    def close(self) -> None:
        self._channel.close()


class ShardFetch:
    """A fetch of one shard's rows. Each attempt asks for those that have not arrived yet.

    One thread can make the first attempts on several shards at once: it begins them all before it ends the first.
    """

    def __init__(self, connection: ShardConnection, request: pb.FetchRequest, rows: FetchedRows) -> None:
        self._connection = connection
        self._request = request
        self._rows = rows
        self.shard_seconds: float | None = None
        """How long the last answer took the shard itself; None if the shard does not say that."""
        self._call: Call | None = None
        """The call whose first attempt `_begin` made."""
        self._first: tuple[Any, dict[str, Any]] | None = None
        """That attempt, and its options."""
        self._failure: Exception | None = None
        """The error that `_end_first` caught."""

    @staticmethod
    def try_together(fetches: Sequence[ShardFetch]) -> None:
        """Makes the first attempt of each fetch. `run` retries those that fail."""
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
        """Returns when all rows have arrived; raises the errors of a call of the shard."""
        connection = self._connection
        while not self.is_complete:
            call, self._call = self._call or self._new_call(), None
            connection._workers.run(partial(connection._attempts, call, partial(self._attempt, call)))

    def abandon(self) -> None:
        """Ends what `run` has not."""
        if self._call:
            self._connection.watch.ended(self._call, time.monotonic() - self._call.started)

    def _new_call(self) -> Call:
        return self._connection.new_call("Fetch", self._rows.num_rows, self._rows)

    def _begin(self) -> None:
        Workers.check()
        self._call = self._new_call()
        options = self._connection._options("", self._call)
        request = self._next_request(self._call, options)
        self._first = self._connection._stubs["Fetch"](request, **options), options

    def _end_first(self) -> None:
        """Receives the answer of the first attempt.

        It may have been there before the thread turned to it, while it received those of other shards: then the call
        took as long as the shard says, not as long as those of the others.
        """
        assert self._first is not None
        assert self._call is not None
        watch = self._connection.watch
        watch.wait_for(self._call)
        try:
            sent, options = self._first
            self._receive(sent, sent, options)
        except Exception as error:  # noqa: BLE001 - raised by the first attempt of `run`
            self._failure = error
            return
        now = time.monotonic()
        seconds = now - self._call.started
        if self.shard_seconds is not None:
            seconds = min(seconds, self.shard_seconds + now - self._call.waited_since)
        watch.ended(self._call, seconds)
        self._call = None

    def _attempt(self, call: Call, options: dict[str, Any]) -> None:
        if failure := self._failure:
            self._failure = None
            raise failure
        request = self._next_request(call, options)
        if self._rows.fit_one_message:
            message, answered = self._connection._fetch_of_one_message.with_call(request, **options)
            self._receive([message] if message is not None else [], answered, options)
            return
        sent = self._connection._stubs["Fetch"](request, **options)
        try:
            self._receive(sent, sent, options)
        finally:
            sent.cancel()

    def _next_request(self, call: Call, options: dict[str, Any]) -> pb.FetchRequest:
        """Counts an attempt; returns its request, and adds to its metadata."""
        STATISTICS.attempted(call)
        request = self._rows.request(self._request)
        if self._rows.fit_one_message:
            options["metadata"].append((ONE_MESSAGE_KEY, "1"))
        return request

    def _receive(self, messages: Iterable[bytes], call: Any, options: dict[str, Any]) -> None:
        rows = self._rows
        for message in messages:
            rows.add(message)
        self.shard_seconds = _own_seconds(call)
        self._connection._note_mark(call, options)
        if rows.num_arrived < rows.num_asked:
            raise ClusterError(f"{self._connection.name} answered {rows.num_arrived} of {rows.num_asked} rows")


def _own_seconds(call: Any) -> float | None:
    """How long the shard says the call took it, without waiting for this client; None if it says nothing."""
    for key, value in call.trailing_metadata() or ():
        if key == OWN_TIME_KEY and value.isascii() and value.isdigit():
            return int(value[:15]) / 1e6
    return None
