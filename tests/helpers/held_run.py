"""A run that stands still before a step, until a line on stdin says what to do: `train N` makes N steps, `fetch N`
fetches all rows N times, and `refused N` fetches rows of shard 0 N times, of shard 1 N + 1 times and so on, in vain.

python -m tests.helpers.held_run OUTPUT SERVERS BATCH_SIZE

Each time that it stands still it prints a line of JSON: its step, and the seconds of each fetch of the last command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from tests.helpers.small_run import NUM_IMAGES, ONLY_ROWS, small_run
from trainer.loop import train
from weightserver import StepError, WeightClient

FIRST_STEP, NUM_STEPS = 180, 400
"""Where it stands still first, and its length."""


def rows_of(shard: int, num_shards: int) -> list[int]:
    """The rows of a shard, with the blocks of `small_run`."""
    return [row for row in range(NUM_IMAGES) if row // 5 % num_shards == shard]


def main() -> None:
    output, servers, batch_size = sys.argv[1:]
    addresses = servers.split(",")
    client, until = WeightClient(addresses), FIRST_STEP
    clock: int | None = None  # as of the last step, if it is known

    def fetch(number: int) -> list[float]:
        nonlocal clock
        clock, seconds = client.describe().clock if clock is None else clock, []
        for _ in range(number):
            started = time.perf_counter()
            client.fetch(np.arange(NUM_IMAGES), step=clock)
            seconds.append(time.perf_counter() - started)
        return seconds

    def refused(number: int) -> list[float]:
        seconds = []
        for shard in range(len(addresses)):
            for _ in range(number + shard):
                started = time.perf_counter()
                with suppress(StepError):
                    client.fetch(rows_of(shard, len(addresses)), step=0)
                seconds.append(time.perf_counter() - started)
        return seconds

    def stand_still(step: int) -> None:
        nonlocal until, clock
        seconds: list[float] = []
        while step == until:
            print(json.dumps({"step": step, "seconds": seconds}), flush=True)
            command, _, number = sys.stdin.readline().partition(" ")
            if not command:
                os._exit(0)
            if command == "train":
                until, clock = until + int(number), None
            else:
                seconds = {"fetch": fetch, "refused": refused}[command](int(number))

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
