"""A pseudo-terminal of 80 columns: runs a command in it and records every screen that a person would see."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COLUMNS, ROWS = 80, 40
_SEQUENCE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
_REDRAW = re.compile(r"(?=\r\x1b\[(?:2K|1A))")
"""Where the display of a command begins to draw its line or lines again."""
_UNFINISHED = re.compile(r"\r?(?:\x1b(?:\[[?0-9;]*)?)?\Z")


class Screen:
    """What is visible: lines that control sequences and line breaks at the right edge change as in a terminal."""

    def __init__(self) -> None:
        self._lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        position = 0
        while position < len(text):
            if found := _SEQUENCE.match(text, position):
                self._control(found.group())
                position = found.end()
            else:
                self._character(text[position])
                position += 1

    def lines(self) -> tuple[str, ...]:
        return tuple(line.rstrip() for line in self._lines)

    def _character(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character.isprintable():
            if self._column == COLUMNS:
                self._column = 0
                self._down()
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")

    def _control(self, sequence: str) -> None:
        number, kind = int(re.sub(r"\D", "", sequence) or 1), sequence[-1]
        if kind == "A":
            self._row = max(0, self._row - number)
        elif kind == "K":
            self._lines[self._row] = "" if sequence == "\x1b[2K" else self._lines[self._row][: self._column]


class Terminal:
    """Runs `command` in a terminal until it ends; `on_screen` may answer each screen, for example by `interrupt`.

    Args:
        threads: threads of PyTorch and NumPy; None for as many as they choose.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        threads: int | None = 1,
    ):
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        limited = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=cwd,
            env=variables | {"TERM": "xterm"} | limited | (environment or {}),
            start_new_session=True,
        )
        os.close(child)
        self.screens: list[tuple[float, tuple[str, ...]]] = []
        """When the screen changed, and its lines; what it showed before is kept above."""

    def interrupt(self) -> None:
        """Ctrl-C: a signal to all processes of the terminal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def run(self, on_screen: Callable[[str], None] = lambda text: None, *, timeout: float = 240) -> int:
        """Returns the exit status."""
        screen, ends = Screen(), time.monotonic() + timeout
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        try:
            while time.monotonic() < ends:
                ready, _, _ = select.select([self._parent], [], [], 1.0)
                try:
                    content = os.read(self._parent, 1 << 16) if ready else b""
                except OSError:  # closed by the last process
                    return self._process.wait(timeout=30)
                if content:
                    text = rest + decoder.decode(content)
                    cut = _UNFINISHED.search(text)
                    assert cut is not None
                    text, rest = text[: cut.start()], text[cut.start() :]
                    for drawn in filter(None, _REDRAW.split(text)):  # many at once after a pause of this process
                        screen.write(drawn)
                        self.screens.append((time.monotonic(), screen.lines()))
                        on_screen("\n".join(screen.lines()))
            raise TimeoutError("\n".join(screen.lines()))
        finally:
            os.close(self._parent)
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    @property
    def seen(self) -> str:
        """Everything that any screen showed."""
        return "\n".join("\n".join(lines) for _, lines in self.screens)

    @property
    def left(self) -> str:
        """What remains visible."""
        return "\n".join(self.screens[-1][1]) if self.screens else ""
