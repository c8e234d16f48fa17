"""A shard's TLS, and the interceptor that checks the bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from weightserver.common.security import TOKEN_VARIABLE, expiry, read_ca, read_pair
from weightserver.core.errors import AuthenticationError
from weightserver.server.admission import abort

_HEALTH = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class ServerTls:
    """A shard's TLS configuration."""

    credentials: grpc.ServerCredentials
    expires: datetime
    """When the certificate expires."""


def server_tls(cert: Path, key: Path, client_ca: Path | None) -> ServerTls:
    """Reads the TLS configuration; `client_ca` restricts clients to those with a certificate signed by that CA.

    Raises:
        ValueError: a file cannot be read, is damaged or does not match the others.
    """
    pair = read_pair(cert, key, "--tls-cert", "--tls-key")
    authority = None if client_ca is None else read_ca(client_ca, "--tls-client-ca")
    credentials = grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
    return ServerTls(credentials, expiry(pair[1]))


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token before reading any message; health checks need no token."""

    def __init__(self, token: str, on_refused: Callable[[], None]) -> None:
        self._expected = f"Bearer {token}".encode()
        self._on_refused = on_refused
        self._without = _refusal(
            f"the call has no token, and this shard requires one: give --token-file or set {TOKEN_VARIABLE}"
        )
        self._wrong = _refusal("the call's token is not this shard's: give the token in the shard's own --token-file")

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
    """Answers any call with UNAUTHENTICATED; as a handler of a stream it does not wait for a message."""
    return grpc.stream_unary_rpc_method_handler(lambda _, context: abort(context, AuthenticationError(text)))
