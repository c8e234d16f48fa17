"""One of several ranks of a training run; rank 1 fails in a step: it raises an error or is killed.

torchrun ... -m tests.helpers.failing_rank HOW STEP TRAINER-ARGUMENTS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainer.__main__ import main
from weightserver.torch import ClassifierHead

FAILURE = "rank 1 cannot continue"


def fail(how: str) -> None:
    Path(os.environ["FAILED_AT"]).write_text(str(time.time()))
    if how == "raises":
        raise ValueError(FAILURE)
    if how == "crashes":
        raise RuntimeError(FAILURE)
    os.kill(os.getpid(), signal.SIGKILL)


def failing(how: str, at: int) -> Any:
    """Replaces the `announcements` of heads so that rank 1 fails."""
    announcements = ClassifierHead.announcements

    def until_then(head: ClassifierHead, steps: range) -> Any:
        for step, classes in zip(steps, announcements(head, steps), strict=True):
            if step == at and os.environ["RANK"] == "1":
                fail(how)
            if step == at and "deaf" in how:
                time.sleep(1000)  # as one that waits in NCCL for rank 1
            yield classes

    return until_then


if __name__ == "__main__":
    ClassifierHead.announcements = failing(sys.argv[1], int(sys.argv[2]))  # type: ignore[method-assign]
    main(sys.argv[3:])
