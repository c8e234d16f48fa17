"""Certificates for a quick start, and until when one holds. Who has a CA of their own needs none of this."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weightserver.common.atomic_files import atomic_write

MAX_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def write_certificates(
    directory: Path, hosts: Sequence[str], *, days: int = 365, start: datetime | None = None
) -> datetime:
    """Writes what servers and clients need to know each other; returns until when it holds.

    ca.pem and ca-key.pem are a new CA, server.pem and server-key.pem its certificate for `hosts` (names or IP
    addresses), client.pem and client-key.pem one for clients, and token is a random bearer token. Keys are of the curve
    P-256; only their owner may read them and the token. They hold `days` days from `start` on, by default from now.

    Raises:
        ValueError: a host or number of days that cannot be, or a file that exists: none is ever overwritten.
    """
    if not hosts:
        raise ValueError("a server's certificate needs a name: give the hosts that clients connect to")
    if not 1 <= days <= MAX_DAYS:
        raise ValueError(f"days must lie in 1..{MAX_DAYS}, got {days}")
    start = start or datetime.now(UTC)
    end = start + timedelta(days=days)
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    ca_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name = f"weightserver CA {secrets.token_hex(4)}"

    def sign(common_name: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(common_name))
            .issuer_name(_name(ca_name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start - _CLOCK_SKEW)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    leaf = ((x509.BasicConstraints(ca=False, path_length=None), True), (_key_usage("digital_signature"), True))
    for_server = (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
    for_client = (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
    contents = {
        "ca.pem": sign(
            ca_name,
            ca_key,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_key_usage("key_cert_sign", "crl_sign"), True),
        ),
        "ca-key.pem": _private(ca_key),
        "server.pem": sign("weightserver", server_key, *leaf, for_server, (names, False)),
        "server-key.pem": _private(server_key),
        "client.pem": sign("weightserver client", client_key, *leaf, for_client),
        "client-key.pem": _private(client_key),
        "token": secrets.token_urlsafe(32).encode() + b"\n",
    }
    _write_new(directory, contents)
    return end


def _write_new(directory: Path, contents: dict[str, bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in contents:
        if (directory / name).exists():
            raise ValueError(f"{directory / name} exists and is never overwritten: give another directory")
    written: list[Path] = []
    try:
        for name, content in contents.items():
            secret = name == "token" or name.endswith("-key.pem")
            atomic_write(directory / name, partial(_fill, content=content), mode=0o600 if secret else 0o644)
            written.append(directory / name)
    except OSError:
        for path in written:  # a part of them is no use, and would stand in the way of the next attempt
            path.unlink()
        raise


def _fill(path: Path, *, content: bytes) -> None:
    path.write_bytes(content)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(
                f"{host!r} is no host: give a name or an IP address, without a port, such as ws0.example or 10.0.0.7"
            ) from None
        return x509.DNSName(host)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*uses: str) -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    names += " key_cert_sign crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**{name: name in uses for name in names.split()})


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
