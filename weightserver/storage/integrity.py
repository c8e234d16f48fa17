"""Checks of LMDB's own pages, which have no checksum: a wrong bit could hide rows or end the process.

LMDB itself opens an unchecked file in processes of their own only, which may end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import lmdb.verify

from weightserver.core.errors import DamagedFileError, StorageError
from weightserver.storage.interface import DATABASES

_LARGE_BYTES = 2 << 30
"""Least size of a file that is read ahead of the verifier: some seconds of reads of a disk, one after another."""
_THREADS = 16


def check_pages(data: Path) -> None:
    """Checks the pages of LMDB's trees, the headers of large values and the lists of free pages.

    It reads the file as bytes, because LMDB trusts it, and no more than a sixteenth of it.

    Raises:
        DamagedFileError: something is wrong.
    """
    try:
        with _reading_ahead(data):
            problems = list(map(str, lmdb.verify.verify(str(data), subdir=False)))  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        problems = [str(error)]
    if problems:
        raise _damaged(data, problems)


def check_end(data: Path) -> None:
    """Checks that no value lies beyond the end of a file that lacks its last pages, as it may if they are free.

    To use a missing page ends the process: so another one uses them all.

    Raises:
        DamagedFileError: one does.
        StorageError: the other process ended for another reason, for want of memory perhaps.
    """
    ended = subprocess.run([*_command(data), "values"], capture_output=True, text=True, check=False)
    short = f"ends after {data.stat().st_size} bytes, and its pages later"
    if ended.returncode in (-signal.SIGBUS, -signal.SIGSEGV):
        raise _damaged(data, [f"it {short}"])
    if ended.returncode:
        reason = [f"exit status {ended.returncode}", *ended.stderr.splitlines()][-1]
        raise StorageError(f"{data.parent}: {data.name} {short}: whether they are used could not be checked ({reason})")


def _damaged(data: Path, problems: list[str]) -> DamagedFileError:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return DamagedFileError(
        f"{data.parent}: {data.name} is damaged ({problems[0]}{more}): restore it from a backup", problems
    )


@contextlib.contextmanager
def _reading_ahead(data: Path) -> Iterator[None]:
    """Within the context, another process reads what the verifier does, which waits for each page, many at once."""
    if data.stat().st_size < _LARGE_BYTES:
        yield
        return
    silent = subprocess.DEVNULL
    with subprocess.Popen([*_command(data), "keys"], stdin=subprocess.PIPE, stdout=silent, stderr=silent) as reader:
        try:
            yield
        finally:
            reader.kill()


def _command(data: Path) -> list[str]:
    return [sys.executable, "-m", __name__, str(data)]


# ---- what the other processes do


def _read_values(environment: lmdb.Environment) -> None:
    """Uses every page of every value."""
    databases = [environment.open_db(name.encode(), create=False) for name in DATABASES]
    with environment.begin(buffers=True) as txn:
        for database in databases:
            for _ in txn.cursor(database):
                pass


def _read_keys(environment: lmdb.Environment) -> None:
    """Finds every block, which uses the first page of its value. Ends with the process that waits for it."""
    threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
    blocks = environment.open_db(b"blocks", create=False)

    def numbers(part: range) -> None:
        with environment.begin(buffers=True) as txn, txn.cursor(blocks) as cursor:
            if cursor.set_range(part.start.to_bytes(8, "big")):
                for key in cursor.iternext(values=False):
                    if int.from_bytes(key[:8], "big") >= part.stop:
                        break

    with environment.begin() as txn, txn.cursor(blocks) as cursor:
        end = int.from_bytes(cursor.key()[:8], "big") + 1 if cursor.last() else 0
    ends = [end * i // _THREADS for i in range(_THREADS + 1)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(numbers, map(range, ends[:-1], ends[1:])))


if __name__ == "__main__":
    with lmdb.open(
        os.fsencode(sys.argv[1]),
        subdir=False,
        readonly=True,
        lock=False,
        readahead=False,
        max_dbs=len(DATABASES),
        lib_version=0,
    ) as opened:
        (_read_keys if sys.argv[2] == "keys" else _read_values)(opened)
