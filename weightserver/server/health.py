"""A shard's health, which follows its database: for grpc.health.v1, and for probes by HTTP that cost nothing.

The status is found when it is asked for, and when a call meets a damaged database. A shard that drains is not serving.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

_MIN_FREE_MIB = 256
"""A shard whose volume has less free space is not ready: writes may be refused."""

_log = logging.getLogger(__name__)


class ShardHealth(health.HealthServicer):  # type: ignore[misc]
    """Answers health checks of one shard.

    Args:
        problem: why the database cannot be used; empty if it can.
        directory: where the data are.
    """

    def __init__(self, problem: Callable[[], str], directory: Path) -> None:
        super().__init__()
        self._problem_of_database = problem
        self._directory = directory
        self._changing = threading.Lock()
        self._known: str | None = None
        self._drains = False

    def look(self) -> str:
        """Publishes the present status; returns why the shard does not serve, or nothing."""
        problem = "it is draining" if self._drains else self._problem_of_database()
        with self._changing:
            if problem != self._known and not self._drains:
                status = health_pb2.HealthCheckResponse
                self.set("", status.NOT_SERVING if problem else status.SERVING)
                if problem:
                    _log.error("not serving: %(reason)s", {"reason": problem})
                elif self._known:
                    _log.warning("serving again")
                self._known = problem
        return problem

    def drain(self) -> None:
        self._drains = True
        self.enter_graceful_shutdown()

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Any:
        self.look()
        return super().Check(request, context)

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
