"""The comparison of benchmarks.quick with what was recorded."""

import json
import math
import sys
import time
from functools import partial
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from benchmarks import quick
from benchmarks.measure import seconds_in_turn
from benchmarks.quick import BETWEEN_RUNS, LEAST_ROUNDS, Ratio, as_table, recorded
from benchmarks.rows import Calls

KNOWN = Ratio(p50=2.0, low=1.9, high=2.2)
RECORD = {
    "machine": {"processor": "A", "date": "2026-11-01", "commit": "abc1234"},
    "ratios": {"fetch, stored": {"p50": 2.0, "low": 1.9, "high": 2.2}},
}


@pytest.mark.parametrize("num_rounds", [6, LEAST_ROUNDS, 101])
def test_the_interval_contains_the_median(num_rounds: int) -> None:
    runs = np.random.default_rng(num_rounds).lognormal(log(3), 0.2, (2_000, num_rounds)).tolist()
    ratios = [Ratio.of(run, [1.0] * num_rounds) for run in runs]
    assert all(ratio.low <= ratio.p50 <= ratio.high for ratio in ratios)
    share = np.mean([ratio.low <= 3 <= ratio.high for ratio in ratios])
    assert 0.935 < share < 0.98, "95 % to the 96.9 % of six rounds, and three standard errors of 2,000 runs"


def test_ratios_are_those_of_each_round() -> None:
    assert Ratio.of([2.0, 20.0, 3.0, 2.0, 4.0, 6.0], [1.0, 10.0, 1.0, 1.0, 2.0, 3.0]) == Ratio(2.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("p50", "relative", "mark"),
    [
        (2.0 * exp(math.hypot(log(1.1), log(1.02), log(BETWEEN_RUNS)) + 1e-6), 1.02, "SLOWER"),
        (2.0 * exp(math.hypot(log(1.1), log(1.02), log(BETWEEN_RUNS)) - 1e-6), 1.02, ""),
        (1.6, 1.02, "FASTER"),
        (1.6, 1.3, ""),
        (2.0, 1.02, ""),
    ],
)
def test_marks_what_differs_beyond_the_intervals(p50: float, relative: float, mark: str) -> None:
    ratio = Ratio(p50, p50 / relative, p50 * relative)
    assert ratio.beside(KNOWN) == mark
    line = as_table({"fetch, stored": ratio}, RECORD).splitlines()[1]
    assert line.endswith(mark or "2.00 (1.90–2.20)")


def test_another_processor_is_shown_and_not_marked() -> None:
    newer = {**RECORD, "machine": {"processor": "B", "date": "2026-11-20", "commit": "def5678"}}
    assert recorded({"A": RECORD, "B": newer}, "A") == (RECORD, "")
    record, unlike = recorded({"A": RECORD, "B": newer}, "C")
    assert record == newer
    text = as_table({"fetch, stored": Ratio(9.0, 8.0, 10.0), "new": KNOWN}, record, unlike)
    assert "2.00 (1.90–2.20)" in text
    assert "SLOWER" not in text
    assert "nothing is marked: nothing is recorded for this processor" in text
    assert recorded({}, "A")[0] == {}, "at first"


@pytest.mark.parametrize(("budget", "num_rounds"), [(0, 4), (-1, 4), (60, 7)])
def test_rounds_end_with_the_budget(budget: float, num_rounds: int) -> None:
    calls: Calls = {"a": partial(time.sleep, 0), "b": partial(time.sleep, 0)}
    seconds = seconds_in_turn(calls, rounds=7, budget=budget, least_rounds=4)
    assert {name: len(times) for name, times in seconds.items()} == {"a": num_rounds, "b": num_rounds}


@pytest.mark.slow
def test_a_record_is_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "LEAST_ROUNDS", 6)
    monkeypatch.setattr(sys, "argv", ["quick", "--seconds", "0", "--record", "--output", str(tmp_path / "new")])
    quick.main()
    (record,) = json.loads((tmp_path / "new" / "quick.json").read_text()).values()
    assert all(ratio["low"] <= ratio["p50"] <= ratio["high"] for ratio in record["ratios"].values())
    assert "push to 4,096 rows, scattered, push" in record["ratios"]
    assert "nothing is recorded" in capsys.readouterr().out
    quick.main()
    assert f"recorded on {record['machine']['date']}" in capsys.readouterr().out
