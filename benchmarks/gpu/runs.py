"""Starts the measured programs, each run in its own processes, within the remaining time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Timing, timing

_MIN_SECONDS = 5.0
"""A run is not started with less time left."""


class RunFailedError(Exception):
    """A run ended with an error, or its time is over."""


@dataclass(frozen=True)
class Run:
    """The records of a trainer's run."""

    step_seconds: list[float]
    """Mean seconds of a step, for each interval between two logged steps after the warm-up."""
    records: list[dict[str, Any]]
    """The lines of metrics.jsonl after the warm-up."""
    summary: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    """The program's other output."""

    @property
    def step(self) -> Timing:
        return timing(self.step_seconds)


Start = Callable[[str, Sequence[str], int, float], None]
"""Runs a module with arguments, on a number of ranks, for at most some seconds. Raises RunFailedError."""


def start_processes(module: str, arguments: Sequence[str], num_ranks: int, timeout_seconds: float) -> None:
    """The command of a user: `python -m`, or torchrun for several ranks."""
    launcher = [sys.executable, "-m"]
    if num_ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*launcher, module, *arguments], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"{module} took more than {timeout_seconds:.0f} s") from None
        finally:  # weight servers and other ranks too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        if status:
            raise RunFailedError(f"{module} ended with status {status}: {_reason(errors.read())}")


def _reason(text: str) -> str:
    """The most informative line of stderr: the program's own message, or the last line of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("trainer:") or "Error: " in line]
    return (telling or lines or ["no message"])[-1][:300]


@dataclass
class Runner:
    """Starts runs and keeps their records, so that sections share them."""

    device: str
    run_seconds: float
    """Seconds that one run may take at most."""
    warm_up: int
    """Logged intervals omitted at the beginning of a run."""
    start: Start = start_processes
    deadline: float = math.inf
    """Time on the clock of time.monotonic() after which no run is started."""
    _done: dict[tuple[str, ...], Run] = field(default_factory=dict)

    def train(self, module: str, arguments: Sequence[str], num_ranks: int = 1, *, again: int = 0) -> Run:
        """The trainer, or a module that takes its arguments and writes such a directory; `again` asks for another."""
        key = (module, str(num_ranks), str(again), *arguments)
        if key not in self._done:
            with tempfile.TemporaryDirectory() as directory:
                output = Path(directory) / "run"
                self.call(module, [*arguments, "--device", self.device, "--output", str(output)], num_ranks)
                self._done[key] = self._read(output)
        return self._done[key]

    def facts(self) -> dict[str, Any]:
        """What `benchmarks.gpu.facts` says of the GPUs, from a process that leaves nothing on them."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "facts.json"
            self.call("benchmarks.gpu.facts", [str(out)])
            found: dict[str, Any] = json.loads(out.read_text())
            return found

    def call(self, module: str, arguments: Sequence[str], num_ranks: int = 1) -> None:
        left = self.deadline - time.monotonic()
        if left < _MIN_SECONDS:
            raise RunFailedError("the time for this benchmark was over: give more --minutes, or fewer --sections")
        self.start(module, arguments, num_ranks, min(left, self.run_seconds))

    def _read(self, output: Path) -> Run:
        lines = [json.loads(line) for line in _text(output / "metrics.jsonl").splitlines()]
        ends = [-1, *(line["step"] for line in lines)]
        seconds = [line["seconds"] / (line["step"] - before) for before, line in zip(ends, lines, strict=False)]
        return Run(
            step_seconds=seconds[self.warm_up :],
            records=lines[self.warm_up :],
            summary=json.loads(_text(output / "summary.json") or "{}"),
            extra=json.loads(_text(output / "extra.json") or "{}"),
        )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
