"""Ranks on GPUs, real or pretended, which do what a scenario says, a function of a module that they import.

Those with pretended GPUs are forked from a process that has imported torch and the trainer, which saves most of the
time of such a test; those with real ones start new processes, because CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.runs import RunFailedError
from tests.helpers import pretended_gpu
from tests.helpers.ports import reserved_ports

_PRELOADED = "tests.helpers.gpus_preloaded"
NUM_PRETENDED = 2


@dataclass(frozen=True)
class Gpus:
    """So many GPUs."""

    number: int
    pretended: bool

    def need(self, number: int) -> None:
        """Skips the test where there are fewer."""
        if self.number < number:
            pytest.skip(f"needs {number} GPUs, this machine has {self.number}")

    def run(
        self,
        scenario: Callable[..., None],
        *arguments: Any,
        directory: Path,
        num_ranks: int = 1,
        timeout_seconds: float = 120,
        killed: bool = False,
    ) -> None:
        """Runs scenario(*arguments) on each rank; what they say is in the log-N of `directory`.

        Fails unless all end well, or, where they are to be `killed`, the first does not.
        """
        with reserved_ports(1) as (port,):
            processes = self._start(scenario, arguments, num_ranks, directory, port)
            deadline = time.monotonic() + timeout_seconds
            try:
                if killed:
                    processes[0].join(timeout_seconds)
                while not killed and any(process.is_alive() for process in processes):
                    assert time.monotonic() < deadline, f"{scenario.__name__} took more than {timeout_seconds} s"
                    if any(process.exitcode for process in processes):
                        break
                    time.sleep(0.01)
            finally:
                for process in processes:
                    process.kill() if killed or any(one.exitcode for one in processes) else process.join(
                        timeout_seconds
                    )
                    process.join()
        statuses = [process.exitcode for process in processes]
        said = "\n".join((directory / f"log-{rank}").read_text()[-3000:] for rank in range(num_ranks))
        assert (statuses[0] == -signal.SIGKILL) if killed else not any(statuses), f"{statuses}: {said}"

    def _start(
        self, scenario: Callable[..., None], arguments: Sequence[Any], num_ranks: int, directory: Path, port: int
    ) -> list[BaseProcess]:
        directory.mkdir(parents=True, exist_ok=True)
        if self.pretended:
            context: Any = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([_PRELOADED])
        else:
            context = multiprocessing.get_context("spawn")
        processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            common = (self.number if self.pretended else None, rank, num_ranks, port, directory / f"log-{rank}")
            processes.append(context.Process(target=_rank, args=(*common, scenario, *arguments)))
            processes[-1].start()
        return processes

    def start_module(self, module: str, arguments: Sequence[str], num_ranks: int, timeout_seconds: float) -> None:
        """Same as `benchmarks.gpu.runs.start_processes`."""
        directory = Path(arguments[-1]).parent / "logs"
        try:
            self.run(
                _module, module, [*arguments], directory=directory, num_ranks=num_ranks, timeout_seconds=timeout_seconds
            )
        except AssertionError as error:
            raise RunFailedError(f"{module}: {error}") from None

    @property
    def python(self) -> list[str]:
        """The beginning of a command, before -m MODULE."""
        return pretended_gpu.command(self.number) if self.pretended else [sys.executable]


def _rank(
    pretended: int | None,
    rank: int,
    num_ranks: int,
    port: int,
    log: Path,
    scenario: Callable[..., None],
    *arguments: Any,
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ |= {
        name: str(value) for name, value in zip(names, (rank, rank, num_ranks, num_ranks, port), strict=True)
    }
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    with pretended_gpu.pretended_gpus(pretended) if pretended else nullcontext():
        scenario(*arguments)


def _module(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)  # which runs as a program now
    runpy.run_module(module, run_name="__main__", alter_sys=True)
