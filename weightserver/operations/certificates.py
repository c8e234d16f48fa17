"""Creates certificates for a quick start, for operators without a CA of their own."""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from weightserver.common.addresses import expand_range
from weightserver.common.atomic_files import atomic_directory, atomic_write, directory_lock, to_path
from weightserver.common.security import validity

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
    days from `start`, by default from now, the CA for ten years. `directory` is new or empty, and receives all files or
    none.

    Raises:
        ValueError: a host or `days` is invalid, or the directory is not empty.
        OSError: a file cannot be written.
    """
    if not hosts:
        raise ValueError("a server's certificate needs a name: give the hosts that clients connect to")
    start = start or datetime.now(UTC)
    key, name = ec.generate_private_key(ec.SECP256R1()), _name(f"weightserver CA {secrets.token_hex(4)}")
    uses = [x509.BasicConstraints(ca=True, path_length=0), _key_usage("key_cert_sign", "crl_sign")]
    authority = _certificate(name, key, name, key, _period(start, MAX_DAYS), uses)
    names = x509.SubjectAlternativeName([_general_name(name) for host in hosts for name in expand_range(host)])
    contents = _issued(authority, key, names, _period(start, days))
    contents |= _files("ca", authority, key) | {"token": secrets.token_urlsafe(32).encode() + b"\n"}
    with atomic_directory(directory) as new:
        _write(new, contents)
    return start + timedelta(days=days)


def renew_certificates(directory: Path, *, days: int = 365) -> datetime:
    """Replaces the certificates of servers and clients, and their keys, by new ones of the same CA for the same hosts;
    returns their expiry, at most the CA's. The CA and the token stay, and both sides read the files again without a
    restart.

    Raises:
        ValueError: `days` is invalid, the CA ends no later than the old certificates, or its key is another one or
            encrypted.
        OSError: a file cannot be read or written, or another process renews them.
    """
    trusted = x509.load_pem_x509_certificates((directory / "ca.pem").read_bytes())
    old = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes())
    try:
        key = serialization.load_pem_private_key((directory / "ca-key.pem").read_bytes(), None)
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except TypeError:
        raise ValueError(f"{directory}/ca-key.pem has a password: give a copy without one") from None
    except x509.ExtensionNotFound:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"'weightserver certs' has not made the files in {directory}: renew them as they were made")
    authority = next((one for one in trusted if one.public_key() == key.public_key()), None)  # among other CAs
    if authority is None:
        raise ValueError(f"{directory}/ca-key.pem is the key of no certificate in ca.pem: give the CA's own key")
    (start, end), last = _period(datetime.now(UTC), days), authority.not_valid_after_utc
    if end > last and max(start, old.not_valid_after_utc) >= last:
        raise ValueError(
            f"the CA in {directory} expires on {last:%Y-%m-%d}, and its certificates with it: make a new one in "
            "another directory, and let both sides trust both in the meantime"
        )
    with directory_lock(directory):  # or the key of one renewal and the certificate of another could stay
        _write(directory, _issued(authority, key, names, (start, min(end, last))))
    return min(end, last)


def _period(start: datetime, days: int) -> tuple[datetime, datetime]:
    if not 1 <= days <= MAX_DAYS:
        raise ValueError(f"days must lie in 1..{MAX_DAYS}, got {days}")
    return start - _CLOCK_SKEW, start + timedelta(days=days)


def _issued(
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: x509.SubjectAlternativeName,
    period: tuple[datetime, datetime],
) -> dict[str, bytes]:
    """The clients' and the servers' files, each key before its certificate. Last is server.pem, by whose end a
    renewal is due."""
    leaf, signs = x509.BasicConstraints(ca=False, path_length=None), _key_usage("digital_signature")
    wanted: dict[str, tuple[str, list[x509.ExtensionType]]] = {
        "client": ("weightserver client", [leaf, signs, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])]),
        "server": ("weightserver", [leaf, signs, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), names]),
    }
    contents: dict[str, bytes] = {}
    for file, (name, extensions) in wanted.items():
        key = ec.generate_private_key(ec.SECP256R1())
        made = _certificate(_name(name), key, authority.subject, authority_key, period, extensions)
        contents |= _files(file, made, key)
    return contents


def _files(name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> dict[str, bytes]:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return {
        f"{name}-key.pem": key.private_bytes(pem, pkcs8, serialization.NoEncryption()),
        f"{name}.pem": certificate.public_bytes(pem),
    }


def _write(directory: Path, contents: dict[str, bytes]) -> None:
    for file, content in contents.items():
        mode = 0o600 if file == "token" or file.endswith("-key.pem") else 0o644
        atomic_write(directory / file, partial(Path.write_bytes, data=content), mode=mode)


def _certificate(
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Name,
    authority_key: ec.EllipticCurvePrivateKey,
    period: tuple[datetime, datetime],
    extensions: Sequence[x509.ExtensionType],
) -> x509.Certificate:
    """A certificate of the CA."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(authority)
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
    return builder.sign(authority_key, hashes.SHA256())


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
    parser.add_argument(
        "directory", type=to_path, help="where to write the files; new or empty, or with those to renew"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--host",
        nargs="+",
        action="extend",
        help="names and addresses that clients connect to; ws-{0..63}.ws for 64",
    )
    what.add_argument(
        "--renew-within",
        type=int,
        metavar="DAYS",
        help="replace the certificates there, not the CA and the token, if they end within that number of days",
    )
    parser.add_argument("--days", type=int, default=365, help="days until they expire (default 365)")


def run(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    if arguments.renew_within is not None:
        _, end = validity((directory / "server.pem").read_bytes())
        is_due = end <= datetime.now(UTC) + timedelta(days=arguments.renew_within)
        end = renew_certificates(directory, days=arguments.days) if is_due else end
        print(
            f"certificates in {directory} {'were renewed' if is_due else 'stay'}, valid until {end:%Y-%m-%d %H:%M} UTC"
        )
        return
    end, there = write_certificates(directory, arguments.host, days=arguments.days), shlex.quote(str(directory))
    print(
        f"certificates for {', '.join(arguments.host)} in {directory} are valid until {end:%Y-%m-%d %H:%M} UTC\n"
        f"shards:  --tls-cert {there}/server.pem --tls-key {there}/server-key.pem "
        f"--token-file {there}/token   (to require client certificates: --tls-client-ca {there}/ca.pem)\n"
        f"clients: --tls-ca {there}/ca.pem --token-file {there}/token   "
        f"(where required: --tls-cert {there}/client.pem --tls-key {there}/client-key.pem)\n"
        f"keep {directory}/ca-key.pem away from both"
    )
