"""Arguments of commands that read the rows of a run: see `trainer.run.stored_rows`."""

from __future__ import annotations

import argparse

from weightserver import ClientSecurity
from weightserver.common.atomic_files import to_path
from weightserver.common.options import add_options


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run's directory, and where its weight servers are."""
    parser.add_argument("run", type=to_path, help="the run's directory")
    parser.add_argument("--servers", help="host:port,host:port of all weight servers (default: the run's)")
    add_options(parser, ClientSecurity)
