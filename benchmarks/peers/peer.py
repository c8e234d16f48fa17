"""What every peer is: rows that are filled, fetched and written; and what peers have in common."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np

from weightserver.common.installing import install_command
from weightserver.common.processes import end_process
from weightserver.core.arrays import Float32Array, Int64Array

DIM = 128
ROW_BYTES = 4 * DIM
CORRECTION, DURABILITY, EXACTLY_ONCE = "correction", "durability", "exactly once"
ONE_PROCESS, ONE_MACHINE = "more than one process", "clients on other machines"
_PIECE_ROWS = 1 << 14
_START_SECONDS, _STOP_SECONDS = 60.0, 60.0
_PR_SET_PDEATHSIG = 1


class PeerError(Exception):
    """A peer does not start; says in one line why."""


class Peer(ABC):
    """Rows 0 … num_rows − 1 of DIM float32 values in one kind of store; one client uses it, from one thread.

    Args:
        directory: an empty folder for its data, deleted by the caller.
        num_rows: the number of rows, all written by `fill`.
    """

    key: ClassVar[str]
    """Its name on the command line and in results."""
    name: ClassVar[str]
    """Its name in tables."""
    durable: ClassVar[bool]
    """Whether a write that has returned survives the machine's crash."""
    does_not: ClassVar[tuple[str, ...]]
    """What it does not do of what our shards do."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self.directory, self.num_rows = directory, num_rows

    @classmethod
    def missing(cls) -> str | None:
        """What has to be installed first, or None."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Starts the server, if it has one, and connects.

        Raises:
            PeerError: it does not start.
        """

    @abstractmethod
    def fill(self) -> None:
        """Writes all of `made_rows`."""

    @abstractmethod
    def fetch(self, ids: Int64Array) -> Float32Array:
        """The rows of `ids`, which are distinct and sorted: float32 [len(ids), DIM]."""

    @abstractmethod
    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        """Replaces rows (our shards: adds these gradients to them); returns when they are stored."""

    def server_pid(self) -> int | None:
        """The process that holds the rows; None if this one does."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Disconnects and ends the server, even if `start` failed halfway."""


def made_rows(num_rows: int) -> Iterator[tuple[Int64Array, Float32Array]]:
    """All rows, in pieces: ids and values, the same in every run."""
    for first in range(0, num_rows, _PIECE_ROWS):
        ids = np.arange(first, min(first + _PIECE_ROWS, num_rows), dtype=np.int64)
        yield ids, np.random.default_rng([1, first]).standard_normal((len(ids), DIM), np.float32)


def keys_of(ids: Int64Array) -> list[bytes]:
    """Keys whose order is that of the ids: 8 bytes each, big-endian."""
    return ids.astype(">i8").view("V8").tolist()


def values_of(rows: Float32Array) -> list[bytes]:
    """The bytes of each row."""
    return np.ascontiguousarray(rows).view(f"V{ROW_BYTES}").ravel().tolist()


def rows_of(values: list[bytes]) -> Float32Array:
    """The rows whose bytes these are."""
    return np.frombuffer(b"".join(values), np.float32).reshape(-1, DIM)


def missing_of(*, modules: Sequence[str] = (), program: str | None = None, package: str = "") -> str | None:
    """Names what lacks of Python's modules (of the extra `peers`) and of Debian's `package`, which has `program`."""
    lacking = [module for module in modules if find_spec(module) is None]
    if lacking:
        return f"no module {' or '.join(lacking)} ({install_command('peers')})"
    return f"no program {program} (apt-get install {package})" if program and not shutil.which(program) else None


def free_port() -> int:
    """A port on loopback that is free now; another process may take it."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Server:
    """A server process. It ends with the process that started it.

    Args:
        log: file for all that it prints.
        user: the user and group that it runs as, by default this process's.
        stop_signal: what ends it.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, user: str | None = None, stop_signal: int = signal.SIGTERM
    ) -> None:
        self._log, self._stop_signal = log, stop_signal
        with log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=log.parent,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends its servers
                preexec_fn=partial(_end_with_parent, ctypes.CDLL(None), stop_signal),
                user=user,
                group=user,
                extra_groups=[] if user else None,
            )

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready` returns true.

        Raises:
            PeerError: the process ended before, or it took too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = self._log.read_text().strip().rpartition("\n")[2]
                raise PeerError(f"it did not start: {last or 'its log is empty'}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Safe to repeat."""
        end_process(self.process, seconds=_STOP_SECONDS, stop_signal=self._stop_signal)


class ServedPeer(Peer):
    """A peer whose rows are in a server process of its own."""

    _server: Server | None = None

    def server_pid(self) -> int | None:
        assert self._server is not None
        return self._server.process.pid

    @abstractmethod
    def disconnect(self) -> None:
        """Closes the connection to the server, if there is one."""

    def stop(self) -> None:
        self.disconnect()
        if self._server is not None:
            self._server.stop()


def _end_with_parent(libc: ctypes.CDLL, stop_signal: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, stop_signal)
