"""A client that kills itself with SIGKILL after a chosen call of a change of the learning rates:
python -m tests.helpers.dying_schedule NUMBER START_STEP LEARNING_RATE ADDRESS..."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from weightserver import WeightClient
from weightserver.client.connection import ShardConnection

if __name__ == "__main__":
    number, start_step, rate, *addresses = sys.argv[1:]
    original, calls, one_by_one = ShardConnection.call, 0, threading.Lock()

    def dying(self: ShardConnection, method: str, request: Any, **options: Any) -> Any:
        global calls
        if method != "ExtendSchedule":
            return original(self, method, request, **options)
        with one_by_one:
            answer = original(self, method, request, **options)
            calls += 1
            if calls == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

    ShardConnection.call = dying  # type: ignore[method-assign]
    with WeightClient(addresses) as client:
        client.extend_schedule(int(start_step), [float(rate)])
