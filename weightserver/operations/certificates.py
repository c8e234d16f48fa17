"""Creates certificates for a quick start, for operators without a CA of their own."""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weightserver.common.atomic_files import atomic_directory, atomic_write, to_path

MAX_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def write_certificates(
    directory: Path, hosts: Sequence[str], *, days: int = 365, start: datetime | None = None
) -> datetime:
    """Writes certificates and a token with which servers and clients authenticate each other; returns their expiry.

    ca.pem and ca-key.pem are a new CA; server.pem and server-key.pem its certificate for `hosts` (names or IP
    addresses); client.pem and client-key.pem one for clients; token is a random bearer token. Keys use the curve P-256;
    only their owner may read them and the token. The certificates are valid for `days` days from `start`, by default
    from now. `directory` is new or empty, and receives all files or none.

    Raises:
        ValueError: a host or `days` is invalid, or the directory is not empty.
        OSError: a file cannot be written.
    """
    if not hosts:
        raise ValueError("a server's certificate needs a name: give the hosts that clients connect to")
    if not 1 <= days <= MAX_DAYS:
        raise ValueError(f"days must lie in 1..{MAX_DAYS}, got {days}")
    start = start or datetime.now(UTC)
    authority_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    end = start + timedelta(days=days)
    authority = _Authority(f"weightserver CA {secrets.token_hex(4)}", authority_key, start, end)
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    contents = {
        "ca.pem": authority.own_certificate(),
        "ca-key.pem": _private(authority_key),
        "server.pem": authority.certificate("weightserver", server_key, ExtendedKeyUsageOID.SERVER_AUTH, names),
        "server-key.pem": _private(server_key),
        "client.pem": authority.certificate("weightserver client", client_key, ExtendedKeyUsageOID.CLIENT_AUTH),
        "client-key.pem": _private(client_key),
        "token": secrets.token_urlsafe(32).encode() + b"\n",
    }
    with atomic_directory(directory) as new:
        for name, content in contents.items():
            is_secret = name == "token" or name.endswith("-key.pem")

            def write(path: Path, content: bytes = content) -> None:
                path.write_bytes(content)

            atomic_write(new / name, write, mode=0o600 if is_secret else 0o644)
    return end


@dataclass(frozen=True)
class _Authority:
    """A CA, whose certificates are valid from `start` to `end`."""

    name: str
    key: ec.EllipticCurvePrivateKey
    start: datetime
    end: datetime

    def own_certificate(self) -> bytes:
        """The CA's own certificate, PEM."""
        is_ca = x509.BasicConstraints(ca=True, path_length=0)
        return self._sign(self.name, self.key, critical=[is_ca, _key_usage("key_cert_sign", "crl_sign")], others=[])

    def certificate(
        self, name: str, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier, *more: x509.ExtensionType
    ) -> bytes:
        """A server's or client's certificate, PEM."""
        is_leaf = x509.BasicConstraints(ca=False, path_length=None)
        usages = x509.ExtendedKeyUsage([usage])
        return self._sign(name, key, critical=[is_leaf, _key_usage("digital_signature")], others=[usages, *more])

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        critical: list[x509.ExtensionType],
        others: list[x509.ExtensionType],
    ) -> bytes:
        """Signs a certificate with these extensions."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.start - _CLOCK_SKEW)
            .not_valid_after(self.end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        for extension in critical + others:
            builder = builder.add_extension(extension, critical=extension in critical)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST_NAME.fullmatch(host):
            raise ValueError(
                f"{host!r} is not a host: give a name or an IP address without a port, such as ws0.example or 10.0.0.7"
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


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="where to write the files; existing files are not overwritten")
    parser.add_argument(
        "--host", nargs="+", action="extend", required=True, help="names and addresses that clients connect to"
    )
    parser.add_argument("--days", type=int, default=365, help="days until they expire (default 365)")


def run(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    end = write_certificates(directory, arguments.host, days=arguments.days)
    print(
        f"certificates for {', '.join(arguments.host)} in {directory} are valid until {end:%Y-%m-%d %H:%M} UTC\n"
        f"shards:  --tls-cert {directory}/server.pem --tls-key {directory}/server-key.pem "
        f"--token-file {directory}/token   (to require client certificates: --tls-client-ca {directory}/ca.pem)\n"
        f"clients: --tls-ca {directory}/ca.pem --token-file {directory}/token   "
        f"(where required: --tls-cert {directory}/client.pem --tls-key {directory}/client-key.pem)\n"
        f"keep {directory}/ca-key.pem away from both"
    )
