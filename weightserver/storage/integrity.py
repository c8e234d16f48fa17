"""Checks of LMDB's own pages, which have no checksum: a wrong bit could hide rows or end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb
import lmdb.verify

from weightserver.core.errors import DamagedFileError
from weightserver.storage.interface import DATABASES


def check_pages(data: Path) -> None:
    """Checks the pages of LMDB's trees, the headers of large values and the lists of free pages.

    It reads the file as bytes, because LMDB trusts it, and no more than a sixteenth of it.

    Raises:
        DamagedFileError: something is wrong.
    """
    try:
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
    """
    if subprocess.run([sys.executable, "-m", __name__, str(data)], capture_output=True, check=False).returncode:
        raise _damaged(data, [f"it ends after {data.stat().st_size} bytes, and its pages later"])


def _damaged(data: Path, problems: list[str]) -> DamagedFileError:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return DamagedFileError(
        f"{data.parent}: {data.name} is damaged ({problems[0]}{more}): restore it from a backup", problems
    )


def _read_everything(data: Path) -> None:
    with lmdb.open(str(data), subdir=False, readonly=True, lock=False, max_dbs=len(DATABASES), lib_version=0) as opened:
        databases = [opened.open_db(name.encode(), create=False) for name in DATABASES]
        with opened.begin(buffers=True) as txn:
            for database in databases:
                for _ in txn.cursor(database):
                    pass


if __name__ == "__main__":
    _read_everything(Path(sys.argv[1]))
