"""Arguments that every command takes, and how it says that others are wrong."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from weightserver.common.logs import LOG_FORMATS, print_error
from weightserver.common.spelling import did_you_mean


class _Help(argparse.Action):
    """Prints the help without the options of groups that a parser adds, which --help-all lists."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        groups = parser._action_groups[2:]  # after the positional and the common ones
        for action in (action for group in groups for action in group._group_actions):
            action.help = argparse.SUPPRESS
        parser.print_help()
        if groups:
            print(f"\n--help-all lists more options: {', '.join(group.title or '' for group in groups)}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, in one event if the log is JSON. A mistyped option, command or
    choice is answered with the nearest one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help message and exit")
        self.add_argument("--help-all", action="help", help=argparse.SUPPRESS)

    def parse_known_args(  # type: ignore[override]  # one signature for its four overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuses unknown options before missing arguments, which a mistyped option may be."""
        given = sys.argv[1:] if args is None else list(args)
        known = [option for action in self._actions for option in action.option_strings]
        for argument in itertools.takewhile(self._is_own, given):
            name, is_text = argument.partition("=")[0], " " in argument  # to ArgumentParser too
            if name.startswith("--") and not is_text and not any(option.startswith(name) for option in known):
                self.error(f"unknown option {name}: {did_you_mean(name, known, 'see --help')}")
        return super().parse_known_args(given, namespace)

    def _is_own(self, argument: str) -> bool:
        """Whether it comes before a command, which parses what follows, and before "--", which ends the options."""
        return argument != "--" and (self._subparsers is None or argument.startswith("-"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(map(str, action.choices or ()))
        if str(value) not in choices and (hint := did_you_mean(str(value), choices)):
            raise argparse.ArgumentError(action, f"invalid choice {value!r}: {hint}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}")
        sys.exit(2)


class CommandParser(Parser):
    """The arguments of one command, among them --log-format, which `asked_format` reads before they are parsed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="format of the log (default text)")
