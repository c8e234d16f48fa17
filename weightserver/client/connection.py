"""One shard as the client sees it: a deadline for every attempt, and attempts until a budget is spent.

Rows that an attempt of a fetch received are kept: the next attempt asks for the others, and the budget restarts. So a
fetch succeeds however long it takes, as long as one of its messages arrives within each attempt.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc

from weightserver.client import metrics
from weightserver.client.arguments import checked_token
from weightserver.client.calls import WATCH, Call
from weightserver.client.channels import Channel, Channels, Credentials, answer_of
from weightserver.client.fetched_rows import FetchedRows
from weightserver.client.rates import CarriedRates
from weightserver.client.retries import ANSWERED, AnswerInDoubtError, AnswerOfAnotherError, Failure, Retries
from weightserver.client.threads import require_caller
from weightserver.common.logs import REQUEST_ID
from weightserver.common.tracing import CLIENT, spans
from weightserver.common.version import __version__
from weightserver.core.errors import ClusterError, DataLossError, InvalidRequestError, WeightServerError
from weightserver.core.lineage import is_earlier
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    ACKNOWLEDGED_KEY,
    ONE_MESSAGE_KEY,
    OWN_TIME_KEY,
    SHARD_KEY,
    TABLE_KEY,
    VERSION_KEY,
)
from weightserver.protocol.status import is_of_shard, mark_of, mark_of_refusal

_MOST_LACKING = 4
"""Attempts that a shard may refuse for missing learning rates before the next one waits."""

Result = TypeVar("Result")
Attempt = Callable[[Channel, dict[str, Any]], Result]


class ShardConnection:
    """Calls one shard; safe to use from any thread."""

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials,
        token: str | Callable[[], str] | None,
        timeout_seconds: float,
        retry_seconds: float,
        connect_seconds: float,
    ) -> None:
        self.address = self.name = address
        """`name` is the address until `identify`."""
        self._label = "unknown"
        self._expected = ""
        self.shard = 0
        """Known after `identify`."""
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._connect_seconds = connect_seconds
        self._has_answered = False
        self._metadata = [(VERSION_KEY, __version__)]
        self._token = token
        self._lock = threading.Lock()
        self.acknowledged = ""
        """The shard's newest mark that was seen; every attempt sends it. Empty before the first answer."""
        self.table = b""
        """Identity of the client's table; empty while it knows none."""
        self.data_loss: DataLossError | None = None
        """The last one that a call raised."""
        self._homes: Sequence[str] = ()
        """The addresses at which the shards were found first, in the order of shards."""
        self._channels = Channels(address, credentials)
        self.close = self._channels.close

    def identify(self, shard: int, homes: Sequence[str]) -> None:
        """The shards at all addresses have said which ones they are; from now on every call is for this one."""
        self._homes, self._expected = homes, f"{shard}/{len(homes)}"
        self._metadata.append((SHARD_KEY, self._expected))
        self.shard, self.name, self._label = shard, f"shard {shard} at {self.address}", str(shard)
        for answered in ANSWERED:  # so that the first one is an increase
            metrics.wrong_answers(self._label, self._expected, answered)

    def _move_on(self, tried: str, told: Mapping[str, int]) -> None:
        """Calls the shard elsewhere after an attempt at an address where it did not answer, unless another thread has
        moved on: at that of the shard which answered, as they may have exchanged theirs, otherwise at its own."""
        if not self._homes or self.address != tried:
            return
        address, other = self._homes[self.shard], told.get("own_shard", self.shard)
        if told.get("own_num_shards") == len(self._homes) and other < len(self._homes) and self._homes[other] != tried:
            address = self._homes[other]
        self.address = self._channels.address = address
        self.name = f"shard {self.shard} at {address}"

    def call(
        self,
        method: str,
        request: Any,
        *,
        rates: CarriedRates | None = None,
        acknowledged: str = "",
        num_rows: int = 0,
    ) -> Any:
        """Makes a call that is answered by one message; returns the answer.

        Args:
            request: its message, whose header is given the rates; or makes the messages of an attempt from them.
            rates: learning rates to name.
            acknowledged: a mark to send instead of the newest.
            num_rows: number of rows that it writes.
        """

        def attempt(channel: Channel, options: dict[str, Any]) -> Any:
            named, sent = pb.Rates() if rates is None else rates.message(self.shard), request
            if callable(request):
                sent = request(named)
            elif rates is not None:
                sent = type(request)()
                sent.CopyFrom(request)
                sent.header.rates.CopyFrom(named)
            try:
                data, call = channel.call(method, sent, options)
            except grpc.RpcError as refused:
                mark = mark_of_refusal(refused)
                if mark and not self._remember(mark, _sent_mark(options)) and not acknowledged:
                    raise AnswerInDoubtError from None
                raise
            if not self._note_mark(call, options) and not acknowledged:
                raise AnswerInDoubtError
            return answer_of(method, data)

        return self._attempts(self._new_call(method, num_rows), attempt, rates, acknowledged)

    def _new_call(self, method: str, num_rows: int, rows: FetchedRows | None = None) -> Call:
        call = Call(self._label, self.name, self._expected, method, num_rows, rows)
        call.budget_seconds = self._budget_seconds
        return call

    def tell(self, method: str, request: Any, seconds: float) -> None:
        """Makes one attempt at a call whose answer nobody waits for longer; whether it arrives is not known."""
        with contextlib.suppress(Exception):  # it is closed, or an error of the token's or the credentials' own
            channel, has_returned = self._channels.take(), False
            try:
                channel.call(method, request, {"timeout": seconds, "metadata": self._known_metadata()})
                has_returned = True
            except grpc.RpcError:
                has_returned = True
            finally:
                self._channels.leave(channel, has_returned=has_returned)

    def require(self, mark: str) -> None:
        """Raises DataLossError unless the shard's data descends from the state of that mark."""
        if mark and mark != self.acknowledged and not is_earlier(mark, self.acknowledged):
            self.call("Describe", pb.DescribeRequest(), acknowledged=mark)
            self.call("Describe", pb.DescribeRequest())  # the mark of that answer may be none that follows the own one

    def fetch(self, like: pb.FetchRequest, rates: CarriedRates | None, rows: FetchedRows) -> None:
        """Fetches `rows` by requests like the given one. Each attempt asks for those that have not arrived."""

        def attempt(channel: Channel, options: dict[str, Any]) -> None:
            request = rows.request(like)
            if rates is not None:
                request.rates.CopyFrom(rates.message(self.shard))
            if rows.fit_one_message:
                options["metadata"].append((ONE_MESSAGE_KEY, "1"))
                message, one = channel.call("Fetch", request, options)
                self._receive([message] if message is not None else [], one, options, rows)
                return
            answer = channel.fetch(request, options)
            try:
                self._receive(answer, answer, options, rows)
            finally:
                answer.cancel()

        while rows.num_arrived < rows.num_rows:
            self._attempts(self._new_call("Fetch", rows.num_rows, rows), attempt, rates)

    def _receive(self, messages: Iterable[bytes], call: Any, options: dict[str, Any], rows: FetchedRows) -> None:
        messages = iter(messages)
        try:
            for message in messages:
                rows.add(message)
        except (ClusterError, InvalidRequestError):  # an answer that is none of these rows
            for _ in messages:
                pass
            if is_of_shard(call.trailing_metadata()):
                raise
            raise AnswerOfAnotherError from None
        rows.shard_seconds = _own_seconds(call)
        self._note_mark(call, options)
        if rows.num_arrived < rows.num_asked:
            raise ClusterError(f"{self.name} answered {rows.num_arrived} of {rows.num_asked} rows")

    # ---- attempts

    def _known_metadata(self) -> list[tuple[str, str]]:
        """The metadata of every call, with the token that is the client's now."""
        token = checked_token(self._token()) if callable(self._token) else self._token
        return [*self._metadata, *([("authorization", f"Bearer {token}")] if token else [])]

    def _options(self, request_id: str, acknowledged: str = "") -> dict[str, Any]:
        """Deadline and metadata of an attempt."""
        mark = acknowledged or self.acknowledged
        metadata = [*self._known_metadata(), *([(ACKNOWLEDGED_KEY, mark)] if mark else []), (REQUEST_ID, request_id)]
        if traced := spans(CLIENT):
            metadata += traced.header(request_id)
        if self.table:
            metadata.append((TABLE_KEY, self.table.hex()))
        seconds = self._timeout_seconds if self._has_answered else min(self._timeout_seconds, self._connect_seconds)
        return {"timeout": seconds, "metadata": metadata}

    @property
    def _budget_seconds(self) -> float:
        return self._retry_seconds if self._has_answered else self._connect_seconds

    def _attempts(
        self, call: Call, attempt: Attempt[Result], rates: CarriedRates | None = None, acknowledged: str = ""
    ) -> Result:
        """Makes attempts until one succeeds, or the budget is spent. When rows of a fetch arrive the budget restarts. A
        shard that lacks some of the learning rates that a request names gets them in the next one.
        """
        retries, num_lacking = Retries(call), 0
        try:
            WATCH.began(call)
            while True:
                require_caller()
                call.attempted()
                channel, has_returned = self._channels.take(), False
                try:
                    for request in rates.missing(self.shard) if rates is not None else ():
                        list(channel.fetch(request, self._options(call.request_id)))
                    answer = attempt(channel, self._options(call.request_id, acknowledged))
                    self._has_answered = has_returned = True
                    if rates is not None:
                        rates.were_taken(self.shard)
                    return answer
                except (AnswerInDoubtError, grpc.RpcError) as error:
                    has_returned = True
                    failure = Failure.of(error, has_answered=self._has_answered, mark_is_own=not acknowledged)
                    self._has_answered |= not (failure.is_silence or failure.is_of_another)
                    if failure.is_of_another or (failure.is_silence and not retries.have_rows_arrived):
                        channel.is_useless = True
                        self._move_on(channel.address, failure.fields)
                except (WeightServerError, CancelledError):
                    has_returned = True
                    raise
                finally:
                    self._channels.leave(channel, has_returned=has_returned)
                self._channels.require_open()
                if "num_used" in failure.fields and rates is not None:
                    rates.are_missing(self.shard, failure.fields["num_used"])
                    num_lacking += 1
                    if num_lacking < _MOST_LACKING:
                        continue
                call.budget_seconds = self._budget_seconds
                retries.after(failure, has_answered=self._has_answered)
        except BaseException as error:
            call.gave_up(error)
            if isinstance(error, ValueError):
                self._channels.require_open()
            if isinstance(error, DataLossError):
                self.data_loss = error
            raise
        finally:
            WATCH.waiting.pop(call, None)  # before any Python code, where an interrupt could leave it there
            WATCH.ended(call)

    def _note_mark(self, call: Any, options: dict[str, Any]) -> bool:
        """Remembers the shard's mark, with which the answer ends.

        Returns False if the mark cannot be ordered: another thread has meanwhile seen one of another process of the
        shard, which may be older or newer.

        Raises:
            AnswerOfAnotherError: there is no mark.
            DataLossError: the shard's state is older than one that it had acknowledged.
        """
        mark, sent = mark_of(call.trailing_metadata()), _sent_mark(options)
        if not mark:
            raise AnswerOfAnotherError
        if mark == sent:
            return True
        if is_earlier(mark, sent):
            lost = DataLossError(f"{self.name} answers from {mark}, which precedes {sent}, which it had acknowledged")
            lost.not_applied = False
            raise lost
        return self._remember(mark, sent)

    def _remember(self, mark: str, sent: str) -> bool:
        """Remembers a mark from the answer to an attempt that sent another one; returns as `_note_mark`."""
        with self._lock:
            before = self.acknowledged
            # The shard has checked its data against `sent` only, not against what other threads have seen meanwhile.
            if before == sent or is_earlier(before, mark):
                self.acknowledged = mark
            return self.acknowledged == mark or is_earlier(mark, before)


def _sent_mark(options: dict[str, Any]) -> str:
    """The mark that an attempt sends; empty if it sends none."""
    mark: str = dict(options["metadata"]).get(ACKNOWLEDGED_KEY, "")
    return mark


def _own_seconds(call: Any) -> float | None:
    """How long the shard says the call took it, without waiting for this client; None if it says nothing."""
    for key, value in call.trailing_metadata() or ():
        if key == OWN_TIME_KEY and value.isascii() and value.isdigit():
            return int(value[:15]) / 1e6
    return None
