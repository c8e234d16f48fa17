"""A shard's TLS, and the interceptor that checks the bearer token. Both follow their files, without a restart."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import grpc

from weightserver.common.logs import OncePerSecond
from weightserver.common.security import (
    TOKEN_VARIABLE,
    Followed,
    out_of_date,
    read_ca,
    read_pair,
    validity,
)
from weightserver.core.errors import AuthenticationError
from weightserver.server.admission import abort
from weightserver.server.metrics import ShardMetrics

_HEALTH = "/grpc.health.v1.Health/"
_REFUSALS = {
    "missing": f"the call has no token, and this shard requires one: give --token-file or set {TOKEN_VARIABLE}",
    "wrong": "the call's token is not this shard's: give the token in the shard's own --token-file",
}
_log = logging.getLogger(__name__)


class ServerTls:
    """A shard's TLS configuration: each new connection gets what the files hold then.

    A certificate that is out of date does not replace another one; at the start it is taken, and the shard is not ready
    until it is replaced.

    Args:
        client_ca: restricts clients to those with a certificate signed by that CA.

    Raises:
        ValueError: a file cannot be read, is damaged, does not match the others or is of a kind that clients refuse.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._name, self._is_started = f"--tls-cert {cert}", False

        def read() -> tuple[grpc.ServerCertificateConfiguration, tuple[datetime, datetime]]:
            pair = read_pair(cert, key, "--tls-cert", "--tls-key")
            authority = None if client_ca is None else read_ca(client_ca, "--tls-client-ca")
            period = validity(pair[1])
            if self._is_started and (why := out_of_date(self._name, period)):
                raise ValueError(why)
            return grpc.ssl_server_certificate_configuration([pair], authority), period

        self._files = Followed(read, cert, key, client_ca)
        self._is_started = True
        self._given, _ = self._files()
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._given, self._changed, require_client_authentication=client_ca is not None
        )

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        _, (_, end) = self._files()
        return end

    def problem(self) -> str:
        """Why clients refuse the certificate; empty if they do not."""
        _, period = self._files()
        return out_of_date(self._name, period)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake; None keeps what it has."""
        found, _ = self._files()
        if found is self._given:
            return None
        self._given = found
        return found


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without one of the tokens before reading any message; health checks need no token."""

    def __init__(self, tokens: Callable[[], list[str]], metrics: ShardMetrics) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._may_log = OncePerSecond()

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
        expected = [f"Bearer {token}".encode() for token in self._tokens()]
        if any(hmac.compare_digest(value, one) for value in given for one in expected):
            return continuation(handler_call_details)
        return self._refusal("wrong" if given else "missing", handler_call_details.method.rpartition("/")[2])

    def _refusal(self, reason: str, method: str) -> grpc.RpcMethodHandler:
        """Answers any call with UNAUTHENTICATED; as a handler of a stream it does not wait for a message."""

        def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
            self._metrics.refused_token(method, reason)
            if self._may_log(reason):
                fields = {"method": method, "peer": context.peer(), "reason": reason}
                _log.warning("%(method)s refused for %(peer)s: %(reason)s token", fields)
            abort(context, AuthenticationError(_REFUSALS[reason]))

        return grpc.stream_unary_rpc_method_handler(refuse)
