"""The client's TLS credentials and bearer token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightserver.common.options import option
from weightserver.common.security import (
    TOKEN_VARIABLE,
    Followed,
    has_token,
    out_of_date,
    read_ca,
    read_pair,
    read_token,
    validity,
)

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """How a client authenticates itself, and which shards it trusts; its fields are options of commands.

    Raises:
        ValueError: the options contradict each other.
    """

    tls_ca: Path | None = option("use TLS; the CA that signed the shards' certificates (PEM)", None)
    tls_cert: Path | None = option("own certificate, for shards that require one (PEM)", None)
    tls_key: Path | None = option("the key of --tls-cert (PEM)", None)
    token_file: Path | None = option(f"token of the shards (default ${TOKEN_VARIABLE})", None)
    insecure: bool = option("allow addresses beyond loopback without TLS", False)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-cert is for TLS: give --tls-ca too, the CA that signed the shards' certificates")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a gRPC channel; None without TLS.

        Raises:
            ValueError: a file cannot be read, is damaged, does not match the others or is of a kind that shards refuse.
        """
        if self.tls_ca is None:
            return None
        import grpc

        authority = read_ca(self.tls_ca, "--tls-ca")
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authority)
        key, certificate = read_pair(self.tls_cert, self.tls_key, "--tls-cert", "--tls-key")
        if why := out_of_date(f"--tls-cert {self.tls_cert}", validity(certificate)):
            raise ValueError(why)
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def client_arguments(self) -> dict[str, Any]:
        """The `credentials`, `token` and `insecure` arguments of `WeightClient`, which follow the files.

        Raises:
            ValueError: a file cannot be read, is damaged or does not match the others.
        """
        credentials = token = None
        if self.tls_ca is not None:
            credentials = Followed(self.credentials, self.tls_ca, self.tls_cert, self.tls_key)
        if has_token(self.token_file):
            token = Followed(partial(read_token, self.token_file), self.token_file)
        return {"credentials": credentials, "token": token, "insecure": self.insecure}
