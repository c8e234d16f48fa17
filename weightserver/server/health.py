"""A shard's health, which follows its database: for grpc.health.v1, and for probes by HTTP that cost nothing.

The status is found when it is asked for, and when a call meets a damaged database. A shard that drains is not serving.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2

_MIN_FREE_MIB = 256
"""A shard whose volume has less free space is not ready: writes may be refused."""

_log = logging.getLogger(__name__)


class ShardHealth:
    """Answers health checks of one shard.

    Args:
        problem: why the database cannot be used; empty if it can.
        directory: where the data are.
    """

    def __init__(self, problem: Callable[[], str], directory: Path) -> None:
        self._problem_of_database = problem
        self._directory = directory
        self._changing = threading.Lock()
        self._known: str | None = None
        self._drains = False

    def look(self) -> str:
        """Returns why the shard does not serve, or nothing."""
        if self._drains:
            return "it is draining"
        problem = self._problem_of_database()
        with self._changing:
            if problem != self._known:
                if problem:
                    _log.error("not serving: %(reason)s", {"reason": problem})
                elif self._known:
                    _log.warning("serving again")
                self._known = problem
        return problem

    def drain(self) -> None:
        self._drains = True

    # ---- gRPC

    def add_to_server(self, server: grpc.Server) -> None:
        """Adds grpc.health.v1's Check, in threads of its own: it is answered however many other calls wait."""

        def check(_: Iterator[bytes], context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
            """Speaks for the whole shard, so it does not wait for the message that names a service."""
            status = health_pb2.HealthCheckResponse
            return status(status=status.NOT_SERVING if self.look() else status.SERVING)

        check.experimental_thread_pool = ThreadPoolExecutor(2, "health")  # type: ignore[attr-defined]
        response = health_pb2.HealthCheckResponse.SerializeToString
        handlers = {"Check": grpc.stream_unary_rpc_method_handler(check, None, response)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers)])

    # ---- HTTP

    def live(self) -> tuple[HTTPStatus, str]:
        """Whether the shard serves."""
        problem = self.look()
        return (HTTPStatus.SERVICE_UNAVAILABLE, f"NOT_SERVING: {problem}") if problem else (HTTPStatus.OK, "SERVING")

    def ready(self) -> tuple[HTTPStatus, str]:
        """Whether the shard serves, and its volume has room for writes."""
        status, text = self.live()
        free = shutil.disk_usage(self._directory).free >> 20 if status is HTTPStatus.OK else _MIN_FREE_MIB
        if free < _MIN_FREE_MIB:
            return HTTPStatus.SERVICE_UNAVAILABLE, (
                f"NOT_READY: the volume of {self._directory} is nearly full: {free} MiB are left, {_MIN_FREE_MIB} are "
                "required; free some space, or the shard will refuse writes that do not fit"
            )
        return status, text
