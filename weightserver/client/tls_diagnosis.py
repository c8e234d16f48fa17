"""Why no connection comes about: what of a failed attempt lies with TLS and will not heal by trying again.

gRPC calls it UNAVAILABLE like a shard that is away. Its words tell where this side refused the other's certificate.
Where the shard hangs up without a word, asking it by hand tells whether it wanted TLS, or a certificate.
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
    (r"certificate is not yet valid", "its certificate does not hold yet: compare the clocks of both machines"),
    (
        r"issuer certificate|self.signed certificate",
        "its certificate was not signed by the CA that this client trusts: give --tls-ca the one that did",
    ),
    (
        r"(?i)hostname verification|not in peer certificate",
        "its certificate is not for the name {host}: connect by a name that it is for, or make one for --host {host}",
    ),
    (r"WRONG_VERSION_NUMBER", "it does not speak TLS: leave --tls-ca away, or start it with --tls-cert and --tls-key"),
    (r"TSI_PROTOCOL_FAILURE\W*(?P<reason>.*)|(?P<other>\w+ verification check failed.*)", "TLS failed: {reason}"),
)
"""What gRPC says, and what it means. The last catches what it may say otherwise in other versions."""


def tls_failure(address: str, status: grpc.StatusCode, details: str, *, tls: bool) -> str | None:
    """What is wrong between this client and the shard and will stay so, and what to do; None where it is not TLS.

    Args:
        status, details: how a call ended, in gRPC's words.
        tls: whether it was made with TLS.
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
        if _first_bytes(host, port) == b"":  # a shard that was just stopping is away by now
            return (
                "it wants a client certificate and took none from this one: give --tls-cert and --tls-key, signed by "
                "the CA in its --tls-client-ca and not expired"
            )
    return None


def _first_bytes(host: str, port: int) -> bytes | None:
    """What is said to a TLS client without a certificate: b"" where the shard hangs up, None where it speaks no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told to it, and nothing believed
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            try:
                return connection.recv(1)  # of TLS 1.3: a client without a certificate is refused only now
            except ConnectionResetError:
                return b""
            except ssl.SSLError as error:
                return b"" if "CERTIFICATE_REQUIRED" in (error.reason or "") else None
    except OSError:
        return None
