"""Checks of LMDB's own pages, which have no checksum: a wrong bit could hide rows or end the process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lmdb.verify

from weightserver.core.errors import StorageError
from weightserver.storage.directory import OwnerLock, data_file, require_data, translated


class _Verifier(lmdb.verify._Verifier):
    """LMDB's verifier, which also notices if the file's first two pages are not of consecutive transactions.

    LMDB takes the page with the higher number: by a damaged number it would serve an older transaction.
    """

    def load_metas(self) -> None:
        super().load_metas()  # type: ignore[no-untyped-call]
        numbers = [self._read_meta(page, self.psize).txnid for page in range(2)]  # type: ignore[no-untyped-call]
        if abs(numbers[0] - numbers[1]) > 1:
            self.err(f"the first pages are of transactions {numbers[0]} and {numbers[1]}")  # type: ignore[no-untyped-call]


class _TreeVerifier(_Verifier):
    """Reads the pages of all trees, a thousandth of the file, and skips those of large values."""

    def _bigdata(
        self, ctx: dict[str, Any], pgno: int, i: int, buf: bytes, doff: int, dsize: int, want_bytes: bool
    ) -> bytes | None:
        if ctx["is_free"]:
            arguments = (ctx, pgno, i, buf, doff, dsize, want_bytes)
            return super()._bigdata(*arguments)  # type: ignore[no-untyped-call, no-any-return]
        num_pages = (self.hdrsz - 1 + dsize) // self.psize + 1
        ctx["overflow"] += num_pages
        end = (int.from_bytes(buf[doff : doff + 8], sys.byteorder) + num_pages) * self.psize
        if end > self.filesize:  # reading them would kill the process; free pages may lie there
            self.err(f"it has {self.filesize} bytes, its pages take {end}")  # type: ignore[no-untyped-call]
        return None

    def _check_cover(self) -> None:
        """Skips the check that every page is used once or free: pages of large values were not read."""


def structural_problems(directory: Path) -> list[str]:
    """Checks all of LMDB's own pages, read as bytes, because a damaged file cannot be trusted; returns what is wrong.

    Raises:
        StorageError: another process serves the directory, or it holds no data.
    """
    with translated(directory):
        require_data(directory)
        lock = OwnerLock(directory, readonly=True)
        try:
            return _problems(directory, _Verifier)
        finally:
            lock.release()


def check_integrity(directory: Path) -> None:
    """Raises StorageError if LMDB's own pages are damaged, another process serves the directory, or it has no data."""
    if problems := structural_problems(directory):
        raise _damage(directory, problems)


def check_trees(directory: Path) -> None:
    """Raises StorageError if the pages of the trees are damaged; the caller has locked the directory."""
    if problems := _problems(directory, _TreeVerifier):
        raise _damage(directory, problems)


def _problems(directory: Path, verifier: type[_Verifier]) -> list[str]:
    data = data_file(directory)
    try:
        with data.open("rb") as file:
            return [str(problem) for problem in verifier(file, data.stat().st_size).verify()]  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        return [str(error)]


def _damage(directory: Path, problems: list[str]) -> StorageError:
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return StorageError(f"{directory}: data.mdb is damaged ({problems[0]}{more}): restore it from a backup")
