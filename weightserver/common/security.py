"""Who may call a shard, and which shard a client believes: TLS from PEM files, and the bearer token.

The token is read from a file or from the environment, never from an argument, which the list of processes would show;
no message and no log holds it.
"""

from __future__ import annotations

import argparse
import hmac
import logging
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from weightserver.common.atomic_files import to_path

TOKEN_VARIABLE = "WEIGHTSERVER_TOKEN"
MIN_TOKEN_CHARACTERS = 16
"""Nobody counts the guesses, so they must be hopeless."""
MAX_TOKEN_CHARACTERS = 1024
"""gRPC takes 8 KiB of a call's metadata in all, and says of more what it says of overload."""
_HEALTH = "/grpc.health.v1.Health/"

_log = logging.getLogger(__name__)


# ---- what both sides read


def has_token(file: Path | None) -> bool:
    """Whether `read_token` would find one, or fail."""
    return file is not None or TOKEN_VARIABLE in os.environ


def read_token(file: Path | None) -> str | None:
    """The bearer token in `file`, else in the environment's WEIGHTSERVER_TOKEN, else None.

    Raises:
        ValueError: what is there is no token.
    """
    if not has_token(file):
        return None
    if file is None:
        where, token = TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE].strip()
    else:
        where, token = f"--token-file {file}", _read(file, "--token-file", secret=True).decode(errors="replace").strip()
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"{where} holds {len(token)} characters: give a token of at most {MAX_TOKEN_CHARACTERS}")
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"{where} holds no token: give at least {MIN_TOKEN_CHARACTERS} printable ASCII characters without spaces, "
            "such as 'weightserver certs' makes"
        )
    return token


def _read(file: Path, option: str, *, secret: bool = False) -> bytes:
    try:
        content = file.read_bytes()
        mode = file.stat().st_mode
    except OSError as error:
        raise ValueError(f"{option} {file} cannot be read: {error.strerror}") from error
    if secret and stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IRWXO):  # a group of its own may read it
        _log.warning("%s %s can be read or changed by others: chmod 600 it", option, file)
    return content


def _read_pair(cert: Path, key: Path, cert_option: str, key_option: str) -> tuple[bytes, bytes]:
    """(key, certificates) as gRPC wants them, of files that fit together. Raises ValueError."""
    pair = _read(key, key_option, secret=True), _read(cert, cert_option)

    def refuse_password() -> str:
        raise ValueError(f"{key_option} {key} is encrypted: give one without a password, that only its owner can read")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=refuse_password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{cert_option} {cert} and {key_option} {key} are no certificate and its key, in PEM: "
            f"{error.reason or 'unreadable'}"
        ) from error
    return pair


def _read_ca(file: Path, option: str) -> bytes:
    """Certificates of one or more CAs. Raises ValueError."""
    pem = _read(file, option)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{option} {file} holds no certificate of a CA, in PEM") from error
    return pem


def holds_until(pem: bytes) -> datetime:
    """When the first certificate in `pem` expires."""
    from cryptography import x509  # slow to import; calls without certificates do not need it

    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


# ---- the server's side


@dataclass(frozen=True)
class ServerTls:
    """What a shard shows to its clients, and asks of them."""

    credentials: grpc.ServerCredentials
    holds_until: datetime
    """When its certificate expires."""


def server_tls(cert: Path, key: Path, client_ca: Path | None) -> ServerTls:
    """TLS with the certificate in `cert`; with `client_ca` only for clients whose certificate that CA signed.

    Raises:
        ValueError: files that are none of this.
    """
    pair = _read_pair(cert, key, "--tls-cert", "--tls-key")
    authority = None if client_ca is None else _read_ca(client_ca, "--tls-client-ca")
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
    return ServerTls(credentials, holds_until(pair[1]))


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, before anything of them is read; all but those for the server's health."""

    def __init__(self, token: str, on_refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._on_refused = on_refused
        self._without = _refusal(
            f"the call brought no token, and this shard asks for one: give --token-file or set {TOKEN_VARIABLE}"
        )
        self._wrong = _refusal("the call's token is not this shard's: give the one that its own --token-file holds")

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if handler_call_details.method.startswith(_HEALTH):
            return continuation(handler_call_details)
        given = [
            value if isinstance(value, bytes) else value.encode(errors="replace")
            for key, value in handler_call_details.invocation_metadata
            if key == "authorization"
        ]
        if any(hmac.compare_digest(value, self._expected) for value in given):
            return continuation(handler_call_details)
        self._on_refused()
        return self._wrong if given else self._without


def _refusal(text: str) -> grpc.RpcMethodHandler:
    """Answers a call of any kind with UNAUTHENTICATED; being one of a stream, it waits for no message."""
    return grpc.stream_unary_rpc_method_handler(lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, text))


# ---- the client's side


@dataclass(frozen=True, kw_only=True)
class ClientSecurity:
    """How a command or a trainer shows who it is, and which shards it believes.

    Raises:
        ValueError: options that make no sense together.
    """

    tls_ca: Path | None = None
    """The CA that signed the shards' certificates; without one there is no TLS."""
    tls_cert: Path | None = None
    """This client's own certificate, for shards that ask for one."""
    tls_key: Path | None = None
    """The key of `tls_cert`."""
    token_file: Path | None = None
    """Where the token is; without a file it is WEIGHTSERVER_TOKEN, if that is set."""
    insecure: bool = False
    """Whether shards beyond loopback may be called without TLS."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together: give both or none")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-cert is for TLS: give --tls-ca too, the CA that signed the shards' certificates")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What a channel needs; None without TLS.

        Raises:
            ValueError: files that cannot be used.
        """
        if self.tls_ca is None:
            return None
        authority = _read_ca(self.tls_ca, "--tls-ca")
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authority)
        key, certificate = _read_pair(self.tls_cert, self.tls_key, "--tls-cert", "--tls-key")
        if (end := holds_until(certificate)) <= datetime.now(UTC):
            raise ValueError(f"--tls-cert {self.tls_cert} has expired on {end:%Y-%m-%d}: give one that still holds")
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def client_arguments(self) -> dict[str, Any]:
        """Arguments of WeightClient.

        Raises:
            ValueError: files that cannot be used.
        """
        return {"credentials": self.credentials(), "token": read_token(self.token_file), "insecure": self.insecure}


def add_security_options(parser: argparse.ArgumentParser) -> None:
    """How shards are called."""
    parser.add_argument("--tls-ca", type=to_path, help="use TLS; CA that signed the shards' certificates (PEM)")
    parser.add_argument("--tls-cert", type=to_path, help="own certificate, for shards that ask for one (PEM)")
    parser.add_argument("--tls-key", type=to_path, help="its key (PEM)")
    parser.add_argument("--token-file", type=to_path, help=f"token of the shards (default ${TOKEN_VARIABLE})")
    parser.add_argument("--insecure", action="store_true", help="take addresses beyond loopback without TLS")


def security_options(arguments: argparse.Namespace) -> ClientSecurity:
    """What was given of them; ValueError where it makes no sense together."""
    return ClientSecurity(**{field.name: getattr(arguments, field.name) for field in fields(ClientSecurity)})
