"""The command line: `weightserver COMMAND`.

Each command is a module with two functions, `add_arguments(parser)` and `run(arguments)`; this one only collects them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Collection
from importlib import import_module
from typing import NoReturn

from weightserver.common.command_line import CommandParser, Parser
from weightserver.common.interrupts import interruptible, interruption
from weightserver.common.logs import asked_format, log_events, print_error
from weightserver.common.malloc import keep_large_buffers
from weightserver.common.processes import ends_with_its_reader
from weightserver.common.version import __version__
from weightserver.core.errors import WeightServerError

COMMANDS = {
    "serve": ("weightserver.server.serve", "serve one shard until SIGTERM"),
    "certs": ("weightserver.operations.certificates", "create a CA, certificates and a token for a quick start"),
    "health": ("weightserver.operations.health", "check whether a shard serves (exit status 0) or not (1)"),
    "top": ("weightserver.operations.top", "watch shards in the terminal"),
    "inspect": ("weightserver.operations.inspect", "print what a data directory holds, even while a shard serves it"),
    "verify": ("weightserver.operations.verify", "check all data in a directory that is not being served"),
    "checkpoints": ("weightserver.operations.checkpoints", "list the checkpoints that all shards keep"),
    "rollback": ("weightserver.operations.rollback", "return all rows to a checkpoint and fence off current writers"),
    "release": ("weightserver.operations.release", "delete a checkpoint while training continues"),
    "backup": ("weightserver.operations.backup", "copy a checkpoint of all shards to files while training continues"),
    "restore": ("weightserver.operations.restore", "create one shard's directory from a backup"),
    "reshard": ("weightserver.operations.reshard", "fill new shards, in another number or with blocks of another size"),
    "plan": ("weightserver.operations.plan", "estimate the disk, memory and bandwidth that a run needs"),
    "extend": ("weightserver.operations.extend", "add rows to the table while training continues"),
    "export": ("weightserver.operations.export", "write current rows, or those of a checkpoint, to files"),
    "drop": ("weightserver.operations.drop", "delete the table and all its rows"),
}
"""Name to module and help."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs one command.

    Exits with status 0; with 1 and a line on stderr if the command failed; with 2 for bad arguments; with 130 for
    Ctrl-C.
    """
    _open_standard_streams()
    # gRPC reads this when it is imported. It would log failed handshakes, which the client's errors explain better.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    argv = sys.argv[1:] if argv is None else argv
    name = "weightserver"
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)  # of another service; prometheus_client would write there
    try:
        log_events(asked_format(argv))
        with interruptible(), ends_with_its_reader():
            arguments = _parser(COMMANDS.keys() & argv).parse_args(argv)
            name = f"weightserver {arguments.command}"
            keep_large_buffers()
            arguments.run(arguments)
    except (WeightServerError, ValueError, OSError) as error:
        print_error(f"{name}: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        print_error(f"{name}: {interruption()}")
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


def _parser(complete: Collection[str] = COMMANDS.keys()) -> argparse.ArgumentParser:
    """Parses every command's name, and the arguments of those in `complete`: importing all of them takes 0.2 s."""
    parser = Parser(prog="weightserver", description="Serves and manages the rows of a classifier.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in complete:
            module = import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _open_standard_streams() -> None:
    """Opens closed standard streams: the next file opened, such as data.mdb, would otherwise receive error messages."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
