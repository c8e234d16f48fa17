"""Arguments that every command takes, and how it says that others are wrong."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from weightserver.common.logs import LOG_FORMATS, logs_json, print_error


class Parser(argparse.ArgumentParser):
    """Says in one event what is wrong with the arguments, if the log is JSON."""

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
