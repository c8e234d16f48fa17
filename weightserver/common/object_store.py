"""Objects in the buckets of an S3 store, by obstore (the extra `s3`).

A path that begins with s3: names an object, or those below it: `Path("s3://bucket/packed")`. Credentials, region and
endpoint are those of the environment (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, …) or of the machine's role.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from zlib import crc32

from weightserver.common.atomic_files import to_path
from weightserver.common.installing import install_advice
from weightserver.common.threads import in_other_thread

Answer = TypeVar("Answer")
SCHEME = "s3:"
PART_BYTES = 1 << 24
"""Most that is sent or asked for in one request."""
_PARTS_AT_ONCE = 2
"""Parts of an object that are sent at a time: more would share a slow connection until none of them arrives in time."""
_REQUEST_SECONDS = 30
_RETRY_SECONDS = 90
"""How long a request that met a busy server, a cut connection or a slow answer is tried again."""
_ENDING_SECONDS = 5
"""How long a request may take while the process ends."""
_MOST_CHECKSUMS = 200
"""Stores keep 2 KB of notes about an object."""
_CHECKSUMS = re.compile(r"\d+ \d+( [0-9a-f]{8})*")
"""The note of an object's segments; that of another program may have the same name."""
_LISTS = 3
"""How often a list is asked for until it is complete."""
_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""What stands for an access key in the environment."""
_METADATA = "http://169.254.169.254"
"""Where machines ask for their own role."""
_METADATA_SECONDS = 2


class Reason(Enum):
    """Why an object cannot be read or written, and what to do."""

    MISSING = "no such object, or no such bucket: check its name"
    DENIED = (
        "access is denied: check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the rights of their role, and whether "
        "the clock of this machine is right"
    )
    UNLISTED = "no such bucket, or names in it that cannot be read (with //, /./, /../, control characters): check it"
    CUT_OFF = "it is shorter than it was: upload it again"
    DAMAGED = "it does not match its checksum: remove it and upload it again"
    REPLACED = "it is another object than it was: give the place of the earlier one, or start again with this one"
    NO_CREDENTIALS = (
        "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role "
        "(files in ~/.aws are not read)"
    )
    NO_ANSWER = (
        f"no usable answer in up to {_REQUEST_SECONDS + _RETRY_SECONDS} s: check the network, AWS_ENDPOINT_URL and "
        "AWS_REGION, and whether AWS_SESSION_TOKEN has expired"
    )
    ENDING = f"no answer in {_ENDING_SECONDS} s after the process was told to end"


class ObjectStoreError(ValueError):
    """An object store refuses or does not answer. Never quotes its answer, which may hold credentials.

    Attributes:
        path: the object, or where it was looked for.
        reason: why.
    """

    def __init__(self, path: Path, reason: Reason) -> None:
        super().__init__(f"{shown(path)}: {reason.value}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[Self], tuple[Path, Reason]]:
        return type(self), (self.path, self.reason)


class Found(NamedTuple):
    """An object in a bucket."""

    path: Path
    bytes: int
    version: str
    """Identifies the content: another content has another one."""
    written: datetime


def to_location(text: str) -> Path:
    """Parses a path of the command line, which may be s3://BUCKET/KEY.

    Raises:
        ArgumentTypeError: any other URL, one with credentials, or one that names no object.
    """
    scheme, mark, rest = text.partition("://")
    host = rest.partition("/")[0]
    if mark and ("@" in host or (":" in host and "@" in rest)):  # secrets may have slashes
        raise ArgumentTypeError(
            f"{scheme}://…@{rest.partition('@')[2]} has credentials, which files and messages would repeat: give "
            "s3://BUCKET/KEY, and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )
    if mark and scheme == "s3" and rest.strip("/"):
        if ".." in rest.split("/"):
            raise ArgumentTypeError(f"{text} has .., and a bucket has no folder above: give the place itself")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ArgumentTypeError(f"{text!a} is not UTF-8, as names in a bucket are: give another") from None
        return Path(text)
    if mark and scheme.isalnum():
        raise ArgumentTypeError(f"{text} is a URL: copy or mount what is there, or give s3://BUCKET/KEY")
    return to_path(text)


def is_remote(path: Path) -> bool:
    return path.parts[:1] == (SCHEME,)


def shown(path: Path) -> str:
    """A path as people write it: a `Path` has one slash after the scheme."""
    return f"{SCHEME}//{'/'.join(path.parts[1:])}" if is_remote(path) else str(path)


def absolute(path: Path) -> Path:
    """A path without links, which means the same in any working directory; one in a bucket as it is."""
    return path if is_remote(path) else path.resolve()


def read(path: Path) -> bytes:
    """The content of a small object. Raises ObjectStoreError."""
    return _answer(path, lambda store, key: bytes(_obstore().get(store, key).bytes()))


def find(path: Path) -> Found | None:
    """An object, or None if there is none. Raises ObjectStoreError."""
    return unless_missing(lambda: _answer(path, lambda store, key: _found(path, _obstore().head(store, key))))


def write(path: Path, content: bytes) -> None:
    """Makes or replaces an object. Raises ObjectStoreError."""
    _put(path, content)


def create(path: Path, content: bytes) -> bytes:
    """Makes a small object unless there is one; returns its content, which is another than `content` if another caller
    was first. Raises ObjectStoreError."""
    errors = _obstore().exceptions

    def put(store: Any, key: str) -> bytes:
        try:
            _obstore().put(store, key, content, mode="create", use_multipart=False)
        except errors.AlreadyExistsError:  # made by another caller, or by a request that was repeated
            return bytes(_obstore().get(store, key).bytes())
        return content

    return _answer(path, put)


def upload(path: Path, target: Path, *, sha256: str = "", segment_bytes: int = 0) -> None:
    """Makes or replaces an object by a file. Raises ObjectStoreError.

    Args:
        sha256: of the content, for `digest_of` and `copy_range`.
        segment_bytes: size of the segments whose checksums `copy_range` will compare, those of most files; 0: none.
    """
    notes = {"sha256": sha256} if sha256 else {}
    if segment_bytes and (size := path.stat().st_size) <= segment_bytes * _MOST_CHECKSUMS:
        with path.open("rb") as file:
            checksums = [f"{crc32(part):08x}" for part in iter(lambda: file.read(segment_bytes), b"")]
        notes["crc32"] = " ".join([str(segment_bytes), str(size), *checksums])
    _put(target, path, notes)


def _put(target: Path, content: bytes | Path, notes: dict[str, str] | None = None) -> None:
    _answer(
        target,
        lambda store, key: _obstore().put(
            store, key, content, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE, attributes=notes
        ),
    )


def digest_of(path: Path) -> str:
    """The SHA-256 with which an object was uploaded; empty if there is none. Raises ObjectStoreError."""
    found = unless_missing(
        lambda: _answer(path, lambda store, key: _obstore().get(store, key, options={"head": True}).attributes)
    )
    return str((found or {}).get("sha256", ""))


def below(path: Path) -> list[Path]:
    """The objects below a path, in any order. Raises ObjectStoreError."""
    return [one.path for one in found_below(path)]


def found_below(path: Path) -> list[Found]:
    """The objects below a path, in any order. Raises ObjectStoreError."""
    return _all_found(path, _listed(path, lambda *place: [one for some in _obstore().list(*place) for one in some]))


def directly_below(path: Path) -> list[Found]:
    """The objects directly below a path. Raises ObjectStoreError."""
    return _all_found(path, _listed(path, _obstore().list_with_delimiter)["objects"])


def folders(path: Path) -> list[str]:
    """Names of the folders directly below a path, which have objects below them. Raises ObjectStoreError."""
    found = _listed(path, _obstore().list_with_delimiter)["common_prefixes"]
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in found]


def remove(paths: Sequence[Path]) -> None:
    """Removes objects of one bucket; those that are missing already are no error. Raises ObjectStoreError."""
    if paths:
        keys = ["/".join(path.parts[2:]) for path in paths]
        _answer(paths[0], lambda store, _: _obstore().delete(store, keys))


def copy_range(
    source: Path, start: int, stop: int, target: BinaryIO, *, sha256: str = "", is_whole: bool = False
) -> str:
    """Writes bytes start … stop−1 of an object to a file; returns what identifies the content of the object.

    Args:
        sha256: of the whole object, if that is known.
        is_whole: whether the object was this long.

    Raises:
        ObjectStoreError: also if the object is replaced meanwhile or has another SHA-256, and if a segment does not
            match its checksum, as far as `upload` noted these.
    """
    version = ""
    for first in range(start, stop, PART_BYTES):
        last = min(first + PART_BYTES, stop)
        found, notes, content = _get_range(source, first, last)
        before, version = version, notes.get("sha256") or found.version
        if before not in ("", version) or ("sha256" in notes and sha256 not in ("", version)):
            raise ObjectStoreError(source, Reason.REPLACED)
        if len(content) != last - first:
            raise ObjectStoreError(source, Reason.CUT_OFF)
        if is_whole and found.bytes != stop:
            raise ObjectStoreError(source, Reason.REPLACED)
        if not _matches(content, first, notes.get("crc32", "")):
            raise ObjectStoreError(source, Reason.DAMAGED)
        target.write(content)
    return version


def _get_range(path: Path, start: int, stop: int) -> tuple[Found, dict[str, str], memoryview]:
    """An object, what `upload` noted of it, and bytes start … stop−1, fewer at its end."""

    def get(store: Any, key: str) -> tuple[Found, dict[str, str], memoryview]:
        answer = _obstore().get(store, key, options={"range": (start, stop)})
        return _found(path, answer.meta), answer.attributes, memoryview(answer.bytes())

    end = time.monotonic() + _RETRY_SECONDS
    try:
        return _answer(path, get)
    except ObjectStoreError as error:
        refused = error.reason is Reason.NO_ANSWER and time.monotonic() < end
        if refused and (now := find(path)) and now.bytes <= start:  # obstore has no error of its own for such a range
            raise ObjectStoreError(path, Reason.CUT_OFF) from None
        raise


def _matches(content: memoryview, start: int, noted: str) -> bool:
    """Whether bytes of an object, from `start` on, match what `upload` noted if they are one of its segments."""
    size, num_bytes, *checksums = noted.split() if _CHECKSUMS.fullmatch(noted) else ("1", "0")
    number, offset = divmod(start, int(size))
    is_segment = not offset and start + len(content) == min(start + int(size), int(num_bytes))
    return not is_segment or f"{crc32(content):08x}" == checksums[number]


def unless_missing(ask: Callable[[], Answer]) -> Answer | None:
    """What `ask` returns; None if it raises ObjectStoreError because the object or the bucket is missing."""
    try:
        return ask()
    except ObjectStoreError as error:
        if error.reason is not Reason.MISSING:
            raise
        return None


def end_soon() -> None:
    """Gives each request of this process, the coming ones too, a few seconds, and none after one that took longer: the
    process was told to end."""
    global _told_to_end
    _told_to_end = time.monotonic()


_told_to_end, _has_ended = math.inf, False


def _answer(path: Path, ask: Callable[[Any, str], Answer]) -> Answer:
    """What `ask` says of the bucket and the key of a path. Errors are told by their type alone.

    obstore waits where no signal interrupts it, so another thread asks.
    """
    errors = _obstore().exceptions
    _, bucket, *parts = (*path.parts, "")
    store, key = _bucket(bucket), "/".join(filter(None, parts))
    began = time.monotonic()

    def look() -> None:
        global _has_ended
        _has_ended = _has_ended or time.monotonic() > max(began, _told_to_end) + _ENDING_SECONDS
        if _has_ended:
            raise ObjectStoreError(path, Reason.ENDING)

    look()
    try:
        return in_other_thread(lambda: ask(store, key), look)
    except FileNotFoundError:
        raise ObjectStoreError(path, Reason.MISSING) from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError):
        raise ObjectStoreError(path, Reason.DENIED) from None
    except errors.BaseError:
        raise ObjectStoreError(path, Reason.NO_ANSWER) from None


def _listed(path: Path, ask: Callable[[Any, str | None], Any]) -> Any:
    """What a call says of the objects below a path. obstore has no error of its own for a list of a bucket that is
    missing, or with a name that is no path, and does not repeat a list that was cut off."""
    for _ in range(_LISTS):
        try:
            return _answer(path, lambda store, key: ask(store, f"{key}/" if key else None))
        except ObjectStoreError as error:
            if error.reason is not Reason.NO_ANSWER:
                raise
            find(path / "any")  # which the store answers, or there is an error
    raise ObjectStoreError(path, Reason.UNLISTED)


@lru_cache(16)
def _bucket(name: str) -> Any:
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint and not endpoint.startswith(("http://", "https://")):  # obstore would panic
        raise ValueError(f"AWS_ENDPOINT_URL is {endpoint}: begin it with https:// or http://")
    if not _has_credentials():  # obstore would ask for the machine's role for minutes
        raise ObjectStoreError(Path(SCHEME, name), Reason.NO_CREDENTIALS)
    return _obstore().store.S3Store(
        name,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "timeout": timedelta(seconds=_REQUEST_SECONDS),
        },
        retry_config={"max_retries": 20, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
    )


def _has_credentials() -> bool:
    given = os.environ.get
    if given("AWS_ACCESS_KEY_ID"):
        return bool(given("AWS_SECRET_ACCESS_KEY"))
    if any(map(given, _ROLES)):
        return True
    metadata = urlsplit(given("AWS_METADATA_ENDPOINT", _METADATA))
    try:
        socket.create_connection((metadata.hostname or "", metadata.port or 80), _METADATA_SECONDS).close()
    except OSError:
        return False
    return True


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise ValueError(f"s3:// needs obstore: {install_advice('s3')}") from None


def _all_found(path: Path, metas: Iterable[Any]) -> list[Found]:
    """The objects below a path; the empty one named PATH/, by which consoles make a folder, is none."""
    bucket = Path(*path.parts[:2])
    return [_found(there, meta) for meta in metas if (there := bucket / meta["path"]) != path]


def _found(path: Path, meta: Any) -> Found:
    return Found(path, meta["size"], f"{meta['e_tag']} {meta['size']}", meta["last_modified"])
