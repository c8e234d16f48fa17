"""Trains an encoder.

    python -m trainer fashion-mnist                                    # starts weight servers of its own
    python -m trainer fashion-mnist --rows dense --epochs 5            # all rows in this process
    torchrun -m trainer fashion-mnist --servers 127.0.0.1:50051,127.0.0.1:50052 --output runs/a

`python -m trainer fashion-mnist --help` lists every setting.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from trainer.config import parse_config
from trainer.distributed import RankLostError
from trainer.loop import train
from trainer.stopping import Stopped
from weightserver import WeightServerError
from weightserver.allocator import keep_large_buffers


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line. Exit status 0; 1 with one line on stderr when it failed; 2 for arguments that are
    none; 128 + the signal's number behind a checkpoint."""
    keep_large_buffers()
    try:
        result = train(parse_config(arguments))
    except Stopped as stopped:
        print(f"trainer: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_status)
    except MemoryError as error:
        print(f"trainer: not enough memory for these settings: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, OSError, RankLostError, WeightServerError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        sys.exit(1)
    if result.is_first:
        print(" ".join(f"{name}={value:g}" for name, value in result.summary.items()))
    sys.exit(0)


if __name__ == "__main__":
    main()
