"""The tables' data, what is run of them and in which order, and what is kept of the runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.baselines.methods import METHODS
from experiments.cells import KNN, LINEAR, PIC, PIXELS, UNTRAINED, Cell, Claim, Evaluation, Table
from experiments.quick import quick
from experiments.results import RUNS_FILE, Runs, collect, load, seeds_of, values
from experiments.runner import plan
from experiments.tables import TABLES

MAPS = Evaluation(name="maps", arguments=("knn",))


def table(*cells: Cell, **options: Any) -> Table:
    return Table(name="made", title="Made", cells=cells, **options)


def have_run(*runs: tuple[Cell, int]) -> Runs:
    return {cell.identity(seed): {"measures": {LINEAR: 80.0}} for cell, seed in runs}


# ---- the tables


@pytest.mark.parametrize("is_quick", [False, True], ids=["real", "quick"])
@pytest.mark.parametrize("name", TABLES)
def test_settings_of_all_cells_are_valid(name: str, is_quick: bool) -> None:
    for cell in (quick(TABLES[name]) if is_quick else TABLES[name]).cells:
        config = cell.config(seed=2)
        config.check()
        config.sampling.visit_schedule(cell.num_images)
        config.negative_sampler(cell.num_images).check(config.optimization.batch_size)
        assert config.sampling.seed == config.sampling.order_seed == 2
        assert config.optimization.num_steps(cell.num_images) >= (3 if is_quick else 100)


def test_a_table_with_a_claim_about_an_unknown_cell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown ones: \{'b'\}"):
        table(Cell(name="a"), claims=(Claim(text="", better="a", worse="b"),))
    with pytest.raises(ValueError, match="equal names"):
        table(Cell(name="a"), Cell(name="a"))


def test_equal_cells_of_two_tables_are_one_run() -> None:
    (epochs,) = (cell for cell in TABLES["lengths"].cells if cell.name == "epoch order, 40 epochs")
    (default,) = (cell for cell in TABLES["windows"].cells if cell.name == "epoch order")
    assert epochs.identity(0) == default.identity(0) != default.identity(1)
    assert default.identity(0) != replace(default, method="simclr").identity(0)
    jobs = plan(list(TABLES.values()), {}, 1)
    assert len({job.key for job in jobs}) == len(jobs) < sum(len(each.cells) for each in TABLES.values())


def test_a_name_of_an_evaluation_is_one_evaluation_of_a_run() -> None:
    """Also where cells of two tables are one run: a result is known by that name."""
    known: dict[tuple[str, str], Evaluation] = {}
    for cell in (cell for each in TABLES.values() for cell in each.cells):
        for evaluation in cell.evaluations:
            assert known.setdefault((cell.identity(0), evaluation.name), evaluation) == evaluation


def test_every_method_is_known() -> None:
    used = {cell.method for each in TABLES.values() for cell in each.cells}
    assert used == {PIC, PIXELS, UNTRAINED, *METHODS}


# ---- the plan


def test_a_seed_comes_after_the_earlier_ones_of_all_tables() -> None:
    first = table(Cell(name="one", settings={"epochs": 9.0}), Cell(name="two"))
    second = table(Cell(name="other", settings={"epochs": 8.0}), seeds=2)
    for most, further in ((0, [("other", 1)]), (1, []), (2, [("one", 1), ("two", 1), ("other", 1)])):
        names = [(job.cell.name, job.seed) for job in plan([first, second], {}, most)]
        assert names == [("one", 0), ("two", 0), ("other", 0), *further]


def test_what_has_run_is_not_run_again_unless_it_lacks_an_evaluation() -> None:
    cell = Cell(name="a")
    assert [job.seed for job in plan([table(cell, seeds=3)], have_run((cell, 0), (cell, 2)), 0)] == [1]
    assert len(plan([table(cell), table(replace(cell, name="b", evaluations=(MAPS,)))], have_run((cell, 0)), 0)) == 1


# ---- results


def finished_run(directory: Path, cell: Cell, seed: int, processor: str = "", **measures: float) -> None:
    path = directory / cell.identity(seed)
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps({"measures": measures, "processor": processor}))


def test_runs_with_unfinished_evaluations_have_no_results(tmp_path: Path) -> None:
    cell, results = Cell(name="a", evaluations=(MAPS,)), tmp_path / "results"
    finished_run(tmp_path, cell, 1, linear_top1=80.0)
    assert collect(tmp_path, results, [table(cell)], seeds=2) == {}
    evaluation = tmp_path / cell.identity(1) / "evaluation" / "maps.json"
    evaluation.parent.mkdir()
    evaluation.write_text(json.dumps({"similarity": 0.7, "chosen": {}, "similarities": {"mean": 0.7, "bins": [1]}}))
    runs = collect(tmp_path, results, [table(cell)], seeds=2)
    assert runs == load(results)
    assert values(runs, cell, LINEAR) == {1: 80.0}
    assert values(runs, cell, "maps.similarities.mean") == {1: 0.7}
    assert seeds_of(runs, replace(cell, settings={"epochs": 2.0})) == [], "another cell"
    assert seeds_of(runs, replace(cell, evaluations=(Evaluation(name="other", arguments=()),))) == []


def test_runs_of_other_machines_and_cells_are_kept(tmp_path: Path) -> None:
    cell, other, results = Cell(name="a"), Cell(name="b", settings={"epochs": 2.0}), tmp_path / "results"
    finished_run(tmp_path / "one", cell, 0, linear_top1=80.0)
    finished_run(tmp_path / "two", cell, 1, linear_top1=81.0)
    finished_run(tmp_path / "two", other, 0, linear_top1=50.0)
    collect(tmp_path / "one", results, [table(cell)], seeds=2)
    collect(tmp_path / "two", results, [table(cell, other)], seeds=2)
    runs = collect(tmp_path / "none", results, [table(cell)], seeds=1)
    assert values(runs, cell, LINEAR) == {0: 80.0, 1: 81.0}
    assert values(runs, other, LINEAR) == {0: 50.0}


def test_a_run_that_is_repeated_for_an_evaluation_keeps_its_numbers(tmp_path: Path) -> None:
    """Its directory was lost, and another processor gives others: they would change without a word."""
    cell, results = Cell(name="a"), tmp_path / "results"
    finished_run(tmp_path / "lost", cell, 0, linear_top1=80.0)
    collect(tmp_path / "lost", results, [table(cell)], seeds=1)
    finished_run(tmp_path / "runs", cell, 0, processor="another", linear_top1=79.0, knn_top1=70.0)
    evaluation = tmp_path / "runs" / cell.identity(0) / "evaluation" / "maps.json"
    evaluation.parent.mkdir()
    evaluation.write_text('{"top1": 60.0}')
    evaluated = replace(cell, evaluations=(MAPS,))
    runs = collect(tmp_path / "runs", results, [table(cell), table(evaluated)], seeds=1)
    assert [values(runs, evaluated, name) for name in (LINEAR, KNN, "maps.top1")] == [{0: 80.0}, {0: 70.0}, {0: 60.0}]
    assert runs[cell.identity(0)]["processor"] == ""


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    cell = Cell(name="a")
    finished_run(tmp_path, cell, 0, linear_top1=80.0)
    for text in ("", "[]", "{}", '{"measures": 3}'):
        (tmp_path / cell.identity(0) / "result.json").write_text(text)
        with pytest.raises(ValueError, match=r"-0/result.json is damaged .*: remove it, and the cell runs again"):
            collect(tmp_path, tmp_path / "results", [table(cell)], seeds=1)


def test_damaged_results_are_named(tmp_path: Path) -> None:
    known = '{"x": {"core_seconds": 1.0%s}}'
    for text in (
        "{",
        "[]",
        '{"x": 1}',
        known % "",
        known % ', "measures": {"loss": null}',
        known % ', "measures": [1]',
    ):
        (tmp_path / RUNS_FILE).write_text(text)
        with pytest.raises(ValueError, match=r"runs.json has no results of runs \(.*\): restore it"):
            load(tmp_path)
