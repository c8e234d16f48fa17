"""The tables' data, what is run of them and in which order, and how effects are judged."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.baselines import METHODS, REFERENCES
from experiments.cells import AFTER, LINEAR, PIC, PIXELS, Cell, Claim, Evaluation, Table
from experiments.data import num_images
from experiments.quick import quick
from experiments.results import Outcome, Results, collect, load, pooled, spread, unclear_cells, verdict
from experiments.runner import plan
from experiments.tables import TABLES


def table(*cells: Cell, **options: Any) -> Table:
    return Table(name="made", title="Made", cells=cells, **options)


def results(made: Table, **values: list[float]) -> Results:
    """Results with these linear accuracies, one for each seed, of the cells of a table."""
    runs = {
        name: {seed: {"id": f"{name}-{seed}", "measures": {LINEAR: value}} for seed, value in enumerate(numbers)}
        for name, numbers in values.items()
    }
    return Results(made, runs)


# ---- the tables


@pytest.mark.parametrize("is_quick", [False, True], ids=["real", "quick"])
@pytest.mark.parametrize("name", TABLES)
def test_settings_of_all_cells_are_valid(name: str, is_quick: bool) -> None:
    for cell in (quick(TABLES[name]) if is_quick else TABLES[name]).cells:
        config = cell.config(seed=2)
        of_file = re.fullmatch(rf"{AFTER}/evaluation/partition-(\d+)\.npy", config.labels or "")
        num_classes = int(of_file.group(1)) if of_file else 10
        config.check()
        images = num_images(config)
        config.visit_schedule(images)
        config.negative_sampler(num_classes if config.labels else images).check(config.batch_size)
        assert config.seed == config.order_seed == 2
        assert config.num_steps(images) >= (3 if is_quick else 100)


def test_a_table_with_a_claim_about_an_unknown_cell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown ones: \{'b'\}"):
        table(Cell(row="a"), claims=(Claim(text="", weights={"a": 1, "b": -1}),))
    with pytest.raises(ValueError, match="equal names"):
        table(Cell(row="a"), Cell(row="a"))


def test_equal_cells_of_two_tables_are_one_run() -> None:
    (epochs,) = (cell for cell in TABLES["lengths"].cells if cell.name == "epoch order, 40 epochs")
    (trial,) = (cell for cell in TABLES["trials"].cells if cell.name == "epoch order")
    assert epochs.identity(0) == trial.identity(0) != trial.identity(1)
    assert trial.identity(0) != replace(trial, method="simclr").identity(0)
    jobs = plan([Results(each, {}) for each in TABLES.values()], 1)
    assert len({job.key for job in jobs}) == len(jobs)
    assert len([job for job in jobs if job.seed == 0]) < sum(len(each.cells) for each in TABLES.values())


def test_the_base_of_our_own_options_is_the_default_run() -> None:
    (base, *changed), (pic,) = TABLES["beyond"].cells, [cell for cell in TABLES["methods"].cells if cell.row == "PIC"]
    assert base.identity(0) == pic.identity(0)
    assert len({cell.identity(0) for cell in (base, *changed)}) == 1 + len(changed)


def test_a_cell_whose_settings_name_another_is_another_run_with_it() -> None:
    first, second = (Cell(row="a", settings={"epochs": epochs}) for epochs in (1.0, 2.0))
    named = Cell(row="b", settings={"labels": f"{AFTER}/classes.npy"}, after=first)
    assert named.identity(0) != replace(named, after=second).identity(0)
    evaluated = Cell(row="b", evaluations=(Evaluation(name="maps", arguments=(AFTER,)),), after=first)
    assert evaluated.identity(0) == Cell(row="c").identity(0)


# ---- the plan


def test_a_seed_comes_after_the_earlier_ones_of_all_tables_and_long_cells_after_the_others() -> None:
    after = Cell(row="first", settings={"epochs": 7.0})
    first = Table(
        name="first",
        title="",
        cells=(Cell(row="long", settings={"epochs": 9.0}, is_long=True), Cell(row="short", after=after)),
    )
    second = Table(name="second", title="", cells=(Cell(row="other", settings={"epochs": 8.0}),), seeds=3)
    jobs = plan([Results(first, {}), Results(second, {})], 2)
    names = [(job.cell.row, job.seed) for job in jobs]
    assert names[:4] == [("first", 0), ("short", 0), ("other", 0), ("long", 0)]
    assert names[4:] == [("first", 1), ("short", 1), ("other", 1), ("long", 1), ("other", 2)]


def test_what_a_table_holds_is_not_run_again_unless_another_run_continues_it() -> None:
    first = Cell(row="first", settings={"epochs": 7.0})
    second = Cell(row="second", after=first)
    made = table(first, second)
    for kept, missing in (({}, ["first", "second"]), ({"first": [80.0]}, ["first", "second"])):
        assert [job.cell.row for job in plan([results(made, **kept)], 1)] == missing
    assert plan([results(made, first=[80.0], second=[81.0])], 1) == []
    assert [job.seed for job in plan([results(made, second=[81.0])], 1)] == [0], "the first alone"


def test_a_table_whose_effects_are_clear_has_no_further_seeds() -> None:
    made = table(
        Cell(row="a"),
        Cell(row="b", settings={"epochs": 5.0}),
        claims=(Claim(text="", weights={"a": 1, "b": -1}),),
    )
    trials = Table(
        name="trials", title="", cells=(Cell(row="c", settings={"epochs": 7.0}),), seeds=3, gives_spread=True
    )
    of_trials = results(trials, c=[80.0, 81.0, 82.0])  # a standard deviation of 1
    for effect, seeds in ((3.1, set()), (-3.1, set()), (2.9, {1, 2})):
        found = results(made, a=[80.0 + effect], b=[80.0])
        assert unclear_cells(found, [found, of_trials]) == ({"a", "b"} if seeds else set())
        jobs = plan([found, of_trials], 3)
        assert {job.seed for job in jobs if job.cell.row == "a"} == seeds
    assert unclear_cells(results(made, a=[90.0], b=[80.0]), []) == {"a", "b"}, "no spread is known"
    clear = results(made, a=[83.1], b=[80.0])
    assert {job.seed for job in plan([clear], 3, [of_trials]) if job.cell.row == "a"} == set(), "of a table not run"
    four = table(
        *(Cell(row=name) for name in "abcd"),
        claims=(Claim(text="", weights={"a": 1, "b": -1, "c": -1, "d": 1}),),
    )
    for effect, expected in ((4.1, False), (4.3, True)):  # 3 · √2 spreads
        found = results(four, a=[80.0 + effect], b=[80.0], c=[80.0], d=[80.0])
        assert (not unclear_cells(found, [of_trials])) == expected
    assert unclear_cells(results(made, a=[90.0]), [of_trials]) == {"a", "b"}, "a cell has not run"


def test_only_cells_whose_effects_are_unclear_have_further_seeds() -> None:
    made = table(
        *(Cell(row=name, settings={"epochs": float(number)}) for number, name in enumerate("abcd", 5)),
        claims=(Claim(text="", weights={"a": 1, "b": -1}), Claim(text="", weights={"b": 1, "c": -1})),
    )
    trials = Table(name="trials", title="", cells=(Cell(row="t"),), seeds=3, gives_spread=True)
    of_trials = results(trials, t=[80.0, 81.0, 82.0])
    found = results(made, a=[90.0], b=[80.0], c=[79.9], d=[70.0])
    assert [(job.cell.row, job.seed) for job in plan([found], 2, [of_trials])] == [("b", 1), ("c", 1)]
    assert unclear_cells(results(table(Cell(row="a")), a=[80.0]), [of_trials]) == {"a"}, "nothing is claimed"


# ---- statistics


def test_the_spread_is_pooled_over_cells() -> None:
    deviation, freedom = pooled([[1.0, 3.0], [10.0, 10.0, 13.0], [5.0]])
    assert freedom == 3
    assert deviation == pytest.approx(math.sqrt((2 + 6) / 3))
    assert math.isnan(pooled([[1.0], []])[0])


def test_the_spread_is_that_of_the_cells_compared_and_of_trials_alike() -> None:
    """A cell of the same table whose runs fail differently changes no other comparison; raw pixels have no spread."""
    made = table(
        Cell(row="a"),
        Cell(row="b", settings={"views": 2}),
        Cell(row="short", settings={"epochs": 2.9}),
        Cell(row="part", settings={"num_images": 1_000}),
        Cell(row="wild"),
        Cell(row="pixels", method=PIXELS),
    )
    found = results(
        made, a=[1.0, 2.0, 3.0], b=[6.0], short=[4.0], part=[4.0], wild=[0.0, 50.0, 90.0], pixels=[8.0, 8.0, 8.0]
    )
    assert spread(found, [found], LINEAR, ["a", "b"]) == (1, 2)
    assert spread(found, [found], LINEAR, ["a", "pixels"]) == (1, 2)
    trials = Table(name="trials", title="", cells=(Cell(row="c", settings={"epochs": 6.0}),), gives_spread=True)
    of_trials = results(trials, c=[1.0, 5.0, 5.0, 9.0, 5.0])
    deviation, freedom = spread(found, [found, of_trials], LINEAR, ["a", "b"])
    assert deviation == pytest.approx(math.sqrt((2 + 32) / 6))
    assert freedom == 6
    for other in ("short", "part"):
        assert spread(found, [found, of_trials], LINEAR, ["a", other]) == (1, 2), "own spread only"
        assert spread(found, [found, of_trials], LINEAR, [other])[1] == 0, "unknown"


@pytest.mark.parametrize(
    ("effect", "not_below", "outcome"),
    [
        (2.8, False, Outcome.SHOWN),
        (2.7, False, Outcome.NOT_SHOWN),
        (-2.7, False, Outcome.NOT_SHOWN),
        (-2.8, False, Outcome.REVERSED),
        (2.8, True, Outcome.SHOWN),
        (-2.7, True, Outcome.NO_LOSS),
        (-2.8, True, Outcome.REVERSED),
    ],
)
def test_an_effect_is_compared_with_students_t(effect: float, not_below: bool, outcome: Outcome) -> None:
    """The 97.5 % quantile for four degrees of freedom is 2.776."""
    claim = Claim(text="", weights={"a": 1, "b": -1}, not_below=not_below)
    made = table(Cell(row="a"), Cell(row="b"), claims=(claim,), paper={"a": {LINEAR: 70.0}, "b": {LINEAR: 60.0}})
    deviations = [-1.0, 0.0, 1.0]  # a standard deviation of 1, so an error of √(2/3) for three seeds each
    shifted = [effect * math.sqrt(2 / 3) + each for each in deviations]
    found = verdict(claim, results(made, a=shifted, b=deviations), [])
    assert found is not None
    assert found.outcome is outcome
    assert found.holds == (outcome in (Outcome.SHOWN, Outcome.NO_LOSS))
    assert found.error == pytest.approx(math.sqrt(2 / 3))
    assert found.paper == 10.0


def test_an_effect_without_its_runs_is_not_judged() -> None:
    claim = Claim(text="", weights={"a": 1, "b": -1})
    made = table(Cell(row="a"), Cell(row="b"), claims=(claim,))
    assert verdict(claim, results(made, a=[1.0]), []) is None
    unknown = verdict(claim, results(made, a=[1.0], b=[0.0]), [])
    assert unknown is not None
    assert unknown.outcome is Outcome.NOT_JUDGED
    assert not unknown.holds
    assert not unknown.is_clear


# ---- records


def finished_run(directory: Path, cell: Cell, seed: int, **measures: float) -> None:
    path = directory / cell.identity(seed)
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps({"measures": measures}))


def test_records_of_changed_cells_and_unfinished_evaluations_are_left_out(tmp_path: Path) -> None:
    maps = Evaluation(name="maps", arguments=("saliency",))
    kept, changed = Cell(row="kept", evaluations=(maps,)), Cell(row="changed", settings={"epochs": 1.0})
    file = tmp_path / "made.json"
    finished_run(tmp_path, kept, 1, linear_top1=80.0)
    finished_run(tmp_path, changed, 0, linear_top1=81.0)
    made = table(kept, changed)
    assert collect(tmp_path, file, made, seeds=2).values("kept", LINEAR) == []
    evaluation = tmp_path / kept.identity(1) / "evaluation" / "maps.json"
    evaluation.parent.mkdir()
    evaluation.write_text(json.dumps({"similarity": 0.7, "chosen": {}, "similarities": {"mean": 0.7, "bins": [1]}}))
    found = collect(tmp_path, file, made, seeds=2)
    assert found.values("kept", LINEAR) == [80.0]
    assert found.values("kept", "maps.similarities.mean") == [0.7]
    assert load(file, made).runs == found.runs
    again = load(file, table(kept, replace(changed, settings={"epochs": 2.0})))
    assert (again.values("kept", LINEAR), again.values("changed", LINEAR)) == ([80.0], [])


def test_runs_of_other_machines_are_kept(tmp_path: Path) -> None:
    cell = Cell(row="a")
    finished_run(tmp_path / "one", cell, 0, linear_top1=80.0)
    finished_run(tmp_path / "two", cell, 1, linear_top1=81.0)
    collect(tmp_path / "one", tmp_path / "made.json", table(cell), seeds=2)
    found = collect(tmp_path / "two", tmp_path / "made.json", table(cell), seeds=2)
    assert found.values("a", LINEAR) == [80.0, 81.0]


def test_every_method_is_known() -> None:
    used = {cell.method for each in TABLES.values() for cell in each.cells}
    assert used == {PIC, *METHODS, *REFERENCES}
