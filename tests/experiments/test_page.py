"""docs/results.md and its plots: what the command generates from the results in the tree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import DOCS, RESULTS
from experiments.cells import KNN, LINEAR, Cell, Claim, Table
from experiments.defaults import DEFAULTS_FILE, check_defaults
from experiments.page import PAGE, PICTURES, text_of, write
from experiments.plots import draw, drawn, series
from experiments.results import STEPS_SECONDS, Results, load, with_curve
from experiments.tables import TABLES

EVERYTHING = [load(RESULTS / f"{table.name}.json", table) for table in TABLES.values()]
WITH_RUNS = {results.table.name: results for results in EVERYTHING if any(results.runs.values())}


def test_the_page_is_what_the_command_generates() -> None:
    assert (DOCS / PAGE).read_text() == text_of(EVERYTHING), "python -m experiments page"


def test_each_table_with_results_has_a_plot_of_its_numbers() -> None:
    dark = {f"{name}-dark": results for name, results in WITH_RUNS.items() if results.table.over_time}
    plotted = WITH_RUNS | dark
    assert {path.stem for path in (DOCS / PICTURES).iterdir()} == plotted.keys(), "python -m experiments page"
    for name, results in plotted.items():
        assert drawn(DOCS / PICTURES / f"{name}.svg") == list(series(results)), f"{name}: python -m experiments page"


def test_results_in_the_tree_are_of_cells_that_exist() -> None:
    """A changed cell must be run again, or its results removed."""
    assert {path.name for path in RESULTS.glob("*.json")} == {DEFAULTS_FILE, *(f"{name}.json" for name in WITH_RUNS)}
    check_defaults(RESULTS)
    for name, results in WITH_RUNS.items():
        stored = re.findall(r'"id": "([^"]+)"', (RESULTS / f"{name}.json").read_text())
        assert sorted(stored) == sorted(run["id"] for found in results.runs.values() for run in found.values())


def run(identity: str, **measures: float) -> dict[str, object]:
    return {"id": identity, "measures": measures, "core_seconds": 1_800.0, "processor": "A processor"}


LIST = Table(
    name="list",
    title="A list",
    source="Table 9",
    text="What corresponds to what.",
    cells=(Cell(row="first"), Cell(row="second")),
    measures={LINEAR: "linear", KNN: "kNN"},
    paper={"first": {LINEAR: 66.2}, "second": {LINEAR: 60.0}},
    claims=(
        Claim(text="the first is better", weights={"first": 1, "second": -1}, tried="Tried in vain."),
        Claim(text="nothing is lost", weights={"second": 1, "first": -1}, not_below=True),
    ),
)
LIST_RUNS = {
    "first": {0: run("a-0", linear_top1=80.0, knn_top1=70.0), 1: run("a-1", linear_top1=82.0, knn_top1=70.0)},
    "second": {0: run("b-0", linear_top1=80.0, knn_top1=60.0)},
}
GRID = Table(
    name="grid",
    title="A grid",
    cells=(Cell(row="with", column="K = 1"), Cell(row="with", column="K = 2"), Cell(row="without", column="K = 1")),
    measures={LINEAR: "linear"},
    paper={"with, K = 1": {LINEAR: 65.5}},
    claims=(Claim(text="K = 2 is better", weights={"with, K = 2": 1, "with, K = 1": -1}),),
)
GRID_RUNS = {"with, K = 1": {0: run("a-0", linear_top1=80.0)}, "without, K = 1": {0: run("c-0", linear_top1=79.0)}}


def test_a_list_has_a_line_for_each_cell_and_the_papers_number() -> None:
    text = text_of([Results(LIST, LIST_RUNS)])
    assert "## A list (Table 9 of the paper)" in text
    assert "| | linear | kNN | seeds | paper |\n|---|---|---|---|---|\n" in text
    assert "| first | 81.0 ± 1.4 | 70.0 ± 0.0 | 2 | 66.2 |\n| second | 80.0 | 60.0 | 1 | 60.0 |\n" in text
    assert "| A list (Table 9 of the paper) | 0 of 1 | 0 of 1 |  |  |\n" in text
    assert "2 effects are judged" in text
    assert (
        "- The first is better: **does not show beyond the spread**, +1.0 ± 22.0 (the paper +6.2). Tried in vain.\n"
        in text
    )
    assert "- Nothing is lost: **is undecided**, −1.0 ± 22.0 (the paper −6.2)\n" in text
    assert "3 runs took at least 1.5 hours of one core (A processor), evaluations included." in text
    assert "2 runs are still planned" in text, "both cells have the same settings"


def test_a_comparison_of_two_tables_is_counted_once_and_one_of_unknown_spread_is_not_judged() -> None:
    one = Results(replace(LIST, name="one", title="One"), LIST_RUNS)
    text = text_of([Results(LIST, LIST_RUNS), one])
    assert "| One" not in text
    assert "2 effects are judged" in text
    alone = {name: {0: runs[0]} for name, runs in LIST_RUNS.items()}
    assert "| A list (Table 9 of the paper) |  |  |  | 2 |\n" in text_of([Results(LIST, alone)])


def test_a_grid_has_a_column_for_each_column_and_dashes_for_what_has_not_run() -> None:
    text = text_of([Results(LIST, {}), Results(GRID, GRID_RUNS)])
    assert "| | | K = 1 | K = 2 |\n|---|---|---|---|\n" in text
    assert "| with | linear | 80.0 | – |\n| | paper | 65.5 |  |\n| without | linear | 79.0 |  |\n" in text
    assert "- K = 2 is better: not run yet" in text
    assert "## Not run yet\n\n- A list (Table 9 of the paper)\n" in text
    assert "2 runs took at least 1.0 hours" in text


def test_a_run_of_two_tables_is_counted_once() -> None:
    assert "4 runs took at least 2.0 hours" in text_of([Results(LIST, LIST_RUNS), Results(GRID, GRID_RUNS)])


@pytest.mark.parametrize(("table", "runs"), [(LIST, LIST_RUNS), (GRID, GRID_RUNS)], ids=["list", "grid"])
def test_a_plot_is_the_same_whenever_it_is_drawn(
    table: Table, runs: dict[str, dict[int, dict[str, object]]], tmp_path: Path
) -> None:
    results = Results(table, runs)
    for name in ("first.svg", "second.svg"):
        draw(results, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert drawn(tmp_path / "first.svg") == list(series(results))


def test_a_plot_names_what_lies_below_its_edge_and_the_papers_columns(tmp_path: Path) -> None:
    cut = replace(GRID, drawn_from=79.5, papers_columns={"K = 1": "all images"})
    draw(Results(cut, GRID_RUNS), tmp_path / "cut.svg")
    text = (tmp_path / "cut.svg").read_text()
    assert "79.0 ↓" in text
    assert "80.0 ↓" not in text
    assert "all images" in text


CURVES = Table(
    name="curves",
    title="Curves",
    cells=(Cell(row="fast"), Cell(row="slow")),
    measures={KNN: "kNN", STEPS_SECONDS: "seconds"},
    over_time=True,
)


def test_a_table_over_time_is_drawn_as_curves(tmp_path: Path) -> None:
    records = [
        {"seconds": 1.5, "initial_knn_top1": 50.0},
        {"seconds": 2.0, "knn_top1": 60.0},
        {"seconds": 0.25, "knn_top1": 61.0},
    ]
    slower = [{"seconds": 2 * record["seconds"]} for record in records]
    runs = {
        "fast": {
            0: with_curve(run("f-0", knn_top1=62.0), records),
            1: with_curve(run("f-1", knn_top1=64.0), slower),
        }
    }
    results = Results(CURVES, runs)
    assert series(results) == ({"fast": {"0": [50.0], "3.5": [60.0], "3.75": [61.0]}}, {})
    draw(results, tmp_path / "curves.svg")
    assert drawn(tmp_path / "curves.svg") == list(series(results))
    assert "| fast | 63.0 ± 1.4 | 3.8 | 2 |\n| slow | – | – | 0 |\n" in text_of([results]), "seconds of the drawn run"


def test_a_page_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none has no results of these tables"):
        write(list(TABLES.values()), tmp_path / "none", tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
