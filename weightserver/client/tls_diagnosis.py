"""Diagnoses TLS failures: errors of a connection that no retry would heal.

gRPC reports them as UNAVAILABLE, like a shard that does not run. Its message shows if this side refused the other's
certificate. If the shard hangs up without a message, a probe of its port shows whether it requires TLS, or a client
certificate.
"""

from __future__ import annotations

import re
import socket
import ssl
import time

import grpc

from weightserver.common.addresses import split_address

_PROBE_SECONDS = 2.0
_PAUSE_SECONDS = 0.05
_REASONS = (
    (r"certificate has expired", "its certificate has expired: renew it and restart the shard"),
    (r"certificate is not yet valid", "its certificate is not valid yet: compare the clocks of both machines"),
    (
        r"issuer certificate|self.signed certificate",
        "its certificate was not signed by the CA that this client trusts: give --tls-ca the CA that signed it",
    ),
    (
        r"(?i)hostname verification|not in peer certificate",
        "its certificate is not for the name {host}: connect by a name that it is for, or make one for --host {host}",
    ),
    (r"WRONG_VERSION_NUMBER", "it does not speak TLS: omit --tls-ca, or start it with --tls-cert and --tls-key"),
    (r"TSI_PROTOCOL_FAILURE\W*(?P<reason>.*)|(?P<other>\w+ verification check failed.*)", "TLS failed: {reason}"),
)
"""Patterns in gRPC's messages, and what they mean. The last one matches messages of other versions of gRPC."""


def tls_failure(address: str, status: grpc.StatusCode, details: str, *, tls: bool) -> str | None:
    """The TLS problem that made a call fail, and what to do; None if there is none.

    Args:
        status, details: the end of the call, as gRPC reports it.
        tls: whether the call was made with TLS.
    """
    if status is not grpc.StatusCode.UNAVAILABLE:
        return None
    host, port = split_address(address)
    if not tls:
        if _first_bytes(host, port) is None:
            return None
        return "it speaks TLS only: give --tls-ca, the CA that signed its certificate"
    for pattern, reason in _REASONS:
        if found := re.search(pattern, details):
            quoted = " ".join(filter(None, found.groupdict().values()))
            return reason.format(host=host, reason=quoted)
    if _first_bytes(host, port) == b"":
        time.sleep(_PAUSE_SECONDS)
        if _first_bytes(host, port) == b"":  # a shard that was about to stop does not listen any more
            return (
                "it requires a client certificate and accepted none: give --tls-cert and --tls-key, signed by the CA "
                "in its --tls-client-ca and not expired"
            )
    return None


def _first_bytes(host: str, port: int) -> bytes | None:
    """The answer to a TLS client without a certificate: b"" if the shard hangs up, None if it does not speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the probe sends no data, and trusts none
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            try:
                return connection.recv(1)  # TLS 1.3 refuses a client without a certificate only now
            except ConnectionResetError:
                return b""
            except ssl.SSLError as error:
                return b"" if "CERTIFICATE_REQUIRED" in (error.reason or "") else None
    except OSError:
        return None
