"""docs/results.md, its appendix and their plots: what the command generates from the results in the tree."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from experiments import million
from experiments.__main__ import DOCS, RESULTS
from experiments.cells import KNN, LINEAR, Cell, Claim, Table
from experiments.defaults import DEFAULTS_FILE, check_defaults
from experiments.page import (
    APPENDIX,
    METHODS_PICTURE,
    MILLION_PICTURE,
    PAGE,
    PICTURES,
    appendix_of,
    drawn_tables,
    text_of,
)
from experiments.plots import curves, draw, draw_curves, points
from experiments.results import RUNS_FILE, Run, load, seeds_of
from experiments.tables import TABLES
from experiments.tables.cifar import BEYOND, METHODS, NEGATIVES
from experiments.tables.fashion import BEYOND as BEYOND_ON_FASHION_MNIST
from experiments.tables.fashion import COMPONENTS
from weightserver.core.correction import Schedule, apply_push

RUNS = load(RESULTS)


def drawn(picture: Path) -> Any:
    """The numbers in a plot's description: `points` or `curves`."""
    (described,) = ElementTree.parse(picture).iter("{http://purl.org/dc/elements/1.1/}description")
    return json.loads(described.text or "")


def test_the_page_is_what_the_command_generates(tmp_path: Path) -> None:
    end_to_end = million.section(RESULTS / million.RESULTS.name, tmp_path / "million.svg", MILLION_PICTURE)
    text = text_of(list(TABLES.values()), RUNS, end_to_end)
    assert (DOCS / PAGE).read_text() == text, "python -m experiments page"
    assert (DOCS / MILLION_PICTURE).exists(), "python -m experiments page"
    assert (DOCS / APPENDIX).read_text() == appendix_of(list(TABLES.values()), RUNS), "python -m experiments page"


def test_the_readme_has_the_accuracy_of_the_million() -> None:
    top1 = json.loads((RESULTS / million.RESULTS.name).read_text())["knn_top1"]["run"]
    assert f"by its features, {top1:.0f} % of the glyphs" in (DOCS.parent / "README.md").read_text()


def test_the_page_says_what_the_million_reaches_without_a_font_that_training_nearly_has(tmp_path: Path) -> None:
    text = " ".join(million.section(RESULTS / million.RESULTS.name, tmp_path / "million.svg", "")).replace("\n", " ")
    assert "if all of its images were told, 53.6 % of the others were, which is the least possible" in text


def test_without_correction_momentum_waits_for_the_next_visits_as_the_page_says() -> None:
    schedule = Schedule(momentum=0.9, weight_decay=0.0, learning_rates=np.full(500, 0.1))
    weight, momentum, last_step = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32), np.zeros(1, np.int64)
    moved, rows = list[float](), np.arange(1)
    for visit, active in itertools.product(range(8), range(3)):
        gradient = np.full((1, 1), visit + active == 0, np.float32)
        apply_push(schedule, False, 62 * visit + active, last_step, weight, momentum, gradient, rows=rows)
        moved.append(-float(weight[0, 0]))  # of 1 in all
    assert [round(moved[3 * visit - 1], 2) for visit in (1, 3, 8)] == [0.27, 0.61, 0.92], "PLAN.md has these"
    text = " ".join(text_of(list(TABLES.values()), RUNS).split())
    assert "without correction the rest waits, and moves it at its next visits" in text


def test_each_table_of_the_plan_with_results_has_a_plot_of_its_numbers() -> None:
    plotted = {table.name: table for table in drawn_tables(list(TABLES.values()), RUNS)}
    assert {path.stem for path in (DOCS / PICTURES).iterdir()} == plotted.keys(), "python -m experiments page"
    for name, table in plotted.items():
        assert drawn(DOCS / PICTURES / f"{name}.svg") == points(table, RUNS), f"{name}: python -m experiments page"


def test_the_picture_of_methods_is_drawn_once_one_has_two_seeds() -> None:
    found, picture = curves(METHODS, RUNS), DOCS / METHODS_PICTURE
    assert drawn(picture) == found if found else not picture.exists(), "python -m experiments page"


def test_results_in_the_tree_are_of_cells_that_exist(tmp_path: Path) -> None:
    """A changed cell must be run again, or its results removed."""
    assert {path.name for path in RESULTS.iterdir()} == {DEFAULTS_FILE, RUNS_FILE, million.RESULTS.name}
    shutil.copy(RESULTS / DEFAULTS_FILE, tmp_path)
    check_defaults(tmp_path)
    cells = [cell for table in TABLES.values() for cell in table.cells]
    assert {cell.identity(seed) for cell in cells for seed in seeds_of(RUNS, cell)} == RUNS.keys()


