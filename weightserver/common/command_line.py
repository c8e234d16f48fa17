"""Arguments that every command takes, and how it says that others are wrong."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from weightserver.common.logs import LOG_FORMATS, logs_json, print_error


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
    """Says in one event what is wrong with the arguments, if the log is JSON."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, add_help=False)
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help message and exit")
        self.add_argument("--help-all", action="help", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        if logs_json():
            print_error(f"{self.prog}: {message}")
            sys.exit(2)
        super().error(message)


class CommandParser(Parser):
    """The arguments of one command, among them --log-format, which `asked_format` reads before they are parsed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_argument("--log-format", choices=LOG_FORMATS, default="text", help="format of the log (default text)")
