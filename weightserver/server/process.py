"""Runs one shard as a process: start, serve, drain."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

import grpc

from weightserver.common.addresses import is_loopback, split_address
from weightserver.common.logs import log_events
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.metrics_http import serve_metrics
from weightserver.common.security import Followed, has_token, read_tokens
from weightserver.common.version import __version__
from weightserver.core import kernel
from weightserver.core.errors import StorageError
from weightserver.protocol.codec import (
    KEEPALIVE_SECONDS,
    KEEPALIVE_TIMEOUT_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
)
from weightserver.server import service
from weightserver.server.admission import MAX_CALLS, MAX_THREADS, StallWatch
from weightserver.server.config import ServerConfig
from weightserver.server.gauges import publish_certificate, publish_health, publish_load, publish_shard
from weightserver.server.health import ShardHealth
from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory
from weightserver.server.security import ServerTls, TokenInterceptor
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.sweeper import Sweeper
from weightserver.storage.directory import holds_data, remove_access
from weightserver.storage.lmdb_storage import LmdbStorage

_MAX_STREAMS = 128
"""Concurrent calls on one connection; the client queues further ones."""
_HANDSHAKE_SECONDS = 10
_IDLE_SECONDS = 60
"""How long a connection may have no call; the client reconnects for its next one."""
_FEW_DESCRIPTORS = 256
_LAST_COMMIT_SECONDS = 1.0
"""How long a commit may take after the grace period, whose calls have already ended."""
_LAST_ANSWERS_SECONDS = 1.0
"""How long calls may take to receive the error that the shard can no longer serve."""

_log = logging.getLogger(__name__)


class _Stop:
    """Requests to end the process: SIGTERM, SIGINT, the end of the parent process, or a failed disk.

    During the start a request ends the process at once, as a kill would, which leaves nothing half done; later the
    shard drains first.
    """

    def __init__(self) -> None:
        # Not an Event: setting it in a signal handler deadlocks if the handler interrupts a wait for it.
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.is_serving = False
        """Whether a request lets the shard drain first."""

    def follow(self, *, parent: bool, sigterm: bool) -> None:
        """Listens from now on for SIGINT, for SIGTERM, without `sigterm` only once the parent process is gone, and with
        `parent` for its end, which closes stdin."""
        parent_id = os.getppid()

        def handle(number: int, _: object) -> None:
            if sigterm or number != signal.SIGTERM or os.getppid() != parent_id:
                self._request(128 + number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
        if parent:
            threading.Thread(target=self._follow_parent, name="parent", daemon=True).start()

    def fail(self, reason: str) -> None:
        self._requests.put(reason)

    def wait(self) -> None:
        """Returns when the shard should drain.

        Raises:
            StorageError: the shard can no longer serve.
        """
        while True:
            with contextlib.suppress(queue.Empty):  # a signal that another thread receives does not end the wait
                if reason := self._requests.get(timeout=0.5):
                    raise StorageError(reason)
                return

    def _request(self, status: int) -> None:
        if not self.is_serving:
            os._exit(status)
        self._requests.put("")

    def _follow_parent(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        self._request(1)


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains and closes.

    Raises:
        StorageError: the data directory is unusable, or becomes so.
        OSError: a port cannot be bound, or the reader of the announced addresses is gone.
        ValueError: a certificate, key or token is invalid.
    """
    _check_streams(config)
    stop = _Stop()
    stop.follow(parent=config.stop_with_parent, sigterm=not config.ignore_sigterm)
    faulthandler.enable(file=2, all_threads=False)  # a data file that is cut short ends the process by SIGBUS
    keep_large_buffers()
    _allow_many_connections()
    front = _listening_server(config)
    if config.init and holds_data(config.data_dir):
        _log.warning(
            "--init has no effect, %(directory)s holds a shard: omit it, or a lost disk would be replaced by an empty "
            "shard",
            {"directory": str(config.data_dir)},
        )
    with contextlib.closing(
        LmdbStorage(config.data_dir, must_exist=not config.init, on_failure=stop.fail, scattered=True)
    ) as storage:
        shard = Shard(storage, shard=config.shard, num_shards=config.num_shards)
        remove_access(config.data_dir)  # only now: a directory that is refused stays as it is
        log_events(
            config.log_format, lambda: {"shard": shard.shard, "epoch": shard.state.epoch, "step": shard.state.clock}
        )
        hindrance = front.tls.problem if front.tls else str
        healthy = ShardHealth(storage.problem, config.data_dir, hindrance=hindrance, on_lasting=stop.fail)
        _serve_shard(config, front, shard, healthy, stop)
    _log.info("closed")


