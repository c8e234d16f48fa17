"""The tables' data, what is run of them and in which order, and how effects are judged."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from experiments.baselines import METHODS, REFERENCES
from experiments.cells import AFTER, KNN, LESS, LINEAR, PIC, PIXELS, Cell, Claim, Evaluation, Table
from experiments.data import num_images
from experiments.effects import Outcome, pooled, spreads, unclear_cells, verdict
from experiments.quick import quick
from experiments.results import Results, check_results, collect, load, records
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
        of_file = re.fullmatch(rf"{AFTER}/evaluation/partition-(\d+)\.npy", config.sampling.labels or "")
        num_classes = int(of_file.group(1)) if of_file else 10
        config.check()
        images = num_images(config)
        config.sampling.visit_schedule(images)
        config.negative_sampler(num_classes if config.sampling.labels else images).check(config.optimization.batch_size)
        assert config.sampling.seed == config.sampling.order_seed == 2
        assert config.optimization.num_steps(images) >= (3 if is_quick else 100)


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
    of_trials = results(trials, c=[80.0, 80.1, 80.2])  # a standard deviation of 0.1: half an interval is 0.61
    for effect, seeds in ((0.62, set()), (-0.62, set()), (0.6, {1, 2})):
        found = results(made, a=[80.0 + effect], b=[80.0])
        assert unclear_cells(found, [found, of_trials]) == ({"a", "b"} if seeds else set())
        jobs = plan([found, of_trials], 3)
        assert {job.seed for job in jobs if job.cell.row == "a"} == seeds
    assert unclear_cells(results(made, a=[82.0], b=[80.0]), []) == {"a", "b"}, "no spread is known"
    assert unclear_cells(results(made, a=[90.0], b=[80.0]), [of_trials]) == {"a", "b"}, "that of a is not known"
    clear = results(made, a=[80.7], b=[80.0])
    assert {job.seed for job in plan([clear], 3, [of_trials]) if job.cell.row == "a"} == set(), "of a table not run"
    four = table(
        *(Cell(row=name) for name in "abcd"),
        claims=(Claim(text="", weights={"a": 1, "b": -1, "c": -1, "d": 1}),),
    )
    many = results(trials, c=[79.0, 81.0] * 10)  # a standard deviation of 1.03, 19 degrees of freedom
    for effect, expected in ((4.2, False), (4.5, True)):  # an interval of 4.3; 3 · √2 spreads are 4.35
        found = results(four, a=[80.0 + effect / 2], b=[80.0], c=[80.0], d=[80.0 + effect / 2])
        assert (not unclear_cells(found, [many])) == expected
    assert unclear_cells(results(made, a=[90.0]), [of_trials]) == {"a", "b"}, "a cell has not run"


def test_only_cells_whose_effects_are_unclear_have_further_seeds() -> None:
    made = table(
        *(Cell(row=name, settings={"epochs": float(number)}) for number, name in enumerate("abcd", 5)),
        claims=(Claim(text="", weights={"a": 1, "b": -1}), Claim(text="", weights={"b": 1, "c": -1})),
    )
    trials = Table(name="trials", title="", cells=(Cell(row="t"),), seeds=3, gives_spread=True)
    of_trials = results(trials, t=[80.0, 80.1, 80.2])
    found = results(made, a=[82.0], b=[80.0], c=[79.9], d=[70.0])
    assert [(job.cell.row, job.seed) for job in plan([found], 2, [of_trials])] == [("b", 1), ("c", 1)]
    assert unclear_cells(results(table(Cell(row="a")), a=[80.0]), [of_trials]) == {"a"}, "nothing is claimed"
    pixels = table(Cell(row="a"), Cell(row="p", method=PIXELS), claims=(Claim(text="", weights={"a": 1, "p": -1}),))
    assert unclear_cells(results(pixels, a=[80.0], p=[79.9]), [of_trials]) == {"a"}


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
        Cell(row="encoder", settings={"encoder": {"pool_size": 1}}),
        Cell(row="wild"),
        Cell(row="pixels", method=PIXELS),
    )
    found = results(
        made,
        a=[1.0, 2.0, 3.0],
        b=[5.0],
        short=[4.0],
        part=[4.0],
        encoder=[4.0],
        wild=[0.0, 50.0, 90.0],
        pixels=[8.0, 8.0, 8.0],
    )
    (near,) = spreads(found, [found], LINEAR, ["a", "b"])
    assert (set(near.cells), near.deviation, near.freedom) == ({"a", "b"}, 1, 2)
    (alone,) = spreads(found, [found], LINEAR, ["a", "pixels"])
    assert (alone.cells, alone.deviation, alone.freedom) == (("a",), 1, 2)
    low, high = spreads(found, [found], LINEAR, ["a", "b", "wild"])
    assert (set(low.cells), low.deviation, low.freedom) == ({"a", "b"}, 1, 2)
    assert (high.cells, high.freedom) == (("wild",), 2)
    assert high.deviation == pytest.approx(statistics.stdev([0.0, 50.0, 90.0]))
    trials = Table(name="trials", title="", cells=(Cell(row="c", settings={"epochs": 6.0}),), gives_spread=True)
    of_trials = results(trials, c=[1.0, 5.0, 5.0, 9.0, 5.0])
    (with_trials,) = spreads(found, [found, of_trials], LINEAR, ["a", "b"])
    assert with_trials.deviation == pytest.approx(math.sqrt((2 + 32) / 6))
    assert with_trials.freedom == 6
    for other in ("short", "part", "encoder"):
        (own,) = spreads(found, [found, of_trials], LINEAR, ["a", other])
        assert (own.deviation, own.freedom) == (1, 2), "own spread only"
        assert [each.freedom for each in spreads(found, [found, of_trials], LINEAR, [other])] == [0], "unknown"
    far = results(trials, c=[11.0, 15.0, 19.0])
    assert [each.freedom for each in spreads(found, [found, far], LINEAR, ["a", "b"])] == [2], "of other accuracies"


@pytest.mark.parametrize(
    ("effect", "not_below", "outcome"),
    [
        (2.8, False, Outcome.SHOWN),
        (2.7, False, Outcome.NOT_SHOWN),
        (-2.7, False, Outcome.NOT_SHOWN),
        (-2.8, False, Outcome.REVERSED),
        (2.8, True, Outcome.SHOWN),
        (-2.7, True, Outcome.NOT_SHOWN),
        (2.7, True, Outcome.NO_LOSS),
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
    assert found.half_width == pytest.approx(2.776 * math.sqrt(2 / 3), rel=1e-3)
    assert found.paper == 10.0


def test_a_loss_smaller_than_the_margin_counts_as_none() -> None:
    made = table(Cell(row="a"), Cell(row="b"))
    found = results(made, a=[79.9, 80.1, 80.0], b=[80.1, 80.2, 80.3])  # -0.2 ± 0.23
    for margin, outcome in ((0.5, Outcome.NO_LOSS), (0.4, Outcome.NOT_SHOWN)):
        claim = Claim(text="", weights={"a": 1, "b": -1}, not_below=True, margin=margin)
        judged = verdict(claim, found, [])
        assert judged is not None
        assert judged.outcome is outcome
        assert judged.half_width == pytest.approx(0.2267, abs=1e-3)


def test_cells_far_apart_are_compared_by_welchs_t() -> None:
    """As scipy.stats.ttest_ind(equal_var=False) has it."""
    made = table(Cell(row="a"), Cell(row="b"), Cell(row="pixels", method=PIXELS))
    a, b = [88.0, 88.2, 88.1], [70.0, 75.0, 82.0]
    found = results(made, a=a, b=b, pixels=[60.0])
    judged = verdict(Claim(text="", weights={"a": 1, "b": -1}), found, [])
    interval = ttest_ind(a, b, equal_var=False).confidence_interval()
    assert judged is not None
    assert judged.half_width == pytest.approx((interval.high - interval.low) / 2)
    exact = verdict(Claim(text="", weights={"a": 1, "pixels": -1}), found, [])
    assert exact is not None
    assert exact.half_width == pytest.approx(4.3027 * statistics.stdev(a) / math.sqrt(3), rel=1e-4)


def test_a_cell_of_one_seed_far_from_the_others_is_not_judged() -> None:
    made = table(Cell(row="a"), Cell(row="b"))
    claim = Claim(text="", weights={"a": 1, "b": -1})
    judged = verdict(claim, results(made, a=[88.0, 88.2, 88.1], b=[70.0]), [])
    assert judged is not None
    assert judged.outcome is Outcome.NOT_JUDGED


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


def finished_run(directory: Path, cell: Cell, seed: int, processor: str = "", **measures: float) -> None:
    path = directory / cell.identity(seed)
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps({"measures": measures, "processor": processor}))


def test_records_of_changed_cells_and_unfinished_evaluations_are_left_out(tmp_path: Path) -> None:
    maps = Evaluation(name="maps", arguments=("knn",))
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


def test_records_that_lack_an_added_evaluation_stay_in_the_file(tmp_path: Path) -> None:
    """They are no results until it is there, but are not lost: their runs may be on another machine."""
    cell, file = Cell(row="a"), tmp_path / "made.json"
    finished_run(tmp_path / "runs", cell, 0, linear_top1=80.0)
    collect(tmp_path / "runs", file, table(cell), seeds=1)
    more = table(replace(cell, evaluations=(Evaluation(name="maps", arguments=("knn",)),)))
    assert collect(tmp_path / "elsewhere", file, more, seeds=1).values("a", LINEAR) == []
    assert load(file, table(cell)).values("a", LINEAR) == [80.0]


def test_a_run_that_is_repeated_for_another_cell_keeps_its_numbers(tmp_path: Path) -> None:
    """Its directory was lost, and another processor gives others: they would change without a word."""
    cell = Cell(row="a")
    finished_run(tmp_path / "lost", cell, 0, linear_top1=80.0)
    collect(tmp_path / "lost", tmp_path / "one.json", table(cell), seeds=1)
    finished_run(tmp_path / "runs", cell, 0, processor="another", linear_top1=79.0, knn_top1=70.0)
    for _ in range(2):
        again = collect(tmp_path / "runs", tmp_path / "one.json", table(cell), seeds=1)
        assert (again.values("a", LINEAR), again.values("a", KNN)) == ([80.0], [70.0])
        found = again.runs["a"][0]
        assert (found["processor"], found["repeated"]) == ("", {"processor": "another"}), "whose kNN it is"
    recorded = records(tmp_path / "one.json", table(cell))
    other = collect(tmp_path / "runs", tmp_path / "other.json", table(cell), seeds=1, recorded=recorded)
    assert other.values("a", LINEAR) == [80.0]


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    cell = Cell(row="a")
    finished_run(tmp_path, cell, 0, linear_top1=80.0)
    for text in ("", "[]", "{}", '{"measures": 3}'):
        (tmp_path / cell.identity(0) / "result.json").write_text(text)
        with pytest.raises(ValueError, match=r"-0/result.json is damaged .*: remove it, and the cell runs again"):
            collect(tmp_path, tmp_path / "made.json", table(cell), seeds=1)


def test_a_lost_processor_time_does_not_replace_the_known_one(tmp_path: Path) -> None:
    cell, file = Cell(row="a"), tmp_path / "made.json"
    finished_run(tmp_path, cell, 0, linear_top1=80.0)
    for text, seconds in (("12.5", 12.5), ("", 12.5), ("20.0", 20.0)):
        (tmp_path / cell.identity(0) / "cpu_seconds.json").write_text(text)
        assert collect(tmp_path, file, table(cell), seeds=1).runs["a"][0]["core_seconds"] == seconds


def test_a_measure_may_be_a_difference() -> None:
    runs = {"a": {0: {"measures": {"one": 0.9, "other": 0.6}}, 1: {"measures": {"one": 0.8}}}}
    assert Results(table(Cell(row="a")), runs).values("a", f"one{LESS}other") == [pytest.approx(0.3)]


def test_results_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    cell = Cell(row="a")
    file = tmp_path / "made.json"
    finished_run(tmp_path / "one", cell, 0, linear_top1=80.0)
    collect(tmp_path / "one", file, table(cell), seeds=1)
    check_results(file, table(cell, Cell(row="b")))
    for changed in (table(Cell(row="b")), table(replace(cell, settings={"epochs": 2.0}))):
        with pytest.raises(ValueError, match=r"made.json has 1 runs of other cells than table made .*: remove them"):
            check_results(file, changed)
    known = '{"cells": {"a": {"0": {"id": "x", "core_seconds": 1.0%s}}}}'
    damaged = ("{", '{"table": "made"}', '{"cells": {"a": {"0": {}}}}', '{"cells": []}', "[]")
    for text in (*damaged, known % "", known % ', "measures": {"loss": null}', known % ', "measures": [1]'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"made.json is not a table's results \(.*\): restore it"):
            load(file, table(cell))


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
