"""Programs that only record how they are started: what a manifest or a script would start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple


class Started(NamedTuple):
    """One start of a program."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


class RecordedPrograms:
    """Programs of these names in `folder`; each start is recorded, and ends with `status`."""

    def __init__(self, folder: Path, *names: str, status: int = 0) -> None:
        self._record = folder / "started.jsonl"
        programs = folder / "programs"
        programs.mkdir(parents=True, exist_ok=True)
        self.path = f"{programs}:{os.environ['PATH']}"
        """A PATH on which they come first."""
        for name in names:
            recording = f"""#!/bin/sh
{sys.executable} - "$@" << 'END'
import json, os, sys
with open({str(self._record)!r}, "a") as file:
    print(json.dumps([{name!r}, sys.argv[1:], dict(os.environ)]), file=file)
END
exit {status}
"""
            (programs / name).write_text(recording)
            (programs / name).chmod(0o755)

    def started(self) -> list[Started]:
        """The starts since the last call."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        self._record.unlink(missing_ok=True)
        return [Started(*json.loads(line)) for line in lines]