def _serve_shard(config: ServerConfig, front: _Front, shard: Shard, healthy: ShardHealth, stop: _Stop) -> None:
    """Serves a shard until `stop`, and drains. Raises as `serve` does."""
    publish_shard(front.metrics.registry, shard)
    publish_health(front.metrics.registry, healthy)
    metrics_address = _serve_metrics(config, front.metrics, healthy)
    healthy.add_to_server(front.server)
    committer = Committer(shard.batch, front.metrics.committed)
    grace_seconds = 0.0  # an error before serving ends the process at once
    try:
        publish_load(front.metrics.registry, front.memory, front.stalls, committer)
        handlers = service.WeightServerService(
            shard,
            committer,
            front.metrics,
            front.memory,
            stalls=front.stalls,
            slow_seconds=config.slow_request_seconds,
            on_write=healthy.wrote,
        )
        service.add_to_server(handlers, front.server)
        stop.is_serving = True
        healthy.serve()
        status, text = healthy.ready()
        if status is not HTTPStatus.OK:
            _log.warning("%(reason)s", {"reason": text})
        gc.freeze()  # what exists now stays: a full collection would walk it in the middle of a fetch, for 15 ms
        front.server.start()
        _log_start(config, front, shard, metrics_address)
        if config.announce:
            _announce(address=front.address, metrics_address=metrics_address)
        grace_seconds = _LAST_ANSWERS_SECONDS
        with contextlib.closing(Sweeper(shard, committer)) as sweeper:
            sweeper.start()
            stop.wait()
        _log.info("draining")
        grace_seconds = config.grace_seconds
    finally:
        healthy.drain()
        _drain(front.server, committer, grace_seconds)


@dataclass(frozen=True)
class _Front:
    """The gRPC server of a process, and what authenticates, limits and measures its calls."""

    server: grpc.Server
    address: str
    """host:port that it listens on."""
    tls: ServerTls | None
    metrics: ShardMetrics
    memory: RequestMemory
    stalls: StallWatch


def _listening_server(config: ServerConfig) -> _Front:
    """A server that listens but serves nothing yet. Raises as `serve` does."""
    metrics = ShardMetrics(shard=config.shard, num_shards=config.num_shards, version=__version__)
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
        publish_certificate(metrics.registry, tls)
    interceptors: list[grpc.ServerInterceptor] = []
    if has_token(config.token_file):
        tokens = Followed(lambda: read_tokens(config.token_file), config.token_file)
        interceptors.append(TokenInterceptor(tokens, metrics))
    memory = RequestMemory(config.request_memory_mib << 20)
    stalls = StallWatch(memory, stall_seconds=config.stall_seconds, on_cut_off=metrics.cut_off.inc)
    stalls.start()
    server = grpc.server(
        ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grpc"),
        interceptors=interceptors,
        maximum_concurrent_rpcs=MAX_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
            ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_SECONDS),
            ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_TIMEOUT_SECONDS),
            ("grpc.keepalive_permit_without_calls", 1),  # a client's ping may come when its call has just ended
            ("grpc.http2.min_ping_interval_without_data_ms", 1000 * KEEPALIVE_SECONDS // 2),
            ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )
    address = _listen(server, config.listen, tls)
    return _Front(server, address, tls, metrics, memory, stalls)


def _check_streams(config: ServerConfig) -> None:
    """Raises ValueError if a standard stream that an option needs is closed."""
    if config.announce and sys.stdout is None:
        raise ValueError("--announce needs stdout, which is closed")
    if config.stop_with_parent and sys.stdin is None:
        raise ValueError("--stop-with-parent needs stdin, which is closed")


