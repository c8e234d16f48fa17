"""The tables' command line: run cells, write the page.

python -m experiments run [--tables a,b] [--seeds 3] [--directory runs/tables] [--jobs N] [--quick]
python -m experiments gpu [--budget SECONDS] [--jobs N] [--directory runs/gpu] [--quick]
python -m experiments page [--quick]
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path

import torch

from experiments import page
from experiments.cells import Table
from experiments.defaults import DEFAULTS_FILE, check_defaults
from experiments.quick import quick
from experiments.results import has_run, load
from experiments.run_cell import CIFAR_10 as IMAGES
from experiments.runner import Runner
from experiments.tables import TABLES
from experiments.tables.cifar import CIFAR_10
from experiments.tables.gpu import GPU
from trainer.cores import usable_cores
from weightserver.common.atomic_files import directory_lock
from weightserver.common.logs import print_error

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
QUICK = Path("build/tables-quick")
"""Where tiny cells have their runs, results and page."""
_STOP_SECONDS = 15.0
_BUDGET_HELP = "the time for it; what has not ended then stops after a checkpoint (default: until all have ended)"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 if a cell failed, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except (ValueError, OSError) as error:
        print_error(f"experiments: {error}")
        return 1
    except KeyboardInterrupt:
        print_error("experiments: interrupted: repeat the command to resume")
        return 128 + signal.SIGINT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="{run,gpu,page}")
    run = commands.add_parser("run", help="run the cells that have not finished, and write what they measured")
    run.add_argument("--tables", help=f"names, separated by commas (default: all but the GPU's): {', '.join(TABLES)}")
    run.add_argument("--seeds", type=int, help="of each cell (default: as many as its table needs)")
    run.add_argument("--jobs", type=int, default=usable_cores(), help="cells at a time, one core each (default: cores)")
    run.set_defaults(command=_run, seconds=math.inf)
    gpu = commands.add_parser("gpu", help="run the next of the GPU's cells, one after another")
    gpu.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", dest="seconds", help=_BUDGET_HELP)
    gpu.add_argument("--jobs", type=int, default=1, help="cells at a time, which share the GPU")
    gpu.set_defaults(command=_gpu, tables=GPU.name, seeds=1)
    for command in (run, gpu):
        command.add_argument(
            "--quick", action="store_true", help=f"tiny cells, in {QUICK}: shows that everything works"
        )
    writing = commands.add_parser("page", help="write docs/results.md and its plots from the results")
    writing.add_argument("--docs", type=Path, help="folder of the page (default: docs)")
    writing.add_argument("--quick", action="store_true", help="results of tiny cells")
    writing.set_defaults(command=_page)
    run.add_argument("--directory", type=Path, help="where the runs are kept (default: runs/tables)")
    gpu.add_argument("--directory", type=Path, help="where they are kept (default: runs/gpu)")
    for command in (run, gpu, writing):
        command.add_argument("--results", type=Path, help="folder of what runs measured (default: experiments/results)")
    return parser


def _gpu(options: argparse.Namespace) -> int:
    if not options.quick and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that torch can use: give --quick to try the way on the CPU")
    if options.seconds <= _STOP_SECONDS:
        raise ValueError(
            f"--budget is {options.seconds:g}: give more than {_STOP_SECONDS:g} seconds, which stopping may take"
        )
    if not IMAGES.is_dir():
        print_error(f"experiments: {IMAGES} does not exist: CIFAR-10 is downloaded; put a copy there if it cannot be")
    options.seconds -= _STOP_SECONDS
    options.directory = options.directory or (QUICK / "runs" if options.quick else Path("runs/gpu"))
    status = _run(options)
    (table,) = _tables(options.tables, is_quick=options.quick)
    runs = load(_results(options))
    done = sum(has_run(runs, cell, 0) for cell in table.cells)
    print(f"{done} of {len(table.cells)} runs have finished; the same command continues in {options.directory}")
    return status


def _run(options: argparse.Namespace) -> int:
    for name, number in (("--seeds", options.seeds), ("--jobs", options.jobs)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}: give at least 1")
    directory = options.directory or (QUICK / "runs" if options.quick else Path("runs/tables"))
    results = _results(options)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    runner = Runner(
        tables=_tables(options.tables, is_quick=options.quick),
        most_seeds=options.seeds or 0,
        directory=directory,
        results=results,
        num_jobs=options.jobs,
        seconds=options.seconds,
    )
    with directory_lock(directory):
        check_defaults(directory)
        check_defaults(results)
        runner.run()
    for log in runner.failed.values():
        print_error(f"experiments: a run failed, repeat the command to resume it: {log}")
    return 1 if runner.failed else 0


def _results(options: argparse.Namespace) -> Path:
    """The folder of results: quick ones are not mixed with others, unless somebody says so."""
    return options.results or (QUICK / "results" if options.quick else RESULTS)


def _tables(names: str | None, *, is_quick: bool) -> list[Table]:
    """The named tables, or all but the GPU's; those of tiny cells are the ones that need no download."""
    default = [name for name, table in TABLES.items() if table is not GPU and not (is_quick and table in CIFAR_10)]
    chosen = default if names is None else names.split(",")
    if unknown := [name for name in chosen if name not in TABLES]:
        raise ValueError(f"--tables has {unknown[0]!r}: give names among {', '.join(TABLES)}")
    return [quick(TABLES[name]) if is_quick else TABLES[name] for name in chosen]


def _page(options: argparse.Namespace) -> int:
    docs = options.docs or (QUICK if options.quick else DOCS)
    tables, results = _tables(",".join(TABLES), is_quick=options.quick), _results(options)
    if (results / DEFAULTS_FILE).exists():  # where it does not, `check_defaults` would write it
        check_defaults(results)
    page.write(tables, results, docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
