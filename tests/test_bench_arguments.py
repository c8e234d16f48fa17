"""Benchmarks refuse what has no spread before they measure, continue when interrupted, and run in any checkout."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import large_shard
from benchmarks.measure import save_results

ROOT = Path(__file__).parent.parent

TOO_FEW = [
    ("blocks", "--rounds", "1"),
    ("blocks", "--num-stored", "8191"),
    ("checkpoints", "--rounds", "1"),
    ("checkpoints", "--rows", "10000"),
    ("head", "--rounds", "1"),
    ("large_shard", "--rows", "327599"),
    ("measuring", "--rounds", "1"),
    ("partial_fc", "--steps", "21"),
    ("rows", "--rounds", "1"),
    ("rows", "--rounds", "x"),
    ("scale", "--steps", "6"),
    ("steps", "--rounds", "0"),
    ("steps", "--steps", "51"),
    ("trees", "--rounds", "1"),
    ("trees", "--shards", "0"),
    ("wire", "--steps", "1"),
]


@pytest.mark.parametrize(("name", "option", "value"), TOO_FEW)
def test_a_number_that_gives_no_spread_is_refused(
    name: str, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, option, value])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert f"argument {option}: must be a number of at least " in capsys.readouterr().err


@pytest.mark.parametrize(("given", "message"), [([], "at least one checkout"), (["nowhere"], "nowhere is no checkout")])
def test_what_is_no_checkout_is_refused(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trees", *given])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("benchmarks.trees").main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_leaves_earlier_results_which_need_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    save_results(tmp_path, "some", "command", {"first": 1}, "table")
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert json.loads(files["some.json"])["machine"]["commit"] == ""
    monkeypatch.setattr(Path, "write_text", fails_after_a_part)
    with pytest.raises(OSError, match="No space left"):
        save_results(tmp_path, "some", "command", {"second": 2}, "table")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def fails_after_a_part(path: Path, text: str) -> int:
    path.write_bytes(text[:9].encode())
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_fill_continues_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_shard, "ROWS_PER_WRITE", 63)
    whole = large_shard.Benchmark(tmp_path, 25 * 63 - 1).fill()["parts"]
    assert (len(whole), sum(part["rows"] for part in whole)) == (10, 25 * 63 - 1)
    (last,) = large_shard.Benchmark(tmp_path, 25 * 63 - 1).fill()["parts"]
    assert (last["rows"], last["rows_stored"]) == (2 * 63 - 1, 25 * 63 - 1), "after the last row"


def test_trees_measures_a_checkout_that_has_no_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "weightserver").symlink_to(ROOT / "weightserver")
    load = f"import runpy; runpy.run_path({str(ROOT / 'benchmarks/trees.py')!r})"
    subprocess.run([sys.executable, "-c", load], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=True)
