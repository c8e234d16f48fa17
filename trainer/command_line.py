"""What every command of the trainer does with its arguments before it begins."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TypeVar

from weightserver.common.logs import asked_format, log_events, print_error

Parsed = TypeVar("Parsed")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments, by default those of the process, and logs from now on in the format that they ask for."""
    given = sys.argv[1:] if arguments is None else arguments
    log_events(asked_format(given))
    return parser.parse_args(given)


def parsed_or_exit(parse: Callable[[list[str]], Parsed], arguments: Sequence[str], *, command: str) -> Parsed:
    """Parses by tyro, which draws a box around what it refuses; ends the process with that in one line and status 2.
    Its --help lists every option, as the --help-all of other commands."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return parse(["--help" if argument == "--help-all" else argument for argument in arguments])
    except SystemExit as ended:
        if not ended.code:  # --help
            raise
    inside = [line.strip(" │─") for line in box.getvalue().splitlines() if line[:1] not in ("╭", "╰")]
    print_error(f"{command}: {' '.join(' '.join(inside).partition('For full helptext')[0].split())}")
    sys.exit(2)


def pic() -> str:
    """How to call the command `pic` of this installation in the shell that began this process."""
    beside = Path(sys.executable).with_name("pic")
    if not beside.exists():  # not installed: a checkout on the path
        return f"{shlex.quote(sys.executable)} -m trainer.pic"
    found = shutil.which("pic")
    if found is not None and Path(found).resolve() == beside.resolve():
        return "pic"
    here = os.path.relpath(beside)
    return shlex.quote(str(beside) if here.startswith("..") else here)
