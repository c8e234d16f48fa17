"""What every command of the trainer does with its arguments before it begins."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from weightserver.common.logs import asked_format, log_events


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments, by default those of the process, and logs from now on in the format that they ask for."""
    given = sys.argv[1:] if arguments is None else arguments
    log_events(asked_format(given))
    return parser.parse_args(given)


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
