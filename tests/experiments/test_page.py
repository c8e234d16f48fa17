"""docs/results.md and its plots: what the command generates from the results in the tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import DOCS, RESULTS
from experiments.cells import KNN, LINEAR, Cell, Claim, Table
from experiments.defaults import DEFAULTS_FILE, check_defaults
from experiments.page import PAGE, PICTURES, drawn_tables, text_of, write
from experiments.plots import draw, drawn, points
from experiments.results import RUNS_FILE, Run, load, seeds_of
from experiments.tables import TABLES
from experiments.tables.fashion import COMPONENTS

RUNS = load(RESULTS)


def test_the_page_is_what_the_command_generates() -> None:
    assert (DOCS / PAGE).read_text() == text_of(list(TABLES.values()), RUNS), "python -m experiments page"


def test_each_table_of_the_plan_with_results_has_a_plot_of_its_numbers() -> None:
    plotted = {table.name: table for table in drawn_tables(list(TABLES.values()), RUNS)}
    assert {path.stem for path in (DOCS / PICTURES).iterdir()} == plotted.keys(), "python -m experiments page"
    for name, table in plotted.items():
        assert drawn(DOCS / PICTURES / f"{name}.svg") == points(table, RUNS), f"{name}: python -m experiments page"


def test_results_in_the_tree_are_of_cells_that_exist() -> None:
    """A changed cell must be run again, or its results removed."""
    assert {path.name for path in RESULTS.iterdir()} == {DEFAULTS_FILE, RUNS_FILE}
    check_defaults(RESULTS)
    cells = [cell for table in TABLES.values() for cell in table.cells]
    assert {cell.identity(seed) for cell in cells for seed in seeds_of(RUNS, cell)} == RUNS.keys()


FIRST, SECOND = Cell(name="first"), Cell(name="second", settings={"epochs": 5.0})
LIST = Table(
    name="list",
    title="A list",
    source="Table 6",
    text="What corresponds to what.",
    cells=(FIRST, SECOND),
    measures={LINEAR: "linear", KNN: "kNN"},
    paper={"first": {LINEAR: 66.2}, "second": {LINEAR: 60.0}},
    claims=(Claim(text="the first is better", better="first", worse="second"),),
)


def run(**measures: float) -> Run:
    return {"measures": measures, "core_seconds": 1_800.0, "processor": "A processor"}


LIST_RUNS = {
    FIRST.identity(0): run(linear_top1=80.0, knn_top1=70.0),
    FIRST.identity(1): run(linear_top1=82.0, knn_top1=70.0),
    SECOND.identity(0): run(linear_top1=80.0, knn_top1=60.0),
}


def test_a_table_has_a_line_for_each_cell_and_the_papers_number() -> None:
    text = text_of([LIST], LIST_RUNS)
    assert "## A list (Table 6 of the paper)\n\nWhat corresponds to what.\n\n" in text
    assert "| | linear | kNN | seeds | paper |\n|---|---|---|---|---|\n" in text
    assert "| first | 81.0 ± 1.4 | 70.0 ± 0.0 | 2 | 66.2 |\n| second | 80.0 | 60.0 | 1 | 60.0 |\n" in text
    assert "- The first is better: not judged yet\n" in text
    assert "3 runs took at least 1.5 hours of one core (A processor), evaluations included." in text
    judged = text_of([LIST], LIST_RUNS | {SECOND.identity(1): run(linear_top1=81.0)})
    assert "- The first is better: **does not show**, +0.5 ± 6.4 (the paper +6.2), p = 0.5, corrected 0.5\n" in judged


def test_a_run_of_two_tables_is_counted_once_and_tables_without_runs_are_listed() -> None:
    other = replace(LIST, name="other", title="Other", cells=(FIRST,), claims=(), paper={})
    later = replace(
        LIST, name="later", title="Later", cells=(Cell(name="later", method="simclr"),), claims=(), paper={}
    )
    text = text_of([LIST, other, later], LIST_RUNS)
    assert "3 runs took at least 1.5 hours" in text
    assert "## Not run yet\n\n- Later (Table 6 of the paper)\n" in text


def test_tables_on_fashion_mnist_are_an_appendix_without_plots() -> None:
    runs = LIST_RUNS | {COMPONENTS.cells[0].identity(0): run(linear_top1=80.0)}
    body, appendix = text_of([LIST, COMPONENTS], runs).split("## Appendix: Fashion-MNIST")
    assert "images/tables/list.svg" in body
    assert "### Components (Table 1 of the paper)" in appendix
    assert "images/" not in appendix
    assert drawn_tables([LIST, COMPONENTS], runs) == [LIST]


def test_a_plot_is_the_same_whenever_it_is_drawn(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw(LIST, LIST_RUNS, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert drawn(tmp_path / "first.svg") == points(LIST, LIST_RUNS)
    assert points(LIST, LIST_RUNS) == [
        {"first": [80.0, 82.0], "second": [80.0]},
        {"first": [66.2], "second": [60.0]},
    ]


def test_a_page_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none has no results of these tables"):
        write(list(TABLES.values()), tmp_path / "none", tmp_path / "docs")
    assert not (tmp_path / "docs").exists()
