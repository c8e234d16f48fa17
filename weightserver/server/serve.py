"""The command `weightserver serve`."""

from __future__ import annotations

import argparse

from weightserver.common.options import add_options, given_options
from weightserver.server.config import ServerConfig
from weightserver.server.process import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ServerConfig)


def run(arguments: argparse.Namespace) -> None:
    serve(given_options(arguments, ServerConfig))
