"""Cells that run for real: killed, resumed, evaluated, collected."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.__main__ import QUICK, main
from experiments.cells import KNN, LINEAR, LOSS, Cell, Evaluation, Table
from experiments.defaults import DEFAULTS_FILE, check_defaults
from experiments.quick import quick
from experiments.results import LOG_FILE, RESULT_FILE, RUNS_FILE, finished, load, values
from experiments.run_cell import write_cell
from experiments.runner import Runner
from experiments.tables import TABLES
from experiments.tables.gpu import GPU
from tests.helpers.watching import wait_until
from trainer.run.checkpoint_file import checkpoint_name
from weightserver.common.atomic_files import directory_lock

ROOT = Path(__file__).parent.parent.parent
TINY: dict[str, Any] = {
    "num_images": 256,
    "epochs": 13.0,  # 208 steps, with a checkpoint after 200
    "batch_size": 16,
    "num_negatives": 32,
    "window_size": 64,
    "window_stride": 16,
    "encoder": {"width": 4},
    "dim": 8,
}
FIRST = Cell(name="first", settings=TINY)
SECOND = Cell(
    name="second",
    settings=TINY | {"correction": "none", "epochs": 2.0},
    evaluations=(Evaluation(name="neighbours", arguments=("knn", "--k", "5")),),
)
LONG = Cell(name="long", settings=TINY | {"epochs": 10_000.0})
MADE = Table(name="made", title="Made", cells=(SECOND, FIRST))
WHOLE = Table(name="whole", title="Whole", cells=(FIRST,))


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cells find this tree; the command's handler of SIGTERM goes when it ends."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def runner(directory: Path, table: Table = MADE) -> Runner:
    return Runner(tables=[table], most_seeds=1, directory=directory, results=directory / "results", num_jobs=2)


def start(directory: Path, cell: Cell) -> tuple[Path, subprocess.Popen[bytes]]:
    path = directory / cell.identity(0)
    write_cell(path, cell, 0)
    command = [sys.executable, "-m", "experiments.run_cell", str(path)]
    with (path / LOG_FILE).open("wb") as log:
        return path, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def records(path: Path, *, until: int) -> list[dict[str, float]]:
    """The records of a run's steps before `until`."""
    lines = [line for line in (path / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in map(json.loads, lines) if record["step"] < until]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_cells_are_resumed_and_finish_with_the_same_numbers(tmp_path: Path) -> None:
    path, process = start(tmp_path / "killed", FIRST)
    assert process.stdin is not None
    try:
        wait_until((path / "checkpoints" / f"{checkpoint_name(200)}.safetensors").exists, seconds=120)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    assert not finished(tmp_path / "killed", FIRST, 0)
    before = records(path, until=200)

    for directory, table in ((tmp_path / "killed", MADE), (tmp_path / "whole", WHOLE)):
        made = runner(directory, table)
        made.run()
        assert made.failed == {}
    killed, whole = (load(tmp_path / name / "results") for name in ("killed", "whole"))
    for measure in (LINEAR, KNN, LOSS):
        assert values(killed, FIRST, measure).keys() == {0}
        assert values(killed, FIRST, measure) == values(whole, FIRST, measure)
    assert 0 < values(killed, SECOND, "neighbours.top1")[0] <= 100
    assert len(before) == 20
    assert records(path, until=200) == before, "these steps were not trained again: their times are the same"

    finished_at = (path / RESULT_FILE).stat().st_mtime_ns
    runner(tmp_path / "killed").run()
    assert (path / RESULT_FILE).stat().st_mtime_ns == finished_at, "a finished cell is skipped"


@pytest.mark.slow
def test_a_cell_stops_after_a_checkpoint_when_its_runner_ends(tmp_path: Path) -> None:
    path, process = start(tmp_path, LONG)
    assert process.stdin is not None
    wait_until((path / "metrics.jsonl").exists, seconds=120)
    command = [sys.executable, "-m", "experiments.run_cell", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as other:
        assert other.stderr is not None
        assert b"another process runs the cell" in other.stderr.read()
    assert other.returncode == 1
    process.stdin.close()
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert "interrupted" in (path / LOG_FILE).read_text()
    assert float((path / "cpu_seconds.json").read_text()) > 0


@pytest.mark.slow
def test_a_run_of_some_seconds_stops_and_the_next_one_continues(tmp_path: Path) -> None:
    table = Table(name="made", title="", cells=(FIRST,))
    for seconds in (0, math.inf):
        made = replace(runner(tmp_path, table), seconds=seconds)
        made.run()
        assert made.failed == {}
        assert finished(tmp_path, FIRST, 0) == (seconds > 0)


@pytest.mark.slow
def test_a_cell_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    broken = Cell(name="broken", settings=TINY | {"window_size": 2_048})
    short = Cell(name="short", settings=TINY | {"epochs": 1.0})
    table = Table(name="made", title="", cells=(broken, short))
    made = runner(tmp_path, table)
    made.run()
    (log,) = made.failed.values()
    assert "--window-size must lie in 1..256" in Path(log).read_text()
    assert finished(tmp_path, short, 0)


@pytest.mark.slow
def test_runs_that_all_fail_end_the_command(tmp_path: Path) -> None:
    """Without the images each of some hundred processes would start and fail."""
    missing = TINY | {"data_dir": str(tmp_path / "nowhere")}
    cells = tuple(Cell(name=f"{number}", settings=missing | {"epochs": float(number)}) for number in range(1, 9))
    made = runner(tmp_path, Table(name="made", title="", cells=cells))
    made.run()
    assert 4 <= len(made.failed) < 4 + made.num_jobs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cells_for_a_gpu_train_and_are_evaluated_on_a_cpu_in_their_short_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first minute on a GPU trains. Images are random, and lie where a user puts a copy."""
    pytest.importorskip("lightly", reason="SimCLR needs lightly: pip install -c constraints.txt '.[experiments]'")
    cells = tuple(cell for cell in GPU.cells if cell.name in ("K = 0.05 N, window", "SimCLR"))
    monkeypatch.setitem(TABLES, GPU.name, replace(GPU, cells=cells))
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "data" / "cifar-10"
    images.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = np.random.default_rng(len(name)).integers(0, 256, (600, 1 + 3 * 32 * 32), np.uint8)
        records[:, 0] = np.arange(600) % 10
        (images / f"{name}.bin").write_bytes(records.tobytes())
    status = main(["gpu", "--quick", "--budget", "100000"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "2 of 2 runs have finished" in captured.out
    runs = load(QUICK / "results")
    for record in runs.values():
        assert record["measures"].keys() >= GPU.measures.keys()
    assert sorted(record["measures"]["steps"] for record in runs.values()) == [40, 80], "of two views and of one"


def test_runs_for_a_gpu_that_other_machines_made_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came back from an earlier machine are results, without the runs' directories."""
    monkeypatch.chdir(tmp_path)
    cells = quick(GPU).cells
    record = {"measures": {LINEAR: 80.0, KNN: 79.0}, "core_seconds": 1.0}
    (QUICK / "results").mkdir(parents=True)
    (QUICK / "results" / RUNS_FILE).write_text(json.dumps({cell.identity(0): record for cell in cells}))
    assert main(["gpu", "--quick"]) == 0
    assert f"{len(cells)} of {len(cells)} runs have finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "--tables", "negatives,lenghts"],
            "--tables has 'lenghts': give names among cifar_trials, cifar_negatives",
        ),
        (["run", "--jobs", "0"], "--jobs is 0: give at least 1"),
        (["gpu", "--budget", "15", "--quick"], "--budget is 15: give more than 15 seconds"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_with_other_defaults_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "runs"
    check_defaults(directory)
    check_defaults(directory)
    file = directory / DEFAULTS_FILE
    made = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in made.items() if name != "pic.row_learning_rate"}))
    check_defaults(directory)
    assert json.loads(file.read_text()) == made, "an option that is new is checked from now on"
    for setting in ("pic.temperature", "pic.encoder.width", "pic.init_std", "cifar-10.temperature"):
        file.write_text(json.dumps(made | {setting: 2 * made[setting]}))
        for arguments in (
            ["run", "--directory", str(directory), "--results", str(tmp_path / "results")],
            ["page", "--results", str(directory), "--docs", str(tmp_path / "docs")],
        ):
            assert main(arguments) == 1
            error = capsys.readouterr().err
            assert f"{directory} was made with the default {setting} {2 * made[setting]}" in error
            assert error.endswith(f"remove its runs or results and {file.name}\n"), "which alone would refuse them"
            assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "no page"


def test_tiny_cells_have_results_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["page", "--quick"]) == 1
    error = capsys.readouterr().err
    assert "build/tables-quick/results has no results of these tables" in error
    assert "(python -m experiments run, with the same options)" in error


def test_mistakes_with_folders_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "runs")
    for arguments in (["run", "--directory", below], ["page", "--docs", below]):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert "Not a directory" in error
        assert error.count("\n") == 1
    with directory_lock(tmp_path / "runs"):
        assert main(["run", "--directory", str(tmp_path / "runs")]) == 1
    assert "is being written by another process" in capsys.readouterr().err
