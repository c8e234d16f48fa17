"""A second program that runs beside this one, for as long as this one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from weightserver.common.processes import end_process

_STOP_SECONDS = 60.0
"""Time that the program has for its last checkpoint before it is killed."""


class Companion:
    """Runs a Python module in a process of its own, which Ctrl-C in this one's terminal does not reach.

    A context manager. On leaving it, the process is told to stop by SIGTERM, once, and awaited. If this process dies,
    the other sees the end of its stdin: see `stop_with_parent`.

    Args:
        arguments: the module and its arguments.
        log: the file that its output is appended to.
        environment: variables to set for it.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", *arguments]
        self._log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        end_process(process, seconds=_STOP_SECONDS)
        process.communicate()  # closes stdin

    def start(self) -> None:
        """Starts the process, unless it was started before."""
        if self._process is not None:
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def failure(self) -> str:
        """Waits for the end of the process; returns the last line of its log if it failed, otherwise nothing."""
        assert self._process is not None, "start it first"
        if (status := self._process.wait()) == 0:
            return ""
        last = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        return last or f"it ended with status {status}"


def stop_with_parent() -> None:
    """Stops this process as SIGTERM does, once its stdin ends: when the process that started it has died."""

    def follow() -> None:
        while os.read(0, 1 << 10):  # unbuffered: sys.stdin could not be closed while this waits
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="parent", daemon=True).start()
