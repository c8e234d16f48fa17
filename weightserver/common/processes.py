"""Processes: the ends of this one and of those that it started, and what tells this one from others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import Any


def end_at_sigterm() -> None:
    """Lets SIGTERM end this process as PID 1 too, which the kernel otherwise spares, until something else handles it.

    Call it before long imports. A signal that comes before it, while Python starts, is lost: an init has none lost.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def end_process(process: subprocess.Popen[Any], *, seconds: float, stop_signal: int = signal.SIGTERM) -> None:
    """Asks a process to end, and kills it if it still runs after `seconds`. Safe to repeat; its pipes stay open."""
    if process.poll() is None:
        process.send_signal(stop_signal)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


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
