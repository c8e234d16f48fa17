"""Shared by all benchmarks: timing calls in turn, and writing results with a description of the machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from weightserver.common.atomic_files import atomic_write


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls."""

    p50: float
    p10: float
    p90: float
    num_calls: int
    p99: float | None = None
    """The 99th percentile, of at least a hundred calls."""

    def __str__(self) -> str:
        return f"{1e3 * self.p50:.2f} ({1e3 * self.p10:.2f}–{1e3 * self.p90:.2f}) ms"


def in_turn(calls: dict[str, Callable[[], object]], *, rounds: int, warm_up: int = 3) -> dict[str, Timing]:
    """Runs every call once per round, so that disturbances of the machine affect all alike."""
    return {name: timing(values) for name, values in seconds_in_turn(calls, rounds=rounds, warm_up=warm_up).items()}


def seconds(call: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - started


def seconds_in_turn(
    calls: dict[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 3,
    budget: float = math.inf,
    least_rounds: int = 0,
) -> dict[str, list[float]]:
    """The seconds of every call in each round. After `budget` seconds, rounds beyond `least_rounds` do not begin."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    ends = time.perf_counter() + budget
    for round_number in range(warm_up + rounds):
        if round_number >= warm_up + least_rounds and time.perf_counter() >= ends:
            break
        for name, call in calls.items():
            taken = seconds(call)
            if round_number >= warm_up:
                times[name].append(taken)
    return times


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a number from `least` on. A spread needs two values."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a number of at least {least}, got {text!r}")
        return int(text)

    return parsed


def timing(seconds: list[float]) -> Timing:
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    p99 = percentiles[98] if len(seconds) >= 100 else None
    return Timing(statistics.median(seconds), percentiles[9], percentiles[89], len(seconds), p99)


def restored(value: Any) -> Any:
    """Parsed JSON, with its timings restored."""
    if isinstance(value, dict):
        if "p50" in value:
            return Timing(**value)
        return {key: restored(item) for key, item in value.items()}
    return [restored(item) for item in value] if isinstance(value, list) else value


def read_bytes(processes: Sequence[subprocess.Popen[Any]]) -> int:
    """What processes have read from disk so far."""
    return sum(psutil.Process(process.pid).io_counters().read_bytes for process in processes)


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions, date and commit."""
    processor = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    commit, git = "", shutil.which("git")
    if git is not None:
        head = [git, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "commit": commit,
    }


def write_results(directory: Path, name: str, command: str, results: dict[str, Any], table: str) -> None:
    """Writes name.json and name.md, and prints the table and one JSON line."""
    text = save_results(directory, name, command, results, table)
    print(table)
    print(text)


def save_results(directory: Path, name: str, command: str, results: dict[str, Any], table: str) -> str:
    """Writes name.json and name.md; returns the JSON as one line."""
    directory.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"command": command, "machine": machine(), "results": results}
    text = json.dumps(document, default=asdict)
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    page = f"# {name}\n\n`{command}`\n\nMachine: {facts}\n\n{table}\n"
    for ending, content in (("json", json.dumps(json.loads(text), indent=2) + "\n"), ("md", page)):
        atomic_write(directory / f"{name}.{ending}", lambda path, content=content: path.write_text(content))
    return text
