"""Readers of other processes: while one keeps an old snapshot, pages that later writes free are not reused."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass

import lmdb


@dataclass(frozen=True)
class OldReader:
    """The oldest snapshot that another process keeps."""

    pid: int = 0
    """0 if there is none; in its own namespace, as of another container."""
    age_seconds: float = 0.0
    """Since it was first seen."""
    held_bytes: int = 0
    """About as many bytes of free pages wait for its end."""


class Readers:
    """Looks at LMDB's table of readers, and remembers since when each is there. Thread-safe.

    A snapshot holds what was freed since it was taken: no more than is free now, and about as much as was written
    since, or as what is free has grown.
    """

    def __init__(self, environment: lmdb.Environment) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._seen: dict[tuple[int, int], tuple[float, int, int]] = {}
        """Process and transaction to when they were first seen, what was free then, and what had been written."""

    def oldest(self, free: int, written: int) -> OldReader:
        """The oldest of another process.

        Args:
            free: bytes of pages that hold nothing.
            written: bytes of blocks that were written, ever more.
        """
        others = {known for known in _snapshots(self._environment) if known[0] != os.getpid()}
        now, newest = time.monotonic(), self._environment.info()["last_txnid"]
        with self._lock:
            self._seen = {known: self._seen.get(known, (now, free, written)) for known in others}
            if not others:
                return OldReader()
            pid, number = min(others, key=lambda known: known[1])
            since, free_then, written_then = self._seen[pid, number]
        held = min(free, max(written - written_then, free - free_then)) if number < newest else 0
        return OldReader(pid, now - since, held)


def _snapshots(environment: lmdb.Environment) -> set[tuple[int, int]]:
    """The process and the transaction of every snapshot.

    LMDB prints a heading and then a line for each reader: its process, its thread in hexadecimal and its transaction,
    which is "-" without a snapshot.
    """
    lines = re.findall(r"^ *(\d+) +[0-9a-f]+ +(\d+)$", environment.readers(), re.MULTILINE)
    return {(int(pid), int(number)) for pid, number in lines}
