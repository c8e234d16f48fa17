"""Reads TLS certificates, keys and the bearer token, for shards and their clients, and again when their files change.

The token comes from a file or from the environment, never from an argument, which the list of processes would show. No
message and no log contains it. While a token is replaced the file holds two, one a line: shards accept each, clients
send the first.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

TOKEN_VARIABLE = "WEIGHTSERVER_TOKEN"
MIN_TOKEN_CHARACTERS = 16
"""Guesses are not limited, so they must be hopeless."""
MAX_TOKEN_CHARACTERS = 1024
"""gRPC limits a call's metadata to 8 KiB and reports more like overload."""

_LOOK_SECONDS = 1.0
"""How often files are looked at."""

Content = TypeVar("Content")
_log = logging.getLogger(__name__)


class Followed(Generic[Content]):
    """What files hold, read again when one of them has changed. Thread-safe.

    If they are invalid then, as between the writes of a certificate and of its key, a warning says so, what they held
    before stays, and they are read again, once a second, until they are valid: a certificate may become so by itself.
    Nobody waits for another caller's reading. A copy, also a pickled one, reads them itself.

    Args:
        read: reads the content; raises ValueError if a file is invalid, or OSError if one goes meanwhile.
        files: the files; None for one that is not given.
    """

    def __init__(self, read: Callable[[], Content], *files: Path | None) -> None:
        self._read = read
        self._files = [file for file in files if file is not None]
        self._lock = threading.Lock()
        self._looked, self._found = time.monotonic(), self._look()
        self._content = read()
        self._is_refused = False
        """Whether the files are invalid now."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Followed, (self._read, *self._files)

    def __call__(self) -> Content:
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._looked >= _LOOK_SECONDS:
                    self._follow()
            finally:
                self._lock.release()
        return self._content

    def _follow(self) -> None:
        try:
            found = self._look()
            changed, self._found = found != self._found, found
            if changed or self._is_refused:
                self._reread(is_new=changed)
        finally:
            self._looked = time.monotonic()

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_state(file) for file in self._files]

    def _reread(self, *, is_new: bool) -> None:
        names = ", ".join(map(str, self._files))
        try:
            self._content = self._read()
        except (ValueError, OSError) as error:
            if is_new:
                _log.warning("%(reason)s; what was read before is used", {"reason": str(error)})
            self._is_refused = True
        else:
            self._is_refused = False
            _log.info("read %(files)s again", {"files": names})


def _state(file: Path) -> tuple[int, int, int] | None:
    """What changes when the file is written, replaced or made readable; None if it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns, found.st_size


def has_token(file: Path | None) -> bool:
    """Whether `read_token` would find a token, or raise."""
    return file is not None or TOKEN_VARIABLE in os.environ


def read_token(file: Path | None) -> str | None:
    """Reads the token that clients send, as `read_tokens` does; None if none is given."""
    return next(iter(read_tokens(file)), None)


def read_tokens(file: Path | None) -> list[str]:
    """Reads the bearer tokens, one a line, from `file`, or without one from $WEIGHTSERVER_TOKEN; none if neither is
    given.

    Raises:
        ValueError: the file cannot be read, or a token is too short, too long or not printable ASCII.
    """
    if not has_token(file):
        return []
    if file is None:
        where, text = TOKEN_VARIABLE, os.environ[TOKEN_VARIABLE]
    else:
        where, text = f"--token-file {file}", _read(file, "--token-file", secret=True).decode(errors="replace")
    tokens = [line.strip() for line in text.strip().split("\n") if line.strip()] or [""]
    for token in tokens:
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise ValueError(f"{where} holds {len(token)} characters: give a token of at most {MAX_TOKEN_CHARACTERS}")
        if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"{where} holds no valid token: give at least {MIN_TOKEN_CHARACTERS} printable ASCII characters "
                "without spaces, such as 'weightserver certs' creates"
            )
    return tokens


def _read(file: Path, option: str, *, secret: bool = False) -> bytes:
    try:
        content = file.read_bytes()
        mode = file.stat().st_mode
    except OSError as error:
        raise ValueError(f"{option} {file} cannot be read: {error.strerror}") from error
    if secret and stat.S_ISREG(mode) and mode & (stat.S_IWGRP | stat.S_IRWXO):  # the owner's group may read it
        _log.warning(
            "%(option)s %(path)s can be read or changed by others: chmod 600 it", {"option": option, "path": str(file)}
        )
    return content


def read_pair(cert: Path, key: Path, cert_option: str, key_option: str) -> tuple[bytes, bytes]:
    """Reads (key, certificate chain) in PEM from two files.

    Raises:
        ValueError: a file cannot be read, the key is encrypted or of a kind that gRPC cannot use, or they do not match.
    """
    pair = _read(key, key_option, secret=True), _read(cert, cert_option)

    def refuse_password() -> str:
        raise ValueError(f"{key_option} {key} is encrypted: give a key without a password, readable only by its owner")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=refuse_password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{cert_option} {cert} and {key_option} {key} are not a certificate and its key in PEM: "
            f"{error.reason or 'unreadable'}"
        ) from error
    if pair != (key.read_bytes(), cert.read_bytes()):  # so that it was another one that was tried
        raise ValueError(f"{cert_option} {cert} is being replaced: try again")
    if not _has_usable_key(pair[1]):
        raise ValueError(
            f"gRPC cannot use the kind of key of {cert_option} {cert}: give one of RSA, P-256 or P-384, such as "
            "'weightserver certs' creates"
        )
    return pair


def _has_usable_key(pem: bytes) -> bool:
    """Whether gRPC knows the first certificate's kind of key; OpenSSL knows more kinds."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate = x509.load_pem_x509_certificate(pem)
    if certificate.public_key_algorithm_oid == x509.oid.PublicKeyAlgorithmOID.RSAES_PKCS1_v1_5:
        return True
    try:
        key = certificate.public_key()
    except (UnsupportedAlgorithm, ValueError):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)


def read_ca(file: Path, option: str) -> bytes:
    """Reads the PEM certificates of one or more CAs.

    Raises:
        ValueError: the file cannot be read or contains no CA certificate.
    """
    pem = _read(file, option)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{option} {file} contains no CA certificate in PEM") from error
    return pem


def validity(pem: bytes) -> tuple[datetime, datetime]:
    """From when until when the first certificate in `pem` is valid."""
    from cryptography import x509  # slow to import, and needed only with certificates

    certificate = x509.load_pem_x509_certificate(pem)
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def out_of_date(certificate: str, period: tuple[datetime, datetime]) -> str:
    """Why a certificate, named so, is refused by the other side now; empty if it is not."""
    now, (begin, end) = datetime.now(UTC), period
    if now < begin:
        return (
            f"{certificate} is valid from {begin:%Y-%m-%d %H:%M} UTC on: give one that is valid now, or set the clock"
        )
    return f"{certificate} expired on {end:%Y-%m-%d %H:%M} UTC: renew it" if now >= end else ""
