"""Processes: the ends of this one and of those that it started, what tells this one from others, and its memory."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MEMORY_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroup versions 2 and 1; a container sees its own where the machine has those of all processes."""


def end_at_sigterm() -> None:
    """Lets SIGTERM end this process as PID 1 too, which the kernel otherwise spares, until something else handles it.

    Call it before long imports. A signal that comes before it, while Python starts, is lost: an init has none lost.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Ends the process silently, with status 1, where nobody reads its stdout any more, as after `| head`."""
    try:
        try:
            yield
        except SystemExit:
            print(end="", flush=True)
            raise
        print(end="", flush=True)
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(1, 0)
        if not any(event & select.POLLERR for _, event in stdout.poll(0)):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest when it ends
        sys.exit(1)


def end_process(process: subprocess.Popen[Any], *, seconds: float, ask: int = signal.SIGTERM) -> None:
    """Asks a process to end by a signal, and kills it if it still runs after `seconds`. Safe to repeat; its pipes stay
    open."""
    if process.poll() is None:
        process.send_signal(ask)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def usable_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: those of the machine, or its container's limit if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # no such version, or "max"
            sizes.append(int((cgroups / name).read_text()))
    return min(sizes)


def process_name() -> str:
    """This process among those of all machines, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def process_id() -> bytes:
    """Tells this process from all others, also from those of its number on a host of its name: 16 random bytes."""
    return _process_id


def _draw_process_id() -> None:
    global _process_id
    _process_id = os.urandom(16)


_process_id = os.urandom(16)
os.register_at_fork(after_in_child=_draw_process_id)
