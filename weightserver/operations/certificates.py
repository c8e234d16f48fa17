"""Creates certificates for a quick start, for operators without a CA of their own."""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weightserver.common.atomic_files import atomic_write, to_path

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
    from now.

    Raises:
        ValueError: a host or `days` is invalid, or a file already exists; files are never overwritten.
    """
    if not hosts:
        raise ValueError("a server's certificate needs a name: give the hosts that clients connect to")
    if not 1 <= days <= MAX_DAYS:
        raise ValueError(f"days must lie in 1..{MAX_DAYS}, got {days}")
    start = start or datetime.now(UTC)
    authority = _Authority(start, start + timedelta(days=days))
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    contents = {
        "ca.pem": authority.certificate(),
        "ca-key.pem": _private(authority.key),
        "server.pem": authority.sign_leaf("weightserver", server_key, ExtendedKeyUsageOID.SERVER_AUTH, names),
        "server-key.pem": _private(server_key),
        "client.pem": authority.sign_leaf("weightserver client", client_key, ExtendedKeyUsageOID.CLIENT_AUTH),
        "client-key.pem": _private(client_key),
        "token": secrets.token_urlsafe(32).encode() + b"\n",
    }
    _write_new(directory, contents)
    return authority.end


@dataclass(frozen=True)
class _Authority:
    """A new CA, whose certificates are valid from `start` to `end`."""

    start: datetime
    end: datetime
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    name: str = field(default_factory=lambda: f"weightserver CA {secrets.token_hex(4)}")

    def certificate(self) -> bytes:
        """The CA's own certificate, PEM."""
        constraints, usage = x509.BasicConstraints(ca=True, path_length=0), _key_usage("key_cert_sign", "crl_sign")
        return self._sign(self.name, self.key, [(constraints, True), (usage, True)])

    def sign_leaf(
        self, name: str, key: ec.EllipticCurvePrivateKey, usage: x509.ObjectIdentifier, *more: x509.ExtensionType
    ) -> bytes:
        """A server's or client's certificate, PEM."""
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([usage]), False),
        ]
        return self._sign(name, key, [*extensions, *((extension, False) for extension in more)])

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, extensions: Iterable[tuple[x509.ExtensionType, bool]]
    ) -> bytes:
        """Signs a certificate with the given (extension, whether critical)."""
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
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


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
        for path in written:  # an incomplete set is useless, and would block the next attempt
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
