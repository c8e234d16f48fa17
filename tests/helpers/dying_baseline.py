"""A baseline that kills itself with -9 before one of its steps:
python -m tests.helpers.dying_baseline METHOD OUTPUT STEP."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from experiments.baselines import loop
from tests.helpers.small_run import small_run


def dying(training: loop.Training, step: int) -> Tensor:
    if step == die_before:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(training, step)


if __name__ == "__main__":
    method, output, number = sys.argv[1:]
    die_before, update = int(number), loop._update
    loop._update = dying
    torch.set_num_threads(1)
    loop.train_baseline(method, small_run(Path(output), resume="auto"))
