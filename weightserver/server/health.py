"""A shard's health: for grpc.health.v1, and for probes by HTTP that cost nothing. It is found when it is asked for.

- Alive: the database can be used. If that stays untrue, the process ends, so that whatever supervises it starts it
  again: Docker restarts no container that is only unhealthy.
- Ready: clients can fetch and write. A restart would change nothing of what hinders them.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2

from weightserver.protocol.codec import NOT_READY_KEY

_MIN_FREE_MIB = 256
"""A shard whose volume has less free space is not ready: writes may be refused."""

_LASTING_SECONDS = 60.0
"""How long the database may be unusable before the process ends."""
_REFUSED_SECONDS = 300.0
"""How long a shard is not ready after a write that the disk refused, unless another one succeeds."""

_log = logging.getLogger(__name__)


class ShardHealth:
    """Answers health checks of one shard. Thread-safe.

    Args:
        problem: why the database cannot be used; empty if it can.
        directory: where the data are.
        hindrance: why clients cannot call the shard, such as an expired certificate; empty if they can.
        on_lasting: called with the problem when it has lasted.
    """

    def __init__(
        self,
        problem: Callable[[], str],
        directory: Path,
        *,
        hindrance: Callable[[], str] = str,
        on_lasting: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._problem_of_database = problem
        self._directory = directory
        self._hindrance = hindrance
        self._on_lasting = on_lasting
        self._changing = threading.Lock()
        self._known: str | None = None
        self._since = 0.0
        """When the problem began."""
        self._phase = "the shard is starting"
        self._refused, self._refused_at = "", 0.0
        """Why the last write was refused; empty if it succeeded."""

    def look(self) -> str:
        """Returns why the database cannot be used, or nothing."""
        problem = self._problem_of_database()
        now = time.monotonic()
        with self._changing:
            if problem != self._known:
                if problem:
                    _log.error("not serving: %(reason)s", {"reason": problem})
                elif self._known:
                    _log.warning("serving again")
                self._since = self._since if problem and self._known else now
                self._known = problem
        if problem and now - self._since > _LASTING_SECONDS:
            self._on_lasting(problem)
        return problem

    def serve(self) -> None:
        self._phase = ""

    def drain(self) -> None:
        """Stops looking at the database: it keeps the problem that it has, if any, and being closed soon is none."""
        self._phase, known = "the shard is draining", self._known or ""
        self._problem_of_database = lambda: known

    def wrote(self, refused: str = "") -> None:
        """Notes that a write succeeded, or why the disk refused it."""
        self._refused, self._refused_at = refused, time.monotonic()
        if refused or self._known:
            self.look()  # also after a success: a problem that ended in between has not lasted

    # ---- gRPC

    def add_to_server(self, server: grpc.Server) -> None:
        """Adds grpc.health.v1's Check, in threads of its own: it is answered however many other calls wait."""

        def check(_: Iterator[bytes], context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
            """Speaks for the whole shard, so it does not wait for the message that names a service."""
            status, text = self.ready()
            if status is HTTPStatus.OK:
                return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
            context.set_trailing_metadata(((NOT_READY_KEY, text.encode()),))
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

        check.experimental_thread_pool = ThreadPoolExecutor(2, "health")  # type: ignore[attr-defined]
        response = health_pb2.HealthCheckResponse.SerializeToString
        handlers = {"Check": grpc.stream_unary_rpc_method_handler(check, None, response)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)])

    # ---- HTTP

    def live(self) -> tuple[HTTPStatus, str]:
        """Whether the database can be used."""
        problem = self.look()
        return (HTTPStatus.SERVICE_UNAVAILABLE, f"NOT_SERVING: {problem}") if problem else (HTTPStatus.OK, "SERVING")

    def ready(self) -> tuple[HTTPStatus, str]:
        """Whether clients can fetch and write."""
        status, text = self.live()
        if status is HTTPStatus.OK and (why := self._phase or self._hindrance() or self._no_writes()):
            return HTTPStatus.SERVICE_UNAVAILABLE, f"NOT_READY: {why}"
        return status, text

    def _no_writes(self) -> str:
        """Why writes fail or may soon; empty if they succeed."""
        free = shutil.disk_usage(self._directory).free >> 20
        if free < _MIN_FREE_MIB:
            return (
                f"the volume of {self._directory} is nearly full: {free} MiB are left, {_MIN_FREE_MIB} are required; "
                "free some space, or the shard will refuse writes that do not fit"
            )
        is_recent = time.monotonic() - self._refused_at < _REFUSED_SECONDS
        return f"the last write was refused: {self._refused}" if self._refused and is_recent else ""
