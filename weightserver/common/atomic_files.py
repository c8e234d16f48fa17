"""Writes files and directories atomically: complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700
"""Modes of files and directories that hold rows."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
LOCK = ".weightserver-lock"
"""The file of `directory_lock`."""


def to_path(text: str) -> Path:
    """Parses a path of the command line.

    Raises:
        ArgumentTypeError: it is empty, which would mean the current directory, or a URL, which would mean a folder with
            the name of its scheme.
    """
    if not text:
        raise ArgumentTypeError("the path is empty: is a variable not set? The current directory is .")
    if _URL.match(text):
        raise ArgumentTypeError(f"{text} is a URL: copy or mount what is there, and give its path on this machine")
    return Path(text)


def atomic_write(path: Path, write: Callable[[Path], object], *, mode: int = 0o666) -> None:
    """Lets `write` fill a temporary file next to `path`, syncs it and renames it to `path`; the umask restricts `mode`.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_synced(partial, write, mode=mode)
        partial.replace(path)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error})") from None
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def write_synced(path: Path, write: Callable[[Path], object], *, mode: int = 0o666) -> None:
    """Lets `write` fill a new file at `path`, and syncs it; the umask restricts `mode`.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    path.unlink(missing_ok=True)
    path.touch(mode)
    left = path.stat().st_mode
    try:
        write(path)  # safetensors creates a new file, which only its owner may read
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(left)
    sync(path)


def make_private(*paths: Path) -> list[Path]:
    """Removes other users' rights to the existing paths that this user owns; returns the paths changed.

    Raises:
        OSError: a mode cannot be changed.
    """
    changed = []
    for path in paths:
        if not path.exists():
            continue
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(found.st_mode & 0o700)
            changed.append(path)
    return changed


def make_directory(directory: Path, *, mode: int = 0o777) -> None:
    """Creates a directory and its missing parents durably, unless it exists.

    Args:
        mode: restricted by the umask; missing parents get 0777, restricted likewise.

    Raises:
        OSError: the directory cannot be created.
    """
    if not directory.exists():  # another thread may make it meanwhile
        make_directory(directory.parent)
        directory.mkdir(mode, exist_ok=True)
        sync(directory.parent)
    elif not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))


def sync(path: Path) -> None:
    """Makes a file's contents, or a directory's entries, survive a power loss. What fails names the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_empty(directory: Path, *, but: frozenset[str] = frozenset()) -> None:
    """Raises ValueError if the path holds anything except the names in `but`, or links to a missing directory."""
    if directory.is_symlink() and not directory.exists():
        raise ValueError(f"{directory} is a link to {directory.readlink()}, which is missing: is its disk mounted?")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: give a directory")
    if directory.exists() and any(path.name not in but for path in directory.iterdir()):
        raise ValueError(f"{directory} is not empty: give another directory")


def lock_file(descriptor: int, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks an open file until it is closed; returns False if another process has locked it. Raises OSError if the file
    system has no locks."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(f"the file system of {path} has no locks ({error.strerror}): use a local disk") from None
    return True


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True, mode: int = 0o666) -> Iterator[int]:
    """A descriptor of a file that no other thread of any process has meanwhile; shared, of one that others share.

    Creates the file if it is missing; the umask restricts `mode`.

    Raises:
        OSError: another process holds the lock, unless `wait`; the file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            if not lock_file(descriptor, path, shared=shared, wait=wait):
                raise BlockingIOError(
                    f"{path.parent} is being written by another process: wait for it to end, or give another directory"
                )
            if _is_at(path, descriptor):  # else whoever had it has removed it meanwhile: others lock another file
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is that of a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def directory_lock(directory: Path, *, mode: int = 0o777) -> Iterator[None]:
    """Locks a directory against other callers of `directory_lock`.

    Creates the directory with `mode`, restricted by the umask, if it is missing, and removes it again if it is still
    empty at the end.

    Raises:
        OSError: another process holds the lock.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    make_directory(directory, mode=mode)
    lock = directory / LOCK
    with locked(lock, wait=False, mode=PRIVATE_FILE) as descriptor:  # a file, because NFS cannot lock directories
        try:
            yield
        finally:
            if _is_at(lock, descriptor):  # `atomic_directory` may have replaced the directory, and another locked that
                lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                for path in made:
                    path.rmdir()


@contextlib.contextmanager
def atomic_directory(directory: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yields a temporary directory that replaces `directory` on success, and is removed on failure.

    Args:
        mode: of a new directory; the umask restricts it.

    Raises:
        ValueError: `directory` is not empty, or cannot be replaced.
        OSError: another process writes to `directory`.
    """
    given, directory = directory, directory.resolve()  # replaces the target of a link, not the link
    if directory.is_mount() or directory == Path.cwd():
        raise ValueError(f"{directory} is a mounted disk or the current directory: give a new directory in it")
    require_empty(given, but=frozenset({LOCK}))  # before the target of a link is made, whose disk may be missing
    with directory_lock(directory, mode=mode):
        require_empty(directory, but=frozenset({LOCK}))
        partial = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        partial.mkdir(PRIVATE_DIRECTORY)
        shutil.copymode(directory, partial)
        try:
            yield partial
            (directory / LOCK).unlink()
            partial.rename(directory)
            sync(directory.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
