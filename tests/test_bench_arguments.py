"""Benchmarks refuse numbers of which there is no spread before they measure anything."""

from __future__ import annotations

import importlib
import sys

import pytest

TOO_FEW = [
    ("answers", "--rounds", "1"),
    ("blocks", "--rounds", "1"),
    ("checkpoints", "--rounds", "1"),
    ("head", "--rounds", "1"),
    ("large_shard", "--rows", "327599"),
    ("measuring", "--rounds", "1"),
    ("partial_fc", "--steps", "21"),
    ("rows", "--rounds", "1"),
    ("rows", "--rounds", "x"),
    ("scale", "--steps", "1"),
    ("steps", "--rounds", "0"),
    ("trees", "--rounds", "1"),
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
