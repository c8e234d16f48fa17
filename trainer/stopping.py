"""Early ends of a run: by a signal, without losing a step, or by an error, in one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch

from trainer.distributed import RankLostError
from weightserver import WeightServerError
from weightserver.common.logs import print_error


class Interrupted(Exception):
    """A signal ended the run, after its checkpoint was saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in the list that it yields; a second signal ends the process as usual."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield received
        return

    def note(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_error(command: str) -> Iterator[None]:
    """Ends the process on an error inside: one line on stderr, exit status 1, or 128 + the number of a signal."""
    try:
        yield
    except Interrupted as stopped:
        print_error(f"{command}: {stopped}")
        _exit(stopped.exit_status)
    except MemoryError as error:
        print_error(f"{command}: not enough memory for these settings: {error}")
        _exit(1)
    except torch.OutOfMemoryError as error:
        print_error(
            f"{command}: the GPU's memory is too small for these settings: give a lower --batch-size, a higher "
            f"--accumulate, fewer --num-negatives or --precision bfloat16 ({'. '.join(str(error).split('. ')[:2])})"
        )
        _exit(1)
    except (ValueError, OSError, RankLostError, WeightServerError) as error:
        print_error(f"{command}: {error}")
        _exit(1)


def _exit(status: int) -> NoReturn:
    """Ends the process; if it is one of several ranks, immediately: operations of NCCL and threads may never end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
