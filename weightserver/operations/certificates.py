"""Creates certificates for a quick start, for operators without a CA of their own."""

from __future__ import annotations

import argparse
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

from weightserver.common.addresses import expand_range
from weightserver.common.atomic_files import atomic_directory, atomic_write, to_path

MAX_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def write_certificates(
    directory: Path, hosts: Sequence[str], *, days: int = 365, start: datetime | None = None
) -> datetime:
    """Writes certificates and a token with which servers and clients authenticate each other; returns their expiry.

    ca.pem and ca-key.pem are a new CA; server.pem and server-key.pem its certificate for `hosts` (names or IP
    addresses, also ws-{0..63}.ws for 64 names); client.pem and client-key.pem one for clients; token is a random bearer
    token. Keys use the curve P-256; only their owner may read them and the token. The certificates are valid for `days`
    days from `start`, by default from now. `directory` is new or empty, and receives all files or none.

    Raises:
        ValueError: a host or `days` is invalid, or the directory is not empty.
        OSError: a file cannot be written.
    """
    if not hosts:
        raise ValueError("a server's certificate needs a name: give the hosts that clients connect to")
    if not 1 <= days <= MAX_DAYS:
        raise ValueError(f"days must lie in 1..{MAX_DAYS}, got {days}")
    start = start or datetime.now(UTC)
    period = start - _CLOCK_SKEW, start + timedelta(days=days)
    leaf, signs = x509.BasicConstraints(ca=False, path_length=None), _key_usage("digital_signature")
    names = x509.SubjectAlternativeName([_general_name(name) for host in hosts for name in expand_range(host)])
    authority = f"weightserver CA {secrets.token_hex(4)}"
    wanted: dict[str, tuple[str, list[x509.ExtensionType]]] = {
        "ca": (authority, [x509.BasicConstraints(ca=True, path_length=0), _key_usage("key_cert_sign", "crl_sign")]),
        "server": ("weightserver", [leaf, signs, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), names]),
        "client": ("weightserver client", [leaf, signs, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])]),
    }
    keys = {file: ec.generate_private_key(ec.SECP256R1()) for file in wanted}
    contents = {"token": secrets.token_urlsafe(32).encode() + b"\n"}
    for file, (name, extensions) in wanted.items():
        contents[f"{file}.pem"] = _certificate(name, keys[file], authority, keys["ca"], period, extensions)
        contents[f"{file}-key.pem"] = keys[file].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    with atomic_directory(directory) as new:
        for file, content in contents.items():
            mode = 0o600 if file == "token" or file.endswith("-key.pem") else 0o644
            atomic_write(new / file, partial(Path.write_bytes, data=content), mode=mode)
    return period[1]


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: str,
    authority_key: ec.EllipticCurvePrivateKey,
    period: tuple[datetime, datetime],
    extensions: list[x509.ExtensionType],
) -> bytes:
    """A certificate of the CA, PEM."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(authority))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(period[0])
        .not_valid_after(period[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(
            extension, critical=isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        )
    return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


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


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=to_path, help="where to write the files; existing files are not overwritten")
    parser.add_argument(
        "--host",
        nargs="+",
        action="extend",
        required=True,
        help="names and addresses that clients connect to; ws-{0..63}.ws for 64",
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
