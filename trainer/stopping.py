"""Early ends of a command: by a signal, without losing a step, or by an error, in one line."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from weightserver import WeightServerError
from weightserver.common.interrupts import interruptible, interruption
from weightserver.common.logs import print_error
from weightserver.common.object_store import end_soon
from weightserver.common.processes import ends_with_its_reader

_SAME_SIGNAL_SECONDS = 1.0
"""torchrun, which a terminal's Ctrl-C reaches too, sends it to its ranks once more, usually within this time."""


class Interrupted(Exception):
    """A signal ended the run, after its checkpoint was saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


@contextmanager
def stop_signals(on_first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in the list that it yields; a second signal ends the process as usual. From the first
    one on, object stores have to answer within a few seconds.

    `on_first` is called in the handler of the first one. Signals within a second count as one, and so does the first
    repetition on a rank of torchrun's.
    """
    received: list[int] = []
    first, repetitions = 0.0, 1 if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield received
        return

    def note(number: int, _: FrameType | None) -> None:
        nonlocal first, repetitions
        if not received:
            received.append(number)
            first = time.monotonic()
            end_soon()
            on_first()
        elif repetitions:
            repetitions -= 1
        elif time.monotonic() - first > _SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_error(command: str, *, status: int = 1, after_interrupt: str = "") -> Iterator[None]:
    """Ends the process on an error inside: one line on stderr, and `status`, or 128 + the number of a signal.

    What ends all ranks together is printed by the first one, any other error by each rank that meets it.

    Args:
        after_interrupt: what the user can do after Ctrl-C, for the message.
    """
    try:
        with interruptible(), ends_with_its_reader():
            yield
    except Interrupted as stopped:
        if os.environ.get("RANK", "0") == "0":
            print_error(f"{command}: {stopped}")
        _exit(stopped.exit_status)
    except KeyboardInterrupt:
        _end(f"{command}: {interruption(hint=after_interrupt)}", 128 + signal.SIGINT)
    except MemoryError as error:
        _end(f"{command}: not enough memory for these settings: {error}", status)
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        _end(
            f"{command}: the GPU's memory is too small for these settings: give a lower --batch-size, a higher "
            "--accumulate, fewer --num-negatives or --precision bfloat16; a resumed run keeps these: give it "
            f"more GPUs, or ones with more memory ({'. '.join(str(error).split('. ')[:2])})",
            status,
        )
    except (ValueError, OSError, WeightServerError) as error:
        _end(f"{command}: {error}", status)


def _end(message: str, status: int) -> NoReturn:
    """Prints why the process ends, and ends it."""
    print_error(message)
    _exit(status)


def _exit(status: int) -> NoReturn:
    """Ends the process; if it is one of several ranks, immediately: operations of NCCL and threads may never end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
