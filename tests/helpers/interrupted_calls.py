"""Clients in one process, whose calls an alarm interrupts at random times; prints the number of interrupts.

Usage: python -m tests.helpers.interrupted_calls SECONDS ADDRESS..., for a table `SPEC` without any written row. It
fails if a thread stays.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

from tests.helpers.watching import wait_until
from weightserver import TableSpec, WeightClient

SPEC = TableSpec(num_rows=40, dim=2, momentum=0.0, weight_decay=0.0, init_std=0.0, rows_per_block=5)
HORIZON = 100_000
CALLS_PER_CLIENT = 12
ROWS, ONES = np.arange(SPEC.num_rows), np.ones((SPEC.num_rows, SPEC.dim), np.float32)


class Interrupted(Exception):
    """Raised by the signal handler; as most programs' own, whatever catches any Exception catches it."""


class Alarm:
    """Interrupts calls, each at most once."""

    def __init__(self) -> None:
        self.num_interrupts = 0
        self._random = random.Random(0)
        self._seconds: dict[str, float] = {}
        """Duration of each kind of call."""
        self._is_calling = False
        signal.signal(signal.SIGALRM, self._ring)

    def _ring(self, *_: object) -> None:
        if self._is_calling:
            self._is_calling = False
            raise Interrupted

    def interrupt(self, name: str, call: Callable[[], object]) -> None:
        """Makes the call, and repeats it if it was interrupted: while the first exception is still handled."""
        try:
            self._is_calling = True
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._random.uniform(0, self._seconds.get(name, 0.01))))
            call()
            self._is_calling = False  # no signal is looked at between the return and this
        except Interrupted:
            self.num_interrupts += 1
            started = time.monotonic()
            call()
            self._seconds[name] = time.monotonic() - started
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    seconds, *addresses = sys.argv[1:]
    alarm, end, num_pushes = Alarm(), time.monotonic() + float(seconds), 0
    with WeightClient(addresses, timeout_seconds=60, retry_seconds=60) as first:
        epoch = first.open_session("interrupted")
    num_threads = len(sys._current_frames())
    while (now := time.monotonic()) < end or (alarm.num_interrupts <= 100 and now < end + 100):
        client = WeightClient(addresses, timeout_seconds=60, retry_seconds=60)
        client.extend_schedule(0, np.ones(HORIZON, np.float32))
        alarm.interrupt("open", lambda client=client: client.open_session("interrupted", join=epoch))
        for number in range(CALLS_PER_CLIENT):
            step, name = num_pushes, f"at {num_pushes}"
            alarm.interrupt("push", lambda client=client, step=step: client.push_gradients(ROWS, ONES, step=step))
            num_pushes += 1
            alarm.interrupt("fetch", lambda client=client, step=step: client.fetch(ROWS, step=step + 1))
            fetched = client.fetch(ROWS, step=num_pushes)
            assert (fetched == -num_pushes).all(), f"{num_pushes} pushes counted as {-fetched.min()}..{-fetched.max()}"
            if number == CALLS_PER_CLIENT // 2:
                alarm.interrupt(
                    "checkpoint", lambda client=client, step=step, name=name: client.checkpoint(name, step=step + 1)
                )
                client.release(name)
        alarm.interrupt("close", client.close)
        del client
        gc.collect()  # gRPC's channel hangs later calls if its destructor, which may run in any call, is interrupted
    wait_until(lambda: len(sys._current_frames()) <= num_threads)
    print(alarm.num_interrupts)


if __name__ == "__main__":
    main()
