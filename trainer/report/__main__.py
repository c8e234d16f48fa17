"""Writes one self-contained HTML page about a run: pic report RUN."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from trainer.command_line import parsed
from trainer.display import shown, stage
from trainer.loading import loading_libraries
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_write, to_path
from weightserver.common.command_line import CommandParser
from weightserver.common.object_store import to_location


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    options = parsed(_parser(), arguments)
    with loading_libraries("trainer report"):
        from trainer.report.rendering import render_report
    output = options.output or options.run / "report.html"
    with exit_on_error("trainer report"):
        with shown(), stage("drawing the page"):
            text = render_report(options.run, data_dir=options.data_dir, bank=options.images)
        atomic_write(output, lambda path: path.write_text(text, "utf-8", "backslashreplace"))
    print(f"wrote {output}")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="pic report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=to_path, help="the run's directory")
    parser.add_argument("--output", type=to_path, help="the file to write (default: RUN/report.html)")
    parser.add_argument("--data-dir", type=to_location, help="folder of the data set (default: the run's)")
    parser.add_argument(
        "--images",
        type=int,
        default=10_000,
        help="number of training images among which to search for neighbours (default: 10000)",
    )
    return parser


if __name__ == "__main__":
    main()
