"""The client's TLS credentials and bearer token."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from weightserver.common.security import expiry, read_ca, read_pair, read_token


@dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """How a client authenticates itself, and which shards it trusts.

    Raises:
        ValueError: the options contradict each other.
    """

    tls_ca: Path | None = None
    """The CA that signed the shards' certificates; None disables TLS."""
    tls_cert: Path | None = None
    """This client's own certificate, for shards that require one."""
    tls_key: Path | None = None
    """The key of `tls_cert`."""
    token_file: Path | None = None
    """The file with the token; None takes $WEIGHTSERVER_TOKEN if that is set."""
    insecure: bool = False
    """Whether shards beyond loopback may be called without TLS."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-cert is for TLS: give --tls-ca too, the CA that signed the shards' certificates")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a gRPC channel; None without TLS.

        Raises:
            ValueError: a file cannot be read, is damaged or does not match the others.
        """
        if self.tls_ca is None:
            return None
        authority = read_ca(self.tls_ca, "--tls-ca")
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authority)
        key, certificate = read_pair(self.tls_cert, self.tls_key, "--tls-cert", "--tls-key")
        if (end := expiry(certificate)) <= datetime.now(UTC):
            raise ValueError(f"--tls-cert {self.tls_cert} expired on {end:%Y-%m-%d}: give a valid one")
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def client_arguments(self) -> dict[str, Any]:
        """The `credentials`, `token` and `insecure` arguments of `WeightClient`.

        Raises:
            ValueError: a file cannot be read, is damaged or does not match the others.
        """
        return {"credentials": self.credentials(), "token": read_token(self.token_file), "insecure": self.insecure}
