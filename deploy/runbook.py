"""The commands of docs/runbook.md, and what they become beside a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNBOOK = Path(__file__).parent.parent / "docs/runbook.md"
COMMANDS = {
    section.partition("\n")[0]: re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    for section in RUNBOOK.read_text().split("\n## ")[1:]
}
"""Name of each section, and its commands."""
CHANGES_OR_NEEDS_MORE = (
    "pic train ",
    "weightserver verify ",
    "iostat ",
    "dmesg ",
    "openssl ",
    "ps ",
    "df -h runs/",
)
"""Commands that resume a run, need a stopped shard, or look at a machine that a test does not have."""
_CALLS_SHARDS = r"^weightserver (health|checkpoints|rollback|release|backup) .*"


@dataclass(frozen=True)
class Done:
    """A command that was run."""

    command: str
    status: int | None
    """Exit status; None if it did not end in time."""
    seconds: float
    output: str
    errors: str


def run(command: str, here: dict[str, str], *, security: Sequence[str] = (), seconds: float = 30) -> Done:
    """Runs a command as an operator pastes it.

    Args:
        here: what the runbook names, and what it is called here.
        security: options with which shards are called.
        seconds: the time limit.
    """
    pasted = command
    if re.match(_CALLS_SHARDS, command):
        pasted += "".join(f" {option}" for option in security)
    for said, found in here.items():
        pasted = pasted.replace(said, found)
    pasted = re.sub(r"^weightserver ", f"{sys.executable} -m weightserver ", pasted)
    started = time.monotonic()
    try:
        done = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Done(command, None, seconds, "", "")
    return Done(command, done.returncode, time.monotonic() - started, done.stdout, done.stderr)
