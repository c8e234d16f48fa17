"""Writes docs/first-hour.md: what a new user's first hour looks like, in a terminal of 80 columns.

    make first-hour        # or python -m experiments.first_hour; half an hour on two quiet cores

Clones the repository into a temporary directory and runs every command of `STEPS` there, one after the other, as a
person would type it; the first one makes the clone's own environment. The page shows each command with what it leaves
on the screen, without the temporary directory, this machine's name and the date. A command that ends with an
unexpected status ends this one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.terminal import Terminal
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import to_path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/first-hour.md"
_TIMEOUT_SECONDS = 3600.0
_HEAD = """\
<!-- Written by make first-hour: change experiments/first_hour.py instead. -->

# The first hour

From a fresh clone to an encoder of one's own images: every command, and what it leaves on a terminal of 80 columns.
`make first-hour` ran them, on two cores without a GPU; dates, the directory of the clone and the names of machines are
replaced. The images are 2,527 icons of four of Debian's icon themes, labelled by what they are for, in eight formats
and colour models, two of them broken.
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command and what the page says before it."""

    title: str = ""
    """Begins a section."""
    text: str
    command: str
    interrupt_at: str = ""
    """Ctrl-C is pressed once the screen matches this regular expression."""
    show: str = ""
    """The page also has the last screen with a line that contains this."""
    short: str | None = ""
    """What is appended in a test, which has made the images and the environment before; None leaves the step out."""

    status: int = 0


_PROGRESS = "epoch "
STEPS = (
    Step(
        title="Install",
        text="In the clone; everything goes into `.venv`. Then activate it: `. .venv/bin/activate`.",
        command="make install",
        short=None,
    ),
    Step(
        title="Your own images",
        text="A folder of images to try; use yours instead. Its folders are labels; `train` and `test` are optional:",
        command="python -m experiments.icons --output pictures",
        short=None,
    ),
    Step(
        text="One command trains on them. It prints what it chose and why, and begins. Ctrl-C stops it after a while:",
        command="pic train pictures",
        interrupt_at=r"loss \d",
        status=130,
        show=_PROGRESS,
        short="--steps 400 --batch-size 4 --log-every 1",
    ),
    Step(
        text="Resuming takes all settings from the run:",
        command="pic train --resume --output runs/pictures",
        show=_PROGRESS,
    ),
    Step(
        title="What the run is worth",
        text="One HTML page with curves, results and nearest neighbours:",
        command="pic report runs/pictures",
    ),
    Step(
        text="Another evaluation of the same encoder, a linear classifier on its features:",
        command="pic evaluate linear-cached --run runs/pictures",
    ),
    Step(
        title="Using the encoder",
        text="A vector for every image:",
        command="pic embed runs/pictures pictures/test --output features.npz",
    ),
    Step(
        text="The classifier's rows, one for each image, with the images' paths:",
        command="pic export rows runs/pictures --output rows",
    ),
    Step(
        text="And when something is wrong, one line says what, and what to do:",
        command="pic train pictures --num-negatives 9999",
        status=1,
    ),
)


@dataclass(frozen=True)
class Shown:
    """A command that has run, with what the page shows of it."""

    step: Step
    screen: tuple[str, ...]
    """The last lines of the progress, empty without any."""
    left: tuple[str, ...]
    """What remained visible."""


def run_steps(steps: Sequence[Step], directory: Path, *, is_short: bool = False) -> list[Shown]:
    """Runs the commands in `directory`, in a terminal each, with its .venv first in the path.

    Raises:
        ValueError: a command ended with another status than expected.
    """
    environment = {"PATH": f"{directory}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{directory}/.venv"}
    environment["PIP_QUIET"] = "2"  # its warnings are about this machine's sources of packages
    shown = []
    for step in steps:
        if is_short and step.short is None:
            continue
        command = f"{step.command} {step.short}".strip() if is_short else step.command
        print(f"$ {command}", file=sys.stderr, flush=True)
        terminal = Terminal(["bash", "-c", command], cwd=directory, environment=environment, threads=None)
        status = _run(terminal, step)
        if status != step.status:
            raise ValueError(f"{command!r} ended with status {status}, not {step.status}:\n{terminal.left}")
        screens = [screen for _, screen in terminal.screens] or [()]
        last = next((screen for screen in reversed(screens) if step.show and step.show in "\n".join(screen)), ())
        shown.append(Shown(step, _progress(last, step.show), _trimmed(screens[-1])))
    return shown


def _run(terminal: Terminal, step: Step) -> int:
    pressed: list[bool] = []

    def on_screen(text: str) -> None:
        if step.interrupt_at and not pressed and re.search(step.interrupt_at, text):
            pressed.append(True)
            terminal.interrupt()

    return terminal.run(on_screen, timeout=_TIMEOUT_SECONDS)


def _progress(screen: tuple[str, ...], begins: str) -> tuple[str, ...]:
    """The lines of the progress, which are the last ones of a screen."""
    first = next((number for number, line in enumerate(screen) if begins in line), len(screen))
    return _trimmed(screen[first:])


def _trimmed(lines: Sequence[str]) -> tuple[str, ...]:
    kept = list(lines)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def page(shown: Sequence[Shown], directory: Path) -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for one in shown:
        if one.step.title:
            parts.append(f"## {one.step.title}\n")
        parts.append(f"{one.step.text}\n")
        lines = [f"$ {one.step.command}", *one.left]
        if one.screen:
            lines[1:1] = ["", *one.screen, ""] if one.step.show else []
        parts.append("".join(f"    {line}".rstrip() + "\n" for line in lines))
    return normalised("\n".join(parts), directory)


def normalised(text: str, directory: Path) -> str:
    """The text without what is of this machine and this day."""
    text = text.replace(f"{directory}/", "").replace(str(directory), ".").replace(socket.gethostname(), "localhost")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?Z?", "2026-01-01T12:00:00Z", text)
    return re.sub(r"(127\.0\.0\.1):\d+", r"\1:50051", text)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.first_hour", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=to_path, default=PAGE, help="the page (default docs/first-hour.md)")
    options = parser.parse_args(arguments)
    with exit_on_error("first-hour"), tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "pic-weight-server"
        git = shutil.which("git")
        if git is None:
            raise ValueError("git is not installed: install it")
        os.environ.pop("PYTHONPATH", None)  # the clone uses its own code
        run_steps([Step(text="", command=f"{git} clone -q {ROOT} {clone}")], Path(temporary))
        options.output.write_text(page(run_steps(STEPS, clone), clone))
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
