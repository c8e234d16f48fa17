"""Ending processes that this one started."""

from __future__ import annotations

import signal
import subprocess
from typing import Any


def end_process(process: subprocess.Popen[Any], *, seconds: float, stop_signal: int = signal.SIGTERM) -> None:
    """Asks a process to end, and kills it if it still runs after `seconds`. Safe to repeat; its pipes stay open."""
    if process.poll() is None:
        process.send_signal(stop_signal)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
