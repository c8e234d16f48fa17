"""Runs cells, each as a process of one thread, and writes the results of each as it ends."""

from __future__ import annotations

import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.cells import Cell, Table
from experiments.effects import unclear_cells
from experiments.files import LOG_FILE
from experiments.results import Results, Run, check_results, collect, finished, load, records
from experiments.run_cell import write_cell

MOST_SEEDS = 3
"""By default, of cells whose effects fewer do not show."""
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


def plan(everything: Sequence[Results], most_seeds: int, others: Sequence[Results] = ()) -> list[Job]:
    """The runs that the tables lack, each after the run that it continues, in the order of their value.

    `others` are results of other tables, which say what the spread between seeds is.

    Seeds come one after another, each over all tables. After the first seed, or the number that a table needs anyway,
    only cells have further ones whose effects are not clear yet.
    """
    judged_by = [*everything, *others]
    unclear = {results.table.name: unclear_cells(results, judged_by) for results in everything}
    jobs: dict[tuple[str, ...], Job] = {}
    for seed in range(max(most_seeds, *(results.table.seeds for results in everything))):
        cells = [
            cell
            for results in everything
            for cell in results.table.cells
            if seed < results.table.seeds
            or (seed < most_seeds and (seed == 0 or cell.name in unclear[results.table.name]))
            if seed not in results.runs.get(cell.name, {})
        ]
        for cell in sorted(cells, key=lambda cell: cell.is_long):  # stable
            for job in _with_previous(cell, seed):
                jobs.setdefault(job.key, job)
    return list(jobs.values())


def _with_previous(cell: Cell, seed: int) -> Iterator[Job]:
    if cell.after is not None:
        yield from _with_previous(cell.after, seed)
    yield Job(cell=cell, seed=seed)


@dataclass(kw_only=True)
class Runner:
    """Runs the cells of tables; each table's results go to results/NAME.json."""

    tables: Sequence[Table]
    others: Sequence[Table] = ()
    """Tables whose results give the spread between seeds, and what runs measured before; none of their cells is run."""
    most_seeds: int
    directory: Path
    results: Path
    num_jobs: int
    seconds: float = math.inf
    """After which runs are stopped, each at a checkpoint."""
    failed: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Runs that failed: key to the place of the log."""
    _failures_in_a_row: int = 0
    _recorded: dict[str, Run] = field(default_factory=dict)
    """What the results of all tables held at the beginning, by run."""
    _running: dict[Job, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: queue.SimpleQueue[Job] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        """Runs until nothing is left, the time is over, or runs fail one after another; if this process is interrupted,
        the cells stop after a checkpoint.

        Raises ValueError, before anything is written, if results would be lost.
        """
        for table in self.tables:
            check_results(self._file(table), table)
        for table in (*self.tables, *self.others):
            self._recorded |= records(self._file(table), table)
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

    def _seeds(self) -> int:
        return max(self.most_seeds, *(table.seeds for table in self.tables))

    def _collect(self) -> None:
        for table in self.tables:
            collect(self.directory, self._file(table), table, self._seeds(), self._recorded)

    def _file(self, table: Table) -> Path:
        return self.results / f"{table.name}.json"

    def _next(self) -> Job | None:
        """The first run of the plan that is neither finished nor running, and whose previous cell has finished."""
        if self._failures_in_a_row >= _MOST_FAILURES:
            return None
        everything, others = (
            [load(self._file(table), table) for table in tables] for tables in (self.tables, self.others)
        )
        busy = {job.identity for job in self._running}
        for job in plan(everything, self.most_seeds, others):
            after = job.cell.after
            ready = after is None or finished(self.directory, after, job.seed)
            done = finished(self.directory, job.cell, job.seed)
            if ready and not done and job.key not in self.failed and job.identity not in busy:
                return None if self._running and self._is_timed(job, *self._running) else job
        return None

    def _is_timed(self, *jobs: Job) -> bool:
        """Whether one of these runs must be alone on the machine."""
        return any(table.over_time and job.cell in table.cells for table in self.tables for job in jobs)

    def _start(self, job: Job) -> None:
        directory, after = self.directory / job.identity, job.cell.after
        write_cell(directory, job.cell, job.seed, None if after is None else self.directory / after.identity(job.seed))
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
        return f"{job.identity}, seed {job.seed} ({'; '.join(names) or 'for another cell'})"
