"""Evaluates an encoder, or raw pixels for comparison, on labelled images.

    pic evaluate knn --run runs/a
    pic evaluate linear --encoder runs/a/encoder.safetensors --dataset fashion-mnist --data-dir DIR
    torchrun --nproc-per-node 8 -m -- trainer.evaluate fine-tune --encoder moco.safetensors --data-dir DIR
    pic evaluate linear-cached --pixels

Writes evaluation/NAME.json beside the run and prints it as one line; stderr shows progress and a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from trainer.evaluate.protocols import PROTOCOLS, Protocol
from trainer.loading import loading_libraries


def main(
    arguments: list[str] | None = None,
    protocols: Mapping[str, Protocol] = PROTOCOLS,
    program: str = "trainer.evaluate",
) -> int:
    """Runs the command line; returns 0. Exits with 2 and one line on stderr for bad input, 130 for Ctrl-C."""
    with loading_libraries(program):
        from trainer.display import shown, stage
        from trainer.evaluate.command import parse
        from trainer.stopping import exit_on_error
        from weightserver.common.logs import asked_format, log_events, logs_json
    arguments = sys.argv[1:] if arguments is None else arguments
    log_events(asked_format(arguments))
    again = "the same command continues where this one stopped"
    with exit_on_error(program, status=2, after_interrupt=again):
        command = parse(arguments, protocols, program)
        with shown():
            with stage("loading libraries"):
                from rich.console import Console

                from trainer.evaluate.run import run
                from trainer.evaluate.table import print_result
            result = run(command)
        if result is not None:
            if not logs_json():  # the result is on stdout
                print_result(result, Console(stderr=True))
            print(json.dumps(result, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
