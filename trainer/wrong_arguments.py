"""Finds all options that a parser refuses, which by itself ends with the first and says it in a drawn box."""

from __future__ import annotations

import difflib
import io
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeVar

from weightserver.common.logs import logs_json, print_error

Parsed = TypeVar("Parsed")
Parse = Callable[[list[str]], Parsed]
"""Parses options; raises SystemExit if it refuses one."""


def without_refused(
    parse: Parse[object], arguments: Sequence[str], flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """The options that the parser accepts, and a line for each that it refuses, tried one by one.

    Args:
        flags: all that there are, to name the nearest one to a mistyped one.
    """
    if _accepts(parse, arguments):
        return list(arguments), []
    left, problems = list[str](), list[str]()
    for option in _options(arguments):
        if _accepts(parse, option):
            left += option
        else:
            problems.append(f"{shlex.join(option)} is not understood: {_hint(option[0], flags)}")
    return left, problems


def parsed_or_exit(
    parse: Parse[Parsed], arguments: Sequence[str], *, command: str, flags: Collection[str] = ()
) -> Parsed:
    """Parses; if the log is JSON, an event says which options are wrong, instead of the parser's box."""
    if not logs_json():
        return parse(list(arguments))
    with redirect_stderr(io.StringIO()):
        try:
            return parse(list(arguments))
        except SystemExit as ended:
            status = ended.code
    if status:
        _, problems = without_refused(parse, arguments, flags)
        print_error(f"{command}: {'; '.join(problems) or 'wrong arguments: see --help'}")
    sys.exit(status)


def _hint(option: str, flags: Collection[str]) -> str:
    name = option.partition("=")[0].replace("_", "-")
    near = [] if name in flags else difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else "--help lists the options and their values"


def _options(arguments: Sequence[str]) -> list[list[str]]:
    """Each option with its values; what precedes the first one by itself."""
    found = list[list[str]]()
    for argument in arguments:
        if argument.startswith("--") or not found:
            found.append([])
        found[-1].append(argument)
    return found


def _accepts(parse: Parse[object], options: Sequence[str]) -> bool:
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        try:
            parse(list(options))
        except SystemExit as ended:
            return not ended.code
    return True
