"""What every command of the trainer does with its arguments before it begins."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeVar

from trainer.settings import flag
from weightserver.common.atomic_files import to_path
from weightserver.common.logs import asked_format, log_events, logs_json, print_error
from weightserver.common.object_store import to_location
from weightserver.common.processes import ends_with_its_reader

Parsed = TypeVar("Parsed")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments, by default those of the process, and logs from now on in the format that they ask for."""
    given = sys.argv[1:] if arguments is None else arguments
    log_events(asked_format(given))
    with ends_with_its_reader():  # of --help
        return parser.parse_args(given)


def parsed_or_exit(
    parse: Callable[[list[str]], Parsed], arguments: Sequence[str], settings: Iterable[Field[Any]], *, command: str
) -> Parsed:
    """Parses by tyro, which prints what it refuses, in a JSON log as one event, and ends the process with status 2.
    Its --help lists every option, as the --help-all of other commands.

    Values of the `settings` that are paths are refused as by `to_path`, that of --data-dir as by `to_location`.
    """
    paths = {flag(setting.name) for setting in settings if "Path" in str(setting.type)}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        name, text = name.replace("_", "-"), value if is_assigned else following
        if name in paths and text is not None:
            try:
                (to_location if name == "--data-dir" else to_path)(text)
            except argparse.ArgumentTypeError as error:
                print_error(f"{command}: {name}: {error}")
                sys.exit(2)
    said = io.StringIO()
    try:
        with redirect_stderr(said) if logs_json() else nullcontext():
            return parse(["--help" if argument == "--help-all" else argument for argument in arguments])
    except SystemExit:
        if said.getvalue():
            print_error(f"{command}: {said.getvalue()}")
        raise


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
