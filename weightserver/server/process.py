"""One shard's process: wiring, health, drain."""

from __future__ import annotations

import contextlib
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
from datetime import UTC, datetime
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from weightserver.common.addresses import is_loopback, split_address
from weightserver.common.logs import LogFormat, log_events
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.metrics_http import serve_metrics
from weightserver.common.security import ServerTls, TokenInterceptor, has_token, read_token, server_tls
from weightserver.common.version import __version__
from weightserver.core.errors import StorageError
from weightserver.protocol.codec import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from weightserver.server import service
from weightserver.server.admission import MAX_THREADS, MAX_UNSORTED_CALLS, CallLimiter, RequestMemory
from weightserver.server.metrics import ShardMetrics
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.shard.sweeper import Sweeper
from weightserver.storage.directory import holds_data
from weightserver.storage.lmdb_storage import LmdbStorage

_MAX_STREAMS = 128
"""Calls at a time on one connection; its client keeps further ones back."""
_HANDSHAKE_SECONDS = 10
_KEEPALIVE_SECONDS = 60
"""How long a connection is silent before its peer is asked whether it is still there."""
_IDLE_SECONDS = 60
"""How long a connection may be without a call; its client makes a new one when it calls again."""
_LAST_COMMIT_SECONDS = 1.0
"""How long a commit whose calls have been ended may take, where the grace period is over."""

_LAST_ANSWERS_SECONDS = 1.0
"""How long calls may take to hear that the shard can serve no more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `weightserver serve` is told."""

    data_dir: Path
    """The shard's own directory on a local disk."""
    init: bool = False
    """Whether to begin a new, empty shard where the directory is empty or missing."""
    shard: int
    """Number of this shard, 0-based."""
    num_shards: int
    """How many shards the cluster has."""
    listen: str = "127.0.0.1:50051"
    """host:port; port 0 takes a free one."""
    metrics_port: int | None = None
    """Port of /metrics; 0 takes a free one, None serves none."""
    metrics_host: str = "127.0.0.1"
    """Address on which /metrics is served. It tells no rows, asks for no token and is read-only."""
    grace_seconds: float = 10.0
    """How long running calls may go on after SIGTERM."""
    request_memory_mib: int = 4096
    """What the requests in progress may hold together: enough for the largest write and the blocks that it changes."""
    stall_seconds: float = 10.0
    """How long a caller may neither send nor take a message before its call is cut off."""
    verify_reads: bool = True
    """Whether the checksums of rows that are fetched are looked at."""
    tls_cert: Path | None = None
    """The shard's certificate, PEM; without one there is no TLS."""
    tls_key: Path | None = None
    """The key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """CA that must have signed every client's certificate; without one clients need none."""
    token_file: Path | None = None
    """Where the bearer token is that every call but health must bring; without a file it is WEIGHTSERVER_TOKEN, if that
    is set."""
    insecure: bool = False
    """Whether an address other than loopback may be served without TLS or a token."""
    log_format: LogFormat = "text"
    """How events are logged, one line each."""
    reflection: bool = False
    """Whether to tell the contract over gRPC's reflection."""
    announce: bool = False
    """Whether to print one JSON line with the addresses on stdout once the shard serves."""
    stop_with_parent: bool = False
    """Whether to stop when stdin closes, as it does when the process that started this one dies."""

    def __post_init__(self) -> None:
        if self.num_shards < 1 or not 0 <= self.shard < self.num_shards:
            raise ValueError(f"--shard must lie in 0..num_shards-1, got {self.shard} of {self.num_shards}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must lie in 0..65535, got {self.metrics_port}")
        if self.request_memory_mib < 16:
            raise ValueError(f"--request-memory-mib must be at least 16, got {self.request_memory_mib}")
        if not 0 <= self.grace_seconds <= 3600:
            raise ValueError(f"--grace-seconds must lie in 0..3600, got {self.grace_seconds}")
        if not 0 < self.stall_seconds <= 3600:
            raise ValueError(f"--stall-seconds must be positive and at most 3600, got {self.stall_seconds}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca is for TLS: give --tls-cert and --tls-key too")
        if not is_loopback(self.listen) and not self.insecure:
            missing = [
                *(["--tls-cert and --tls-key"] if self.tls_cert is None else []),
                *([] if has_token(self.token_file) else ["--token-file"]),
            ]
            if missing:
                raise ValueError(
                    f"--listen {self.listen} can be reached from other machines: give {' and '.join(missing)} "
                    "('weightserver certs' makes them), or --insecure on a network you trust"
                )


