"""One process for each peer's client, so that time, memory and processor time are that peer's alone."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import CORRECTION, DIM, Peer, PeerError, made_rows
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.arrays import Int64Array

OPERATIONS = ("fetch", "write", "mixed")
"""Mixed: a fetch, and then a write of the same rows."""
PATTERNS = ("contiguous", "half of a window", "scattered")
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Case:
    """What is timed: an operation on `num_rows` rows."""

    operation: str
    pattern: str
    num_rows: int

    def __str__(self) -> str:
        operation = {"mixed": "fetch and write"}.get(self.operation, self.operation)
        return f"{operation}, {self.num_rows:,} rows, {self.pattern}"

    def ids(self, table_rows: int, number: int) -> Int64Array:
        """The rows of call `number`, sorted: other rows in each call, the same for every peer."""
        generator = np.random.default_rng([PATTERNS.index(self.pattern), self.num_rows, number])
        if self.pattern == "scattered":
            return np.sort(generator.choice(table_rows, self.num_rows, replace=False))
        span = self.num_rows if self.pattern == "contiguous" else 2 * self.num_rows
        first = number * span % (table_rows - span + 1)
        if self.pattern == "contiguous":
            return np.arange(first, first + span, dtype=np.int64)
        return first + np.sort(generator.choice(span, self.num_rows, replace=False))


def _work(connection: Connection, peer_class: type[Peer], directory: Path, num_rows: int, most_rows: int) -> None:
    """Answers "start", "fill", "check", "read" and (case, number of the call) until the other side is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which then closes its side
    keep_large_buffers()
    peer = peer_class(directory, num_rows)
    values = np.random.default_rng(3).standard_normal((most_rows, DIM), np.float32)
    calls: dict[str, Callable[[], object]] = {
        "start": peer.start,
        "fill": peer.fill,
        "check": partial(_check, peer),
        "read": partial(_read, peer),
    }
    try:
        with suppress(EOFError):
            while True:
                asked = connection.recv()
                if isinstance(asked, str):
                    call = calls[asked]
                else:
                    case, number = asked
                    call = partial(_perform, peer, case.operation, case.ids(num_rows, number), values[: case.num_rows])
                started = time.perf_counter()
                try:
                    call()
                except PeerError as error:
                    connection.send(str(error))
                    continue
                seconds = time.perf_counter() - started
                connection.send((seconds, peer.server_pid() if asked == "start" else None))
    finally:
        peer.stop()


def _check(peer: Peer) -> None:
    """Checks that rows come back as they were filled and written, unless they are corrected."""
    ids, rows = next(made_rows(peer.num_rows))
    for written in (rows, -rows):
        if written is not rows:
            peer.write(ids, written)
        found = peer.fetch(ids)
        same = np.array_equal(found, written)
        if found.shape != rows.shape or same != (CORRECTION in peer.does_not) or not np.isfinite(found).all():
            raise PeerError("it returns other rows than were written")


def _read(peer: Peer) -> None:
    for ids, _ in made_rows(peer.num_rows):
        peer.fetch(ids)


def _perform(peer: Peer, operation: str, ids: Int64Array, rows: Any) -> None:
    if operation != "write":
        peer.fetch(ids)
    if operation != "fetch":
        peer.write(ids, rows)


class Worker:
    """The process of one peer's client, and its measurements.

    Args:
        most_rows: the largest number of rows that a case writes.
    """

    def __init__(self, peer_class: type[Peer], directory: Path, num_rows: int, most_rows: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.peer = peer_class
        self._connection, theirs = context.Pipe()
        directory.mkdir(mode=0o755)
        self._process = context.Process(target=_work, args=(theirs, peer_class, directory, num_rows, most_rows))
        self._process.start()
        theirs.close()
        self._server: int | None = None
        self._client_bytes_before = self.server_bytes = self.client_bytes = 0

    def start(self) -> None:
        """Starts the peer.

        Raises:
            PeerError: it does not start.
        """
        _, self._server = self._call("start")
        self._client_bytes_before, self.client_bytes = self._client_memory(), 0

    def fill(self) -> float:
        """Fills the table; returns the seconds."""
        return self._call("fill")[0]

    def check(self) -> None:
        """Checks what the peer returns.

        Raises:
            PeerError: other rows than were written.
        """
        self._call("check")

    def read(self) -> None:
        """Fetches every row once: no case is the first to touch its pages."""
        self._call("read")

    def perform(self, case: Case, number: int) -> float:
        """Makes one call; returns its seconds."""
        return self._call((case, number))[0]

    def _call(self, asked: object) -> tuple[float, int | None]:
        self._connection.send(asked)
        try:
            while not self._connection.poll(_SAMPLE_SECONDS):
                self._sample()
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise PeerError("its process ended; the traceback is above") from None
        self._sample()
        if isinstance(answer, str):
            raise PeerError(answer)
        return answer

    # ---- memory and processor time

    def _client_memory(self) -> int:
        return _memory(self._process.pid or 0)[0]

    def _sample(self) -> None:
        """Keeps the largest memory of the server, and the largest growth of the client since it started."""
        if self._server is not None:
            memory = [_memory(pid) for pid in _family(self._server)]
            shared = max((shared for _, shared in memory), default=0)  # the same memory in all of them
            self.server_bytes = max(self.server_bytes, sum(own for own, _ in memory) + shared)
        self.client_bytes = max(self.client_bytes, self._client_memory() - self._client_bytes_before)

    def processor_seconds(self) -> dict[int, float]:
        """Processor time of client and server so far, by process."""
        seconds = {}
        for pid in [self._process.pid or 0, *(_family(self._server) if self._server else [])]:
            with suppress(OSError):  # it has ended
                seconds[pid] = time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
        return seconds

    def close(self) -> None:
        """Ends the peer. Safe to repeat."""
        self._connection.close()
        self._process.join()


def _family(pid: int) -> list[int]:
    """A process and the children of its first thread."""
    with suppress(OSError):
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return [pid]


def _memory(pid: int) -> tuple[int, int]:
    """A process's own resident memory and the shared memory that it maps, in bytes; without pages of files."""
    with suppress(OSError):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if "RssAnon" in fields:
            return int(fields["RssAnon"].split()[0]) << 10, int(fields["RssShmem"].split()[0]) << 10
    return 0, 0
