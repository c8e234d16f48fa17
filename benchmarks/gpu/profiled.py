"""Profiles a run of the trainer: where it waits for its GPU, and what the GPU does meanwhile.

python -m benchmarks.gpu.profiled PRESET --OPTIONS: takes the trainer's arguments, and also writes extra.json into
--output. torch.profiler records the last steps, a quarter of all and at most ten; in as many steps before them waits of
the main thread are counted (torch.cuda.set_sync_debug_mode), on each rank. Rank 0 writes the results.
"""

from __future__ import annotations

import collections
import json
import threading
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, supported_activities

from trainer.arguments import parse_config
from trainer.loop import train

_MAX_STEPS = 10
_WAITED = "called a synchronizing CUDA operation"
Interval = tuple[float, float]


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class Watch:
    """Profiles some of the steps of a run, of which `train` announces each before it begins."""

    def __init__(self, num_steps: int) -> None:
        self._length = min(_MAX_STEPS, (num_steps - 1) // 4)
        if self._length < 1:
            raise ValueError(f"--steps is {num_steps}: give at least 5, of which one is profiled")
        self._end = num_steps - 1  # the last is logged, and followed by others' work
        self._waits: collections.Counter[str] = collections.Counter()
        self._waiting, self._profiling = ExitStack(), ExitStack()
        self._traced = supported_activities() & {ProfilerActivity.CUDA} or {ProfilerActivity.CPU}

    def step(self, step: int) -> None:
        if step == self._end - 2 * self._length:
            self._waiting.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")
                self._waiting.callback(torch.cuda.set_sync_debug_mode, "default")
        if step == self._end - self._length:
            self._waiting.close()
            self._profile = self._profiling.enter_context(profile(activities=list(self._traced)))
        if step == self._end:
            self._profiling.close()

    def _note(self, message: Warning | str, category: type[Warning], filename: str, line: int, *_: object) -> None:
        if _WAITED in str(message) and threading.current_thread() is threading.main_thread():
            self._waits[f"{'/'.join(filename.split('/')[-2:])}:{line}"] += 1

    def seen(self) -> dict[str, Any]:
        """Each a step: seconds in which the device was busy, kernels, copies, seconds of collectives, waits.

        Without a GPU that can be traced the CPU's own operations stand for kernels.
        """
        on_gpu = ProfilerActivity.CUDA in self._traced
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        events = [one for one in self._profile.events() if one.device_type == kind and not one.is_user_annotation]
        if not events:
            raise RuntimeError("torch.profiler saw nothing on the GPU: is CUPTI allowed here?")
        spans = {True: list[Interval](), False: list[Interval]()}  # microseconds, of collectives and of all else
        for event in events:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
        busy = covered([*spans[True], *spans[False]])
        num_copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
        n = self._length
        return {
            "traced": "GPU" if on_gpu else "CPU",
            "steps": n,
            "busy_seconds": 1e-6 * busy / n,
            "kernels": (len(events) - num_copies) / n,
            "copies": num_copies / n,
            "collective_seconds": 1e-6 * covered(spans[True]) / n,
            "collective_seconds_alone": 1e-6 * (busy - covered(spans[False])) / n,
            "waits": sum(self._waits.values()) / n,
            "waits_by_line": {line: times / n for line, times in self._waits.most_common()},
        }


def main(arguments: list[str] | None = None) -> None:
    config = parse_config(arguments)
    assert config.optimization.steps is not None
    watch = Watch(config.optimization.steps)
    result = train(config, on_step=watch.step)
    if result.is_first:
        (config.run.output / "extra.json").write_text(json.dumps(watch.seen()) + "\n")


if __name__ == "__main__":
    main()
