"""Serves /metrics for Prometheus, and pages of the caller's; slow or many callers occupy at most a few threads."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from weightserver.common.metrics import page

MAX_CONNECTIONS = 16
_SECONDS = 5.0
"""How long a caller may be silent."""
_TEXT = "text/plain; charset=utf-8"
_log = logging.getLogger(__name__)


Page = Callable[[], tuple[HTTPStatus, str]]
"""Makes the status and the text of an answer."""


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, pages: Mapping[str, Page] | None = None
) -> tuple[int, Callable[[], None]]:
    """Serves /metrics in threads; port 0 takes a free port. Returns the port and a function that stops serving.

    A query or a slash after a path changes nothing; other paths are not found, so that a mistyped probe fails.

    Args:
        pages: other paths, and what makes their answers.

    Raises:
        OSError: the port cannot be bound.
    """
    handler = type("_Page", (_Handler,), {"registry": registry, "timeout": _SECONDS, "pages": pages or {}})
    kind = type("_Server", (_Server,), {"address_family": socket.AF_INET6}) if ":" in host else _Server
    server = kind((host, port), handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    pages: Mapping[str, Page]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        try:
            status, kind, body = self._answer(path)
        except Exception:  # noqa: BLE001 - whatever a page is made of; the next one may succeed
            _log.exception("%(path)s failed", {"path": path})
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"the page failed: see the log\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, page(self.registry)
        if other := self.pages.get(path):
            status, text = other()
            return status, _TEXT, f"{text}\n".encode()
        known = ", ".join(["/metrics", *self.pages])
        return HTTPStatus.NOT_FOUND, _TEXT, f"there is no such page: ask for {known}\n".encode()

    def log_message(self, *arguments: Any) -> None:
        """Logs no requests."""


class _Server(ThreadingHTTPServer):
    """Closes the oldest connection when there are too many: a scrape takes milliseconds."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Asks no name server for this machine's name, as HTTPServer does: one that is silent would be waited for."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) == MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _hang_up(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores callers that were disconnected or are gone."""


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the caller already has
        connection.shutdown(socket.SHUT_RDWR)
