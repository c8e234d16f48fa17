"""Commands in processes of their own, and in this one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest


def weightserver(*arguments: object, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a command of weightserver that ends by itself; returns its exit status, stdout and stderr."""
    command = [sys.executable, "-m", "weightserver", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


def data_command(*arguments: object) -> object:
    """The exit status of `python -m trainer.data` with these arguments."""
    from trainer.data.__main__ import main  # the weight server's tests do not need it

    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return ended.value.code
