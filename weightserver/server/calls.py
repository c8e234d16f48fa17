"""How handlers answer calls: they time them, turn errors into statuses, and commit writes."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import TypeVar

import grpc

from weightserver.common.stages import StageClock, arrived
from weightserver.common.version import __version__
from weightserver.core.errors import (
    DataLossError,
    FencedError,
    InvalidRequestError,
    StorageError,
    WeightServerError,
)
from weightserver.protocol.codec import ACKNOWLEDGED_KEY, MARK_KEY, VERSION_KEY, is_understood
from weightserver.protocol.status import status_of
from weightserver.server.admission import abort
from weightserver.server.metrics import CallMetrics
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteTransaction

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Calls:
    """What the handlers of one shard share. Thread-safe."""

    def __init__(self, shard: Shard, committer: Committer, metrics: CallMetrics) -> None:
        self._shard = shard
        self._committer = committer
        self._metrics = metrics
        self._refusal_logged: dict[str, float] = {}

    @contextlib.contextmanager
    def answering(self, method: str, context: grpc.ServicerContext) -> Iterator[StageClock]:
        """Times the call from its arrival, and turns any error into its status."""
        clock, status = StageClock("queue", arrived()), grpc.StatusCode.OK
        try:
            self._check_caller(context)
            yield clock
            context.set_trailing_metadata(self._trailer())
        except WeightServerError as error:
            status = status_of(type(error))
            if isinstance(error, FencedError):
                self._metrics.fenced()
            if isinstance(error, FencedError | StorageError | DataLossError) and self._may_log(method):
                _log.warning("%s refused: %s", method, error)
            abort(context, error, self._trailer())
        except (ValueError, TypeError) as error:  # TableSpec's own checks
            status = grpc.StatusCode.INVALID_ARGUMENT
            abort(context, InvalidRequestError(str(error)), self._trailer())
        except (GeneratorExit, CancelledError, grpc.RpcError):  # the caller is gone
            status = grpc.StatusCode.CANCELLED
            raise
        except Exception:  # noqa: BLE001 - the boundary: only our own errors cross the wire
            _log.exception("%s failed", method)
            status = grpc.StatusCode.INTERNAL
            abort(context, WeightServerError(f"shard {self._shard.shard} failed on {method}"), self._trailer())
        finally:
            self._metrics.answered(method, status.name, clock.elapsed_seconds())

    def _check_caller(self, context: grpc.ServicerContext) -> None:
        """Refuses callers of older versions, and callers that know of acknowledged writes that the shard lacks."""
        metadata = dict(context.invocation_metadata())
        version = str(metadata.get(VERSION_KEY, "0.1"))
        if not is_understood(version):
            raise InvalidRequestError(
                f"this shard has version {__version__}, the caller {version[:20]}: update the caller"
            )
        if acknowledged := metadata.get(ACKNOWLEDGED_KEY):
            self._shard.check_acknowledged(str(acknowledged))

    def _trailer(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata of every answer."""
        return ((MARK_KEY, self._shard.state.mark),)

    def _may_log(self, method: str) -> bool:
        """Limits the log to one refusal per method and second; the metrics count all."""
        now = time.monotonic()
        if now - self._refusal_logged.get(method, -math.inf) < 1.0:
            return False
        self._refusal_logged[method] = now
        return True

    def commit(self, context: grpc.ServicerContext, operation: Callable[[WriteTransaction], Result]) -> Result:
        """Runs `operation` in a transaction; returns its result once it is durable."""
        future = self._committer.submit(operation)
        if not context.add_callback(future.cancel):  # called too when the deadline passes
            future.cancel()
        return future.result()
