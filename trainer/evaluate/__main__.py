"""Evaluates an encoder, or raw pixels for comparison, on labelled images.

    python -m trainer.evaluate knn --run runs/a
    python -m trainer.evaluate linear --encoder runs/a/encoder.safetensors --dataset fashion-mnist --data-dir DIR
    torchrun --nproc-per-node 8 -m -- trainer.evaluate fine-tune --model resnet50 --weights moco.pth --data-dir DIR
    python -m trainer.evaluate linear-cached --pixels

Writes evaluation/NAME.json beside the run and prints it as one line; stderr shows progress and a table.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from trainer.distributed import RankLostError
from trainer.evaluate.command import parse, run
from trainer.evaluate.evaluation import print_result
from weightserver.common.logs import print_error


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 with one line on stderr for bad input, 130 for Ctrl-C."""
    try:
        result = run(parse(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError, RankLostError) as error:
        print_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_error("interrupted: the same command continues where this one stopped")
        return 130
    if result is not None:
        print_result(result, Console(stderr=True))
        print(json.dumps(result, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
