"""Settings of one shard's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightserver.common.addresses import is_loopback
from weightserver.common.logs import LogFormat
from weightserver.common.options import option
from weightserver.common.security import TOKEN_VARIABLE, has_token
from weightserver.core.sharding import MAX_SHARDS


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one shard's process; each is an option of `weightserver serve`.

    Raises:
        ValueError: a setting is out of range, or TLS or a token is missing for an address beyond loopback.
    """

    data_dir: Path = option("the shard's own directory, on a local disk")
    init: bool = option(
        "create a new, empty shard if the directory is empty or missing (default: refuse to serve it)", False
    )
    shard: int = option("number of this shard, from 0", 0)
    num_shards: int = option("shards in the cluster", 1)
    listen: str = option("host:port; port 0 takes a free port", "127.0.0.1:50051")
    metrics_port: int | None = option("serve Prometheus metrics on this port; 0 takes a free one", None)
    metrics_host: str = option("address of the metrics, which need no token and show no rows", "127.0.0.1")
    grace_seconds: float = option("time for running calls to end after SIGTERM", 10.0)
    request_memory_mib: int = option(
        "memory for all requests in progress; must fit the largest write and the blocks that it changes", 4096
    )
    stall_seconds: float = option("time until the call of a silent caller is cancelled", 10.0)
    slow_request_seconds: float = option("log requests that take longer, with their stages", 1.0)
    tls_cert: Path | None = option("serve TLS with this certificate (PEM)", None)
    tls_key: Path | None = option("the key of --tls-cert (PEM)", None)
    tls_client_ca: Path | None = option("accept only clients with a certificate signed by this CA (PEM)", None)
    token_file: Path | None = option(f"file with the token that calls must carry (default ${TOKEN_VARIABLE})", None)
    insecure: bool = option("allow listening beyond loopback without TLS or a token", False)
    log_format: LogFormat = "text"
    """Format of the log, one line per event; an option of every command."""
    announce: bool = option("print the addresses as one JSON line on stdout once serving", False)
    stop_with_parent: bool = option("stop when stdin is closed, as when the parent process dies", False)
    ignore_sigterm: bool = option(
        "go on after SIGTERM while the parent lives, which may get it too and need the shard", False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards <= MAX_SHARDS:
            raise ValueError(
                f"--shard must lie in 0..num_shards-1, and --num-shards be at most {MAX_SHARDS}, got {self.shard} of "
                f"{self.num_shards}"
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must lie in 0..65535, got {self.metrics_port}")
        if self.request_memory_mib < 16:
            raise ValueError(f"--request-memory-mib must be at least 16, got {self.request_memory_mib}")
        if not 0 <= self.grace_seconds <= 3600:
            raise ValueError(f"--grace-seconds must lie in 0..3600, got {self.grace_seconds}")
        if not 0 < self.stall_seconds <= 3600:
            raise ValueError(f"--stall-seconds must be positive and at most 3600, got {self.stall_seconds}")
        if self.slow_request_seconds <= 0:
            raise ValueError(f"--slow-request-seconds must be positive, got {self.slow_request_seconds}")
        self._check_security()

    def _check_security(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca is for TLS: give --tls-cert and --tls-key too")
        if is_loopback(self.listen) or self.insecure:
            return
        missing = ["--tls-cert and --tls-key"] if self.tls_cert is None else []
        if not has_token(self.token_file):
            missing.append("--token-file")
        if missing:
            raise ValueError(
                f"--listen {self.listen} can be reached from other machines: give {' and '.join(missing)} "
                "('weightserver certs' creates them), or --insecure on a network you trust"
            )
