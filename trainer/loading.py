"""What every command of the trainer does first: its set-up of the process, and the import of its libraries."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

NEEDED = (
    "defusedxml",
    "jinja2",
    "matplotlib",
    "PIL",
    "sklearn",
    "tensorboard",
    "threadpoolctl",
    "timm",
    "torch",
    "torchmetrics",
    "torchvision",
    "tyro",
)
"""Modules that the extra `trainer` installs."""


@contextmanager
def loading_libraries(command: str) -> Iterator[None]:
    """Shows that the libraries imported inside are being loaded: PyTorch takes seconds.

    Ends the process in one line with status 1 if the extra is not installed, and with 130 at Ctrl-C.

    Args:
        command: its name in that line.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(
            f"{command}: the trainer needs {', '.join(missing)}, which a weight server does not: install the extra "
            "too, pip install 'pic-weightserver[trainer]'"
        )
    _set_up_process()
    try:
        from trainer.display import shown, stage

        with shown(), stage("loading libraries"):
            yield
    except KeyboardInterrupt:
        from weightserver.common.interrupts import interruption

        print(f"{command}: {interruption()}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _set_up_process() -> None:
    """Sets what libraries read when they are loaded."""
    # Spinning OpenMP threads would take the cores from the shards, the data loading and each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # gRPC would log failed handshakes, which the client's errors explain better.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Pillow's, about an image that is read nevertheless; it refuses one of twice as many pixels.
    warnings.filterwarnings("ignore", r"Image size \(\d+ pixels\) exceeds limit")
