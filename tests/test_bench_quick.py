"""The comparison of benchmarks.quick with what was recorded."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import quick
from benchmarks.quick import Ratio, as_table, recorded

KNOWN = Ratio(p50=2.0, p10=1.8, p90=2.3)
RECORD = {
    "machine": {"processor": "A", "date": "2026-11-01", "commit": "abc1234"},
    "ratios": {"fetch, stored": {"p50": 2.0, "p10": 1.8, "p90": 2.3}},
}


def test_ratios_are_those_of_each_round() -> None:
    ratio = Ratio.of([2.0, 20.0, 3.0], [1.0, 10.0, 1.0])
    assert (ratio.p50, ratio.p10) == (2.0, 2.0)
    assert 2.0 < ratio.p90 <= 3.0


@pytest.mark.parametrize(
    ("p10", "p50", "p90", "mark"),
    [(2.4, 2.5, 2.6, "SLOWER"), (2.2, 2.5, 2.6, ""), (1.5, 1.6, 1.7, "FASTER"), (1.5, 1.6, 1.9, "")],
)
def test_marks_what_differs_beyond_the_spread(p10: float, p50: float, p90: float, mark: str) -> None:
    assert Ratio(p50, p10, p90).beside(KNOWN) == mark
    line = as_table({"fetch, stored": Ratio(p50, p10, p90)}, RECORD, comparable=True).splitlines()[1]
    assert line.endswith(mark or "(1.80–2.30)")


def test_another_processor_is_shown_and_not_marked() -> None:
    newer = {**RECORD, "machine": {"processor": "B", "date": "2026-11-20", "commit": "def5678"}}
    assert recorded({"A": RECORD, "B": newer}, "A") == (RECORD, True)
    assert recorded({"A": RECORD, "B": newer}, "C") == (newer, False)
    text = as_table({"fetch, stored": Ratio(9.0, 8.0, 10.0), "new": KNOWN}, RECORD, comparable=False)
    assert "2.00 (1.80–2.30)" in text
    assert "SLOWER" not in text
    assert "nothing is recorded for this processor" in text


def test_nothing_is_recorded_at_first() -> None:
    assert recorded({}, "A") == ({}, False)
    assert "-" in as_table({"fetch, stored": KNOWN}, {}, comparable=False)


@pytest.mark.parametrize("rounds", ["1", "-3", "x"])
def test_too_few_rounds_are_refused_before_anything_is_measured(
    rounds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quick", f"--rounds={rounds}"])
    with pytest.raises(SystemExit):
        quick.main()
    assert f"argument --rounds: must be a number of at least 2, got '{rounds}'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_record_is_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quick", "--rounds", "2", "--record", "--output", str(tmp_path)])
    quick.main()
    (record,) = json.loads((tmp_path / "quick.json").read_text()).values()
    assert all(ratio["p10"] <= ratio["p50"] <= ratio["p90"] for ratio in record["ratios"].values())
    assert "push to 4,096 rows, scattered, push" in record["ratios"]
    assert "nothing is recorded" in capsys.readouterr().out
    quick.main()
    assert f"recorded on {record['machine']['date']}" in capsys.readouterr().out
