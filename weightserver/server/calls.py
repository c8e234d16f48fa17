"""How handlers answer calls: they watch and time them, turn errors into statuses, and commit writes.

All read their requests as streams, even those of one message, which look the same on the wire: gRPC would wait for a
unary request's message in a thread, without a bound.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc

from weightserver.common.logs import OncePerSecond
from weightserver.common.metrics import size_class
from weightserver.common.stages import StageClock, call_clock
from weightserver.common.tracing import SHARD, TRACE_KEY, spans
from weightserver.common.version import __version__, works_with
from weightserver.core.errors import (
    DamagedBlockError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    StorageError,
    WeightServerError,
    WrongShardError,
)
from weightserver.protocol.codec import ACKNOWLEDGED_KEY, MARK_KEY, OWN_TIME_KEY, SHARD_KEY, TABLE_KEY, VERSION_KEY
from weightserver.protocol.status import status_of
from weightserver.server.admission import StallWatch, abort, requests
from weightserver.server.checks import check_mark
from weightserver.server.metrics import ShardMetrics
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Calls:
    """What the handlers of one shard share. Thread-safe.

    Args:
        slow_seconds: calls that take longer are logged.
        on_write: called after each write, with the reason if the disk refused it.
    """

    def __init__(
        self,
        shard: Shard,
        committer: Committer,
        metrics: ShardMetrics,
        stalls: StallWatch,
        *,
        slow_seconds: float,
        on_write: Callable[[str], object],
    ) -> None:
        self._shard = shard
        self._committer = committer
        self._metrics = metrics
        self._stalls = stalls
        self._slow_seconds = slow_seconds
        self._on_write = on_write
        self._may_log = OncePerSecond()

    def handler(
        self,
        method: str,
        behaviour: Callable[[Any, Any], Any],
        parse: Callable[[bytes], Any],
        serialize: Callable[[Any], bytes] | None = None,
        *,
        of_one: bool,
    ) -> grpc.RpcMethodHandler:
        """The handler of a method that returns its answer.

        Args:
            of_one: whether the behaviour takes the call's only message, instead of all of them.
        """

        def answer(received: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._stalls.watched(context) as call, self._answering(method, context):
                messages = requests(received, call, parse)
                return behaviour(_only(messages) if of_one else messages, context)

        return grpc.stream_unary_rpc_method_handler(answer, None, serialize)

    def handler_in_parts(
        self, method: str, behaviour: Callable[[Any, Any], Generator[bytes, None, None]], parse: Callable[[bytes], Any]
    ) -> grpc.RpcMethodHandler:
        """The handler of a method that takes one message and generates its answers."""

        def answers(received: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with (
                self._stalls.watched(context) as call,
                self._answering(method, context),
                contextlib.closing(behaviour(_only(requests(received, call, parse)), context)) as parts,
            ):
                for message in parts:
                    call.wait()
                    yield message
                    call.is_silent = False

        return grpc.stream_stream_rpc_method_handler(answers)

    @contextlib.contextmanager
    def _answering(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Times the call from its arrival, and turns any error into its status. It begins in the stage "read" if it is
        a fetch, otherwise "work"."""
        clock, status = call_clock(), grpc.StatusCode.OK
        try:
            self._check_caller(context)
            clock.start("read" if method == "Fetch" else "work")
            yield
            clock.start("end")
            context.set_trailing_metadata((*self._trailer(), (OWN_TIME_KEY, str(_own_microseconds(clock)))))
        except WeightServerError as error:
            status = status_of(type(error))
            if isinstance(error, FencedError):
                self._metrics.fenced.inc()
            if isinstance(error, DamagedBlockError):
                self._metrics.damaged.inc()
            if isinstance(error, FencedError | StorageError | DataLossError) and self._may_log(("refused", method)):
                _log.warning("%(method)s refused: %(reason)s", {"method": method, "reason": str(error)})
            abort(context, error, self._trailer())
        except (GeneratorExit, CancelledError):  # the caller is gone
            status = grpc.StatusCode.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - the boundary: only our own errors cross the wire
            _log.exception("%(method)s failed", {"method": method})
            status = grpc.StatusCode.INTERNAL
            abort(context, WeightServerError(f"shard {self._shard.shard} failed on {method}"), self._trailer())
        finally:
            clock.start("end")
            seconds = clock.elapsed_seconds()
            self._metrics.answered(method, status, size_class(clock.num_rows), seconds)
            if traced := spans(SHARD):
                header = str(dict(context.invocation_metadata()).get(TRACE_KEY, ""))
                values = {"shard": self._shard.shard, "rows": clock.num_rows}
                traced.answered(header, method, seconds, status.name, values, clock.seconds)
            if seconds >= self._slow_seconds:
                self._log_slow(method, status.name, seconds, clock)

    def _check_caller(self, context: grpc.ServicerContext) -> None:
        """Refuses calls for another shard, callers of other minor versions, and callers that know of writes that the
        shard lacks."""
        metadata = dict(context.invocation_metadata())
        own = f"{self._shard.shard}/{self._shard.num_shards}"
        if (wanted := str(metadata.get(SHARD_KEY, own))) != own:
            raise WrongShardError(
                f"shard {own} answers, the call is for shard {wanted[:20]}",
                own_shard=self._shard.shard,
                own_num_shards=self._shard.num_shards,
            )
        version = str(metadata.get(VERSION_KEY, "none"))
        if not works_with(version):
            raise InvalidRequestError(
                f"this shard has version {__version__}, the caller {version[:20]}: use one minor version for all"
            )
        if acknowledged := str(metadata.get(ACKNOWLEDGED_KEY, "")):
            check_mark(acknowledged)
            self._shard.check_acknowledged(acknowledged, str(metadata.get(TABLE_KEY, "")))

    def _trailer(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every answer."""
        return ((MARK_KEY, self._shard.state.mark),)

    def _log_slow(self, method: str, status: str, seconds: float, clock: StageClock) -> None:
        """Logs a call that took long, with its stages."""
        if not self._may_log(("slow", method)):
            return
        stages = {f"{stage}_seconds": round(spent, 4) for stage, spent in clock.seconds.items() if spent >= 0.0001}
        _log.warning("slow request", extra={"method": method, "status": status, "seconds": round(seconds, 3)} | stages)

    def commit(
        self,
        context: grpc.ServicerContext,
        operation: Callable[[ShardChange], Result],
        first: Callable[[], None] = lambda: None,
    ) -> Result:
        """Runs `first`, then `operation` in a transaction; returns its result once it is durable."""
        clock = call_clock()
        stage = clock.start("commit")
        try:
            first()
            future = self._committer.submit(operation)
            if not context.add_callback(future.cancel):  # called too when the deadline passes
                future.cancel()
            result = future.result()
            self._on_write("")
            return result
        except DamagedBlockError:  # other rows can be written
            raise
        except StorageError as error:
            self._on_write(str(error))
            raise
        finally:
            clock.start(stage)


def _only(requests: Iterator[Any]) -> Any:
    for request in requests:
        return request
    raise InvalidRequestError("the call contains no message")


def _own_microseconds(clock: StageClock) -> int:
    """The time of a call without the stages in which the shard waits for the caller."""
    return round(1e6 * sum(spent for stage, spent in clock.seconds.items() if stage not in ("receive", "send")))