def test_runs_that_are_compared_had_the_same_copy_of_the_images() -> None:
    """Those on JPEGs are not paired with runs on the original CIFAR-10."""
    cells = [cell for table in TABLES.values() for cell in table.cells if cell.preset == "cifar-10"]
    assert len({RUNS[cell.identity(seed)]["images"] for cell in cells for seed in seeds_of(RUNS, cell)}) == 1


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
    assert "- Not judged before all seeds have run: the first is better\n" in text
    assert "| in the paper |" not in text, "it makes no such claim"
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
    assert "| not run yet | not run yet |" in text_of([NEGATIVES], {}), "claims of the paper, at the beginning"


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({"linear", "kNN"}, "BatchNorm of embeddings"),
        ({"kNN"}, "BatchNorm of embeddings"),
        (set(), "none"),
    ],
)
@pytest.mark.parametrize("first", [{"linear", "kNN"}, {"linear"}])
def test_an_idea_that_gains_on_both_data_sets_is_named(first: set[str], gains: set[str], said: str) -> None:
    """By the same measure."""
    said = said if first & gains else "none"
    runs: dict[str, Any] = {}
    for table, gained in ((BEYOND, first), (BEYOND_ON_FASHION_MNIST, gains)):
        for cell, seed in itertools.product(table.cells, range(5)):
            is_better = cell.name == "BatchNorm of embeddings"
            measured = {
                measure: 50.0 + seed % 2 + (1.0 + 0.01 * seed) * (is_better and heading in gained)
                for measure, heading in table.measures.items()
            }
            runs[cell.identity(seed)] = run(**measured)
    assert f"as well: {said}. What" in text_of([BEYOND], runs)
    del runs[BEYOND_ON_FASHION_MNIST.cells[-1].identity(4)]
    assert "as well:" not in text_of([BEYOND], runs)


def test_tables_on_fashion_mnist_are_an_appendix_without_plots() -> None:
    whole, without, *_ = COMPONENTS.cells
    runs = dict(LIST_RUNS)
    for seed, better, worse in ((0, 80.0, 70.0), (1, 81.0, 71.001)):
        runs |= {whole.identity(seed): run(linear_top1=better), without.identity(seed): run(linear_top1=worse)}
    body, appendix = text_of([LIST, COMPONENTS], runs), appendix_of([LIST, COMPONENTS], runs)
    assert "images/tables/list.svg" in body
    counted = "by the test images. Of 1 effects 0 do not show, and 0 are reversed. 1 show: - Components: "
    assert counted in " ".join(body.split())
    assert "## Components" not in body
    assert "## Components (Table 1 of the paper)" in appendix
    assert "images/" not in appendix
    assert "A list" not in appendix
    assert drawn_tables([LIST, COMPONENTS], runs) == [LIST]
    twice = replace(COMPONENTS, claims=(COMPONENTS.claims[0], replace(COMPONENTS.claims[0], measure=KNN)))
    for seed, better, worse in ((0, 80.0, 70.0), (1, 81.0, 71.001)):
        runs[whole.identity(seed)] = run(linear_top1=better, knn_top1=better)
        runs[without.identity(seed)] = run(linear_top1=worse, knn_top1=worse)
    both = "cosine softmax raises accuracy, linear; cosine softmax raises accuracy, kNN"
    assert both in " ".join(text_of([LIST, twice], runs).split())


def test_curves_are_means_over_the_seeds_of_cells_with_two(tmp_path: Path) -> None:
    early = [[0.0, 30.0], [0.5, 40.0], [1.0, 50.0]]
    late = [[0.0, 30.0], [0.5, 42.0], [1.0, 54.0]]
    runs: dict[str, Run] = {
        FIRST.identity(0): {**run(linear_top1=1.0), "curve": early},
        FIRST.identity(2): {**run(linear_top1=1.0), "curve": late},
        SECOND.identity(0): {**run(linear_top1=1.0), "curve": early},
        SECOND.identity(1): run(linear_top1=1.0),
    }
    found = curves(LIST, runs)
    assert found == {
        "first": [[0.0, 30.0, 0.0], [0.5, 41.0, pytest.approx(2**0.5)], [1.0, 52.0, pytest.approx(8**0.5)]]
    }
    draw_curves(found, tmp_path / "methods.svg")
    assert drawn(tmp_path / "methods.svg") == found
    assert ">first</text>" in (tmp_path / "methods.svg").read_text()


def test_a_plot_is_the_same_whenever_it_is_drawn(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw(LIST, LIST_RUNS, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert drawn(tmp_path / "first.svg") == points(LIST, LIST_RUNS)
    assert points(LIST, LIST_RUNS) == {"first": [80.0, 82.0], "second": [80.0]}
