"""Runs cells, each as a process of one thread, and writes the results of each as it ends."""

from __future__ import annotations

import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.cells import Cell, Table
from experiments.results import LOG_FILE, Runs, collect, has_run, load
from experiments.run_cell import write_cell

_MOST_FAILURES = 4
"""In a row: then something that all runs need is missing, and the others would fail, too."""
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One run of a cell."""

    cell: Cell
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """What makes it equal to the same run in another table."""
        return (self.identity, *(evaluation.name for evaluation in self.cell.evaluations))

    @property
    def identity(self) -> str:
        return self.cell.identity(self.seed)


def plan(tables: Sequence[Table], runs: Runs, most_seeds: int) -> list[Job]:
    """The runs that the tables lack, by seed, of at most `most_seeds` (0: of as many as each table needs)."""
    jobs: dict[tuple[str, ...], Job] = {}
    for seed in range(most_seeds or max(table.seeds for table in tables)):
        for cell in [cell for table in tables if seed < (most_seeds or table.seeds) for cell in table.cells]:
            if not has_run(runs, cell, seed):
                job = Job(cell=cell, seed=seed)
                jobs.setdefault(job.key, job)
    return list(jobs.values())


@dataclass(kw_only=True)
class Runner:
    """Runs the cells of tables; their results go to the folder `results`."""

    tables: Sequence[Table]
    most_seeds: int
    directory: Path
    results: Path
    num_jobs: int
    seconds: float = math.inf
    """After which runs are stopped, each at a checkpoint."""
    failed: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Runs that failed: key to the place of the log."""
    _failures_in_a_row: int = 0
    _running: dict[Job, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: queue.SimpleQueue[Job] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        """Runs until nothing is left, the time is over, or runs fail one after another; if this process is interrupted,
        the cells stop after a checkpoint."""
        end = time.monotonic() + self.seconds
        try:
            self._collect()
            while True:
                while len(self._running) < self.num_jobs and (job := self._next()) is not None:
                    self._start(job)
                if not self._running:
                    return
                try:
                    self._finish(self._ended.get(timeout=min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)))
                except queue.Empty:
                    return
        finally:
            for process in self._running.values():
                assert process.stdin is not None
                process.stdin.close()  # tells the cell to stop
            for process in self._running.values():
                process.wait()

    def _collect(self) -> None:
        seeds = self.most_seeds or max(table.seeds for table in self.tables)
        collect(self.directory, self.results, self.tables, seeds)

    def _next(self) -> Job | None:
        """The first run of the plan that is neither finished nor running."""
        if self._failures_in_a_row >= _MOST_FAILURES:
            return None
        busy = {job.identity for job in self._running}
        for job in plan(self.tables, load(self.results), self.most_seeds):
            if job.key not in self.failed and job.identity not in busy:
                return job
        return None

    def _start(self, job: Job) -> None:
        directory = self.directory / job.identity
        write_cell(directory, job.cell, job.seed)
        with (directory / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.run_cell", str(directory)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | _THREADS,
            )
        self._running[job] = process
        threading.Thread(target=self._report_end, args=(job, process), daemon=True).start()
        print(f"{time.strftime('%H:%M:%S')} started  {self._described(job)}", flush=True)

    def _report_end(self, job: Job, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ended.put(job)

    def _finish(self, job: Job) -> None:
        process = self._running.pop(job)
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode:
            log = self.directory / job.identity / LOG_FILE
            self.failed[job.key] = str(log)
            self._failures_in_a_row += 1
            print(f"{time.strftime('%H:%M:%S')} FAILED   {self._described(job)}: see {log}", flush=True)
            return
        self._failures_in_a_row = 0
        self._collect()
        print(f"{time.strftime('%H:%M:%S')} finished {self._described(job)}", flush=True)

    def _described(self, job: Job) -> str:
        names = [f"{table.name}: {job.cell.name}" for table in self.tables if job.cell in table.cells]
        return f"{job.identity}, seed {job.seed} ({'; '.join(names)})"
