"""Settings of one shard's process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightserver.common.addresses import is_loopback
from weightserver.common.logs import LogFormat
from weightserver.common.security import has_token


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of one shard's process; each is an option of `weightserver serve`.

    Raises:
        ValueError: a setting is out of range, or TLS or a token is missing for an address beyond loopback.
    """

    data_dir: Path
    """The shard's own directory on a local disk."""
    init: bool = False
    """Whether to begin a new, empty shard where the directory is empty or missing."""
    shard: int
    """Number of this shard, 0-based."""
    num_shards: int
    """Number of shards in the cluster."""
    listen: str = "127.0.0.1:50051"
    """host:port; port 0 takes a free port."""
    metrics_port: int | None = None
    """Port of /metrics; 0 takes a free port, None serves no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics, which is read-only, requires no token and shows no rows."""
    grace_seconds: float = 10.0
    """How long running calls may continue after SIGTERM."""
    request_memory_mib: int = 4096
    """Memory for all requests in progress; must fit the largest write and the blocks that it changes."""
    stall_seconds: float = 10.0
    """How long a caller may neither send nor receive a message before its call is cancelled."""
    slow_request_seconds: float = 1.0
    """A request that takes longer is logged, with its stages and its id."""
    verify_reads: bool = True
    """Whether fetches verify the checksums of rows."""
    tls_cert: Path | None = None
    """The shard's certificate, PEM; None disables TLS."""
    tls_key: Path | None = None
    """The key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """CA that must have signed every client's certificate; None requires no client certificates."""
    token_file: Path | None = None
    """File with the bearer token that calls must carry, except health checks; None takes $WEIGHTSERVER_TOKEN if set."""
    insecure: bool = False
    """Whether an address other than loopback may be served without TLS or a token."""
    log_format: LogFormat = "text"
    """Format of the log, one line per event."""
    reflection: bool = False
    """Whether to serve the contract by gRPC reflection."""
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
