"""What every command of the trainer does first: its set-up of the process, and the import of its libraries."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from weightserver.common.installing import install_advice
from weightserver.common.processes import end_at_sigterm

NEEDED = ("timm", "torch", "tyro")
"""Modules by which the extra `trainer` is known; it installs more."""


@contextmanager
def loading_libraries(command: str) -> Iterator[None]:
    """Shows that the libraries imported inside are being loaded: PyTorch takes seconds.

    Ends the process in one line with status 1 if the extra is not installed, and with 130 at Ctrl-C.

    Args:
        command: its name in that line.
    """
    end_at_sigterm()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(
            f"{command}: the trainer needs {', '.join(missing)}, which a weight server does not: install the extra "
            f"too, {install_advice('trainer')}"
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
    # Another service's; prometheus_client would write there.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    _set_up_home()


def _set_up_home() -> None:
    """Gives a user without a home or a name, as containers have, those that libraries look for: a private folder."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"
    if Path(os.path.expanduser("~")).is_absolute():
        return
    home = Path(tempfile.gettempdir(), f"home-of-uid-{os.getuid()}")
    home.mkdir(0o700, exist_ok=True)
    if home.is_symlink() or home.stat().st_uid != os.getuid():
        sys.exit(f"{home} belongs to another user: set HOME to a folder of your own")
    os.environ["HOME"] = str(home)
