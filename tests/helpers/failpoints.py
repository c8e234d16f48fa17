"""A shard that dies at a chosen point of a chosen commit: python -m tests.helpers.failpoints serve ...

`DyingCluster.arm` leaves the point in a file next to the shard's data directory, for its next start only.

    before     LMDB knows all of the transaction's pages, none is written
    writing    some are written
    written    all are, but neither synced nor made to count by the meta page, which comes last
    after      the commit is durable, but not acknowledged

At "slow" it lives, and its disk takes a minute for the commit, which has begun once there is a file shard-N.slow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from weightserver.cli import main
from weightserver.local_cluster import LocalCluster
from weightserver.server import process as server
from weightserver.storage import lmdb_storage as storage
from weightserver.storage.interface import Transaction

POINTS = ("before", "writing", "written", "after")
DEATHS = {-signal.SIGKILL, -signal.SIGSYS}


class DyingCluster(LocalCluster):
    """A LocalCluster whose shards die at chosen points."""

    _program: ClassVar[list[str]] = [sys.executable, "-m", "tests.helpers.failpoints"]

    def arm(self, shard: int, point: str, commit: int) -> None:
        """Makes the shard die in that commit, counted from its next start."""
        (self.directory / f"shard-{shard}.failpoint").write_text(f"{point} {commit}")


def _install(point: str, commit: int) -> None:
    count = 0

    class Dying(storage.LmdbStorage):
        @contextlib.contextmanager
        def write(self) -> Iterator[Transaction]:
            nonlocal count
            count += 1
            with super().write() as txn:
                yield txn
                if count == commit and point == "slow":
                    self.directory.with_suffix(".slow").touch()
                    time.sleep(60)
                if count == commit and point == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if count == commit and point in ("writing", "written"):
                    half = (self.directory / "data.mdb").stat().st_size // 2
                    _die_at_the_sync(writes_from=half if point == "writing" else None)
            if count == commit and point == "after":
                os.kill(os.getpid(), signal.SIGKILL)

    server.LmdbStorage = Dying  # type: ignore[attr-defined]


_SYSTEM_CALLS = {
    # fdatasync; pwrite64 and pwritev with their offset as the fourth argument; lseek before a writev, as the second
    "x86_64": (75, {18: 3, 296: 3, 8: 1}),
    "aarch64": (83, {68: 3, 70: 3, 62: 1}),
}


def _die_at_the_sync(writes_from: int | None) -> None:
    """The kernel kills the process when this thread syncs a file, or writes at an offset of `writes_from` or more.

    LMDB writes a transaction's pages in the order of their offsets, syncs, and writes the meta page.
    """
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # of classic BPF
    kill, allow = 0x80000000, 0x7FFF0000
    sync, writes = _SYSTEM_CALLS[platform.machine()]
    program = [(load, 0, 0, 0), (equal, 0, 1, sync), (answer, 0, 0, kill)]
    for number, argument in writes.items() if writes_from is not None else ():
        program += [
            (equal, 0, 4, number),
            (load, 0, 0, 16 + 8 * argument),  # its lower half: the files are small
            (at_least, 0, 1, writes_from or 0),
            (answer, 0, 0, kill),
            (answer, 0, 0, allow),
        ]
    program.append((answer, 0, 0, allow))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filters = ctypes.create_string_buffer(code)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(filters)))
    no_new_privileges, set_seccomp, with_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, None, 0, 0) or libc.prctl(
        set_seccomp, with_filter, ctypes.addressof(header), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel takes no seccomp filter")


if __name__ == "__main__":
    armed = Path(sys.argv[sys.argv.index("--data-dir") + 1]).with_suffix(".failpoint")
    if armed.exists():
        chosen, number = armed.read_text().split()
        armed.unlink()
        _install(chosen, int(number))
    main()
