"""Starts ranks as torchrun does, with its options, and ends without its traceback.

    python -m trainer.torchrun --nproc-per-node 2 -m trainer fashion-mnist --output runs/a

Torchrun ends in a traceback of its own code whenever a rank fails and at each Ctrl-C, after the one line of the ranks
that says what happened. This command leaves only that line, names a rank that was killed and could say nothing, and
exits with the status of the rank that failed first.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import NoReturn

from trainer.loading import loading_libraries
from weightserver.common.logs import print_error


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs torchrun's command line; exits with 0, 128 + the number of a signal, or the status of a failed rank."""
    with loading_libraries("trainer.torchrun"):
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run
    logging.disable(logging.ERROR)  # of torchrun, about ranks that it stops
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:  # it said why
            sys.exit(failure.exitcode)
        print_error(f"trainer.torchrun: rank {rank} was killed by {signal.Signals(-failure.exitcode).name}")
        sys.exit(128 - failure.exitcode)
    except (ValueError, OSError) as error:
        print_error(f"trainer.torchrun: {error}")
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
