"""Finds pairs of training images that are nearly the same, by the rows of a run: pic duplicates RUN."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import NoReturn

from trainer.command_line import parsed
from trainer.display import shown, stage
from trainer.loading import loading_libraries
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_write
from weightserver.common.command_line import CommandParser


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr on failure; 2 for invalid arguments."""
    with loading_libraries("trainer duplicates"):
        parser = _parser()
    options = parsed(parser, arguments)
    with loading_libraries("trainer duplicates"):
        from trainer.counting import counting
        from trainer.report.duplicates import FILE, find_duplicates
        from trainer.run.stored_rows import open_stored_rows
    with exit_on_error("trainer duplicates"):
        with shown(), ExitStack() as stack:
            with stage("opening the rows"):
                stored = stack.enter_context(open_stored_rows(options))
            with counting("rows", stored.num_images) as progress:
                found = find_duplicates(
                    stored,
                    options.checkpoint,
                    threshold=options.threshold,
                    neighbours=options.neighbours,
                    most_pairs=options.most_pairs,
                    on_rows=progress.advance,
                )
        path = options.run / FILE
        text = json.dumps(asdict(found)) + "\n"
        atomic_write(path, lambda partial: partial.write_text(text))
    print(f"{found.num_pairs} pairs with a cosine of at least {found.threshold:g}: wrote {path}")
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    from trainer.run.run_arguments import add_run_arguments

    parser = CommandParser(prog="pic duplicates", description=(__doc__ or "").splitlines()[0])
    add_run_arguments(parser)
    parser.add_argument("--checkpoint", help="compare the rows of this checkpoint (default the newest rows)")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.98,
        help="smallest cosine of two rows that makes a pair (default 0.98)",
    )
    parser.add_argument(
        "--neighbours",
        type=int,
        default=8,
        metavar="K",
        help="neighbours of each image to look at (default 8)",
    )
    parser.add_argument(
        "--most-pairs",
        type=int,
        default=10_000,
        metavar="N",
        help="number of pairs to write (default 10000)",
    )
    return parser
