"""Finds all arguments that a parser refuses, which by itself ends with the first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

_UNKNOWN = "Unrecognized options: "


class WrongArgumentsError(ValueError):
    """What tyro says about arguments that it cannot parse."""


def raise_wrong(said: str) -> NoReturn:
    raise WrongArgumentsError(said)


def without_wrong(parse: Callable[[list[str]], object], arguments: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Parses until nothing is refused: the arguments that are left, and a line for each refusal.

    None are left if it is not clear which arguments a refusal is about.

    Args:
        parse: raises WrongArgumentsError if it refuses arguments.
    """
    left, problems = list(arguments), list[str]()
    while True:
        try:
            parse(left)
        except WrongArgumentsError as error:
            problems.append(str(error))
            fewer = _without(left, str(error))
            if len(fewer) == len(left):
                return None, problems
            left = fewer
        else:
            return left, problems


def _without(arguments: list[str], said: str) -> list[str]:
    if not said.startswith(_UNKNOWN):
        return _without_option(arguments, (re.findall(r"--[\w.-]+", said) or [""])[0])
    unknown = said.removeprefix(_UNKNOWN).split(", ")
    for flag, wrong in itertools.pairwise(["", *unknown]):
        if wrong.startswith("--"):
            arguments = _without_option(arguments, wrong.partition("=")[0])
        elif not flag.startswith("--"):  # neither the value of an unknown option, which is gone, nor of a known one
            before = ["", *arguments]
            stray = [at for at, one in enumerate(arguments) if one == wrong and not before[at].startswith("--")]
            arguments = [one for at, one in enumerate(arguments) if at not in stray[:1]]
    return arguments


def _without_option(arguments: list[str], flag: str) -> list[str]:
    """Leaves out an option with its values."""
    left, takes_values = [], False
    for argument in arguments:
        if argument.startswith("--"):
            name, has_value, _ = argument.partition("=")
            is_wrong = name.replace("_", "-") == flag.replace("_", "-")
            takes_values = is_wrong and not has_value
        else:
            is_wrong = takes_values
        if not is_wrong:
            left.append(argument)
    return left