def _log_start(config: ServerConfig, front: _Front, shard: Shard, metrics_address: str | None) -> None:
    _log.info(
        "serving",
        extra={
            "num_shards": config.num_shards,
            "data_dir": str(config.data_dir),
            "address": front.address,
            "metrics_address": metrics_address,
            "version": __version__,
            "kernel": kernel.name(),
            "stored_rows": shard.state.rows_stored,
        },
    )
    _log_security(config, front.tls)


def _listen(server: grpc.Server, address: str, tls: ServerTls | None) -> str:
    """Binds the server to an address; returns host:port.

    Raises:
        OSError: the address is in use or not available.
    """
    host, wanted_port = split_address(address)
    is_v6 = ":" in host
    both = is_v6 and socket.has_dualstack_ipv6()  # as gRPC binds [::], which a server of IPv4 alone may have taken
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    try:  # gRPC would log its own error
        socket.create_server((host, wanted_port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while ")[0]  # to which Python adds the address, also for a name
        hints = {
            errno.EADDRINUSE: "; is another server using it?",
            errno.EADDRNOTAVAIL: ": give an address of this machine's own, or 0.0.0.0 for all of them",
        }
        raise OSError(f"cannot listen on {address}: {reason}{hints.get(error.errno or 0, '')}") from error
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials)
    return f"{_in_address(host)}:{port}"


def _announce(**addresses: str | None) -> None:
    """Prints the addresses as a line of JSON for the process that started this one."""
    try:
        os.write(
            sys.stdout.fileno(), json.dumps(addresses).encode() + b"\n"
        )  # unbuffered: nothing is left to flush at the end
    except OSError as error:
        raise OSError(
            f"cannot announce the addresses on stdout ({error.strerror}): the process that started this shard is gone"
        ) from error


def _drain(server: grpc.Server, committer: Committer, grace_seconds: float) -> None:
    """Lets running calls end within the grace period, and commits their writes."""
    end = time.monotonic() + grace_seconds
    server.stop(grace_seconds).wait()
    if not committer.close(max(_LAST_COMMIT_SECONDS, end - time.monotonic())):
        _log.warning("closed before the last commit reached the disk; none of its writes was acknowledged")
        logging.shutdown()
        os._exit(0 if sys.exception() is None else 1)  # like a kill, which leaves a commit whole or undone


def _allow_many_connections() -> None:
    """Raises the limit of file descriptors, of which each connection takes one, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS reports a higher limit than it grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < _FEW_DESCRIPTORS:
        _log.warning("only %(files)d files may be open, and each connection is one: raise ulimit -n", {"files": most})


def _serve_metrics(config: ServerConfig, metrics: ShardMetrics, healthy: ShardHealth) -> str | None:
    if config.metrics_port is None:
        return None
    try:
        pages = {"/healthz": healthy.live, "/readyz": healthy.ready}
        port, _ = serve_metrics(metrics.registry, config.metrics_host, config.metrics_port, pages)
    except OSError as error:
        where = f"port {config.metrics_port} of {config.metrics_host}"
        raise OSError(f"cannot serve metrics on {where}: {error.strerror}") from error
    return f"{_in_address(config.metrics_host)}:{port}"


def _log_security(config: ServerConfig, tls: ServerTls | None) -> None:
    """Logs who can call the shard, and warns of missing TLS or token."""
    if tls is not None:
        clients = "only to clients with a certificate" if config.tls_client_ca else "to any client"
        until = {"certificate_holds_until": f"{tls.expires:%Y-%m-%d %H:%M} UTC"}
        _log.info("TLS %(clients)s", {"clients": clients}, extra=until)
    token = has_token(config.token_file)
    if not is_loopback(config.listen) and (tls is None or not token):
        missing = " or ".join([*(["TLS"] if tls is None else []), *([] if token else ["a token"])])
        _log.warning(
            "%(address)s can be reached without %(missing)s: anyone who reaches it can read and change rows",
            {"address": config.listen, "missing": missing},
        )


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
