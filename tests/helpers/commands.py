"""Commands in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping


def weightserver(*arguments: object, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a command of weightserver that ends by itself; returns its exit status, stdout and stderr."""
    command = [sys.executable, "-m", "weightserver", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr
