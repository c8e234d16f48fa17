"""A run that stands still before a step, until a line on stdin says what to do: `train N` makes N steps, and a client
of the same process, makes calls. `fetch N`, `push N` and `write N` are N calls of all rows; `refused N` fetches rows of
shard 0 N times, of shard 1 N + 1 times and so on, in vain.

python -m tests.helpers.held_run OUTPUT SERVERS BATCH_SIZE

Each time that it stands still it prints a line of JSON: its step, and the seconds of each fetch of the last command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tests.helpers.small_run import NUM_IMAGES, ONLY_ROWS, small_run
from trainer.loop import train
from weightserver import StepError, WeightClient

FIRST_STEP, NUM_STEPS = 180, 400
"""Where it stands still first, and its length."""
_ROWS = np.arange(NUM_IMAGES)
_VALUES = np.ones((NUM_IMAGES, 16), np.float32)


def rows_of(shard: int, num_shards: int) -> list[int]:
    """The rows of a shard, with the blocks of `small_run`."""
    return [row for row in range(NUM_IMAGES) if row // 5 % num_shards == shard]


def main() -> None:
    output, servers, batch_size = sys.argv[1:]
    addresses = servers.split(",")
    client, until = WeightClient(addresses, token=os.environ["WEIGHTSERVER_TOKEN"]), FIRST_STEP
    clock: int | None = None  # as of the last step, if it is known

    def timed(calls: Sequence[Callable[[], object]], *errors: type[Exception]) -> list[float]:
        """Makes calls that may end by these errors."""
        seconds = []
        for call in calls:
            started = time.perf_counter()
            with suppress(*errors):
                call()
            seconds.append(time.perf_counter() - started)
        return seconds

    def calls_of(command: str, number: int) -> list[float]:
        nonlocal clock
        if clock is None:
            clock = client.describe().clock
            client.extend_schedule(clock, [0.01] * 9)
        fetch = partial(client.fetch, _ROWS, step=clock + 1)  # somebody may have pushed for a step more
        push = partial(client.push_gradients, _ROWS, _VALUES, step=clock)
        write = partial(client.write_state, _ROWS, _VALUES, _VALUES, clock)
        if command == "refused":
            own = [rows_of(shard, len(addresses)) for shard in range(len(addresses))]
            several = [partial(client.fetch, rows, step=0) for s, rows in enumerate(own) for _ in range(number + s)]
            return timed(several, StepError)
        calls: dict[str, Callable[[], object]] = {"fetch": fetch, "push": push, "write": write}
        found = timed([calls[command]] * number)
        clock += command == "push"
        return found

    def stand_still(step: int) -> None:
        nonlocal until, clock
        seconds: list[float] = []
        if step == FIRST_STEP:
            client.open_session("held", join=client.describe().epoch, hold=False)
        while step == until:
            print(json.dumps({"step": step, "seconds": seconds}), flush=True)
            command, _, number = sys.stdin.readline().partition(" ")
            if not command:
                os._exit(0)
            if command == "train":
                until, clock = until + int(number), None
            else:
                seconds = calls_of(command, int(number))

    torch.set_num_threads(1)
    train(
        small_run(
            Path(output),
            servers=servers,
            batch_size=int(batch_size),
            steps=NUM_STEPS,
            encoder=ONLY_ROWS,
            metrics_port=0,
        ),
        on_step=stand_still,
    )


if __name__ == "__main__":
    main()