class _Stop:
    """What asks the process to end: SIGTERM, SIGINT, the end of the process that started it, or a disk that failed.

    A start is cut short as by a kill, which leaves nothing half done; a shard that serves drains first.
    """

    def __init__(self) -> None:
        # Not an Event: setting one in a handler deadlocks with a wait for it in the thread that the handler interrupts.
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._serving = False

    def follow(self, *, parent: bool) -> None:
        """From now on. Of a parent, whose end closes stdin, where it has one to follow."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._ask(128 + number))
        if parent:
            threading.Thread(target=self._follow_parent, name="parent", daemon=True).start()

    def serving(self) -> None:
        self._serving = True

    def fail(self, reason: str) -> None:
        self._asked.put(reason)

    def wait(self) -> None:
        """Until it is to drain.

        Raises:
            StorageError: it is to end because it can serve no more.
        """
        reason = self._next()
        if reason:
            raise StorageError(reason)

    def _next(self) -> str:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._asked.get(timeout=0.5)  # a signal that another thread was given wakes no wait without one

    def _ask(self, status: int) -> None:
        if not self._serving:
            os._exit(status)
        self._asked.put("")

    def _follow_parent(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        self._ask(1)


def serve(config: ServerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains and closes.

    Raises:
        StorageError: the data directory cannot be used, or no longer.
        OSError: a port cannot be bound, or nobody reads what is announced.
        ValueError: a certificate, key or token cannot be used.
    """
    for option, wanted, stream in (
        ("--announce", config.announce, sys.stdout),
        ("--stop-with-parent", config.stop_with_parent, sys.stdin),
    ):
        if wanted and stream is None:
            raise ValueError(f"{option} needs {'stdout' if option == '--announce' else 'stdin'}, which is closed")
    stop = _Stop()
    stop.follow(parent=config.stop_with_parent)
    keep_large_buffers()
    _allow_many_connections()

    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    token = read_token(config.token_file)
    metrics = ShardMetrics(shard=config.shard, num_shards=config.num_shards, version=__version__)
    memory = RequestMemory(config.request_memory_mib << 20)
    limiter = CallLimiter(
        memory, stall_seconds=config.stall_seconds, on_refused=metrics.refused, on_cut_off=metrics.cut_off
    )
    server = grpc.server(
        ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grpc"),
        interceptors=[*([] if token is None else [TokenInterceptor(token, metrics.unauthenticated)]), limiter],
        maximum_concurrent_rpcs=MAX_UNSORTED_CALLS,
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
            ("grpc.keepalive_time_ms", 1000 * _KEEPALIVE_SECONDS),
            ("grpc.max_connection_idle_ms", 1000 * _IDLE_SECONDS),
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ],
    )
    bound = _listen(server, config.listen, tls)

    if config.init and holds_data(config.data_dir):
        _log.warning("--init does nothing, %s holds a shard: omit it, or a lost disk begins empty", config.data_dir)
    with contextlib.closing(
        LmdbStorage(config.data_dir, must_exist=not config.init, on_failure=stop.fail, scattered=True)
    ) as storage:
        shard = Shard(
            storage,
            shard=config.shard,
            num_shards=config.num_shards,
            verify_reads=config.verify_reads,
            on_gaps=metrics.correction_gaps,
        )
        log_events(
            config.log_format, lambda: {"shard": shard.shard, "epoch": shard.state.epoch, "step": shard.state.clock}
        )
        metrics.follow(shard)
        metrics.request_memory(lambda: memory.used_bytes)
        metrics.waiting_calls(limiter.num_waiting)
        if tls is not None:
            metrics.certificate_holds_until(tls.holds_until)
        metrics_address = _serve_metrics(config, metrics)
        healthy = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        if config.reflection:
            reflection.enable_server_reflection((service.NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        committer = Committer(shard.batch, metrics.committed)
        grace_seconds = 0.0  # whatever fails ends the process at once
        try:
            metrics.follow_committer(committer)
            service.add_to_server(service.WeightServerService(shard, committer, metrics, memory), server)
            stop.serving()
            server.start()
            _log.info(
                "serving",
                extra={
                    "num_shards": config.num_shards,
                    "data_dir": str(config.data_dir),
                    "address": bound,
                    "metrics_address": metrics_address,
                    "version": __version__,
                    "stored_rows": shard.state.rows_stored,
                },
            )
            _log_security(config, tls, token is not None)
            if config.announce:
                _announce(address=bound, metrics_address=metrics_address)
            grace_seconds = _LAST_ANSWERS_SECONDS
            with contextlib.closing(Sweeper(shard, committer)):
                stop.wait()
            _log.info("draining")
            grace_seconds = config.grace_seconds
        finally:
            healthy.enter_graceful_shutdown()
            _drain(server, committer, grace_seconds)
    _log.info("closed")


def _listen(server: grpc.Server, address: str, tls: ServerTls | None) -> str:
    """Binds the server to it; returns host:port.

    Raises:
        OSError: that cannot be.
    """
    host, wanted_port = split_address(address)
    try:  # gRPC's own complaint would be no line of ours
        socket.create_server((host, wanted_port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except socket.gaierror as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from error
    except OSError as error:
        raise OSError(
            f"cannot listen on {address}: {os.strerror(error.errno or 0)}; is another server using it?"
        ) from error
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials)
    return f"{_in_address(host)}:{port}"


def _announce(**addresses: str | None) -> None:
    """Prints them as a line of JSON, for the process that started this one."""
    try:
        os.write(sys.stdout.fileno(), json.dumps(addresses).encode() + b"\n")  # leaves nothing to be flushed at the end
    except OSError as error:
        raise OSError(
            f"nobody reads the addresses on stdout ({error.strerror}): the process that started this shard is gone"
        ) from error


def _drain(server: grpc.Server, committer: Committer, grace_seconds: float) -> None:
    """Lets running calls end within the grace period, and commits what they wrote."""
    end = time.monotonic() + grace_seconds
    server.stop(grace_seconds).wait()
    if not committer.close(max(_LAST_COMMIT_SECONDS, end - time.monotonic())):
        _log.warning("closed before the disk took the last commit, of which nobody was told that it is there")
        logging.shutdown()
        os._exit(0 if sys.exception() is None else 1)  # as good as a kill, which undoes a commit or leaves it whole


def _allow_many_connections() -> None:
    """As many as the system lets the process have; each takes a file descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS promises more than it gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _serve_metrics(config: ServerConfig, metrics: ShardMetrics) -> str | None:
    if config.metrics_port is None:
        return None
    try:
        port, _ = serve_metrics(metrics.registry, config.metrics_host, config.metrics_port)
    except OSError as error:
        where = f"port {config.metrics_port} of {config.metrics_host}"
        raise OSError(f"cannot serve metrics on {where}: {error.strerror}") from error
    return f"{_in_address(config.metrics_host)}:{port}"


def _log_security(config: ServerConfig, tls: ServerTls | None, token: bool) -> None:
    """Tells who can call, and warns of what cannot be meant to stay so."""
    if tls is not None:
        clients = "only to clients with a certificate" if config.tls_client_ca else "to any client"
        _log.info("TLS %s", clients, extra={"certificate_holds_until": f"{tls.holds_until:%Y-%m-%d %H:%M} UTC"})
        if tls.holds_until <= datetime.now(UTC):
            _log.warning("the shard's certificate has expired: clients refuse it, renew it and restart")
    if not is_loopback(config.listen) and (tls is None or not token):
        lacking = " or ".join([*(["TLS"] if tls is None else []), *([] if token else ["a token"])])
        _log.warning(
            "%s can be reached without %s: whoever reaches it can read and change rows", config.listen, lacking
        )


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
