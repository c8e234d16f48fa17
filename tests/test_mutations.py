"""Faults put in on purpose, one a line of code, each noticed by a test that mutations.toml names."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTATIONS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "mutations.toml").read_text())
_FOLDERS = ("weightserver", "trainer", "tests", "protos", "deploy", "benchmarks", "experiments", "docs")
COPIED = (*_FOLDERS, "pyproject.toml", "README.md")
OUTCOME = {0: "passed", 1: "failed", -signal.SIGBUS: "failed"}
"""By exit status. A page that is not in a file ends the process that reads it."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_is_one_place_of_the_code(name: str) -> None:
    """The code that it changes is there once, and so is the test that notices it."""
    mutation = MUTATIONS[name]
    assert (ROOT / mutation["file"]).read_text().count(mutation["before"]) == 1
    assert mutation["before"] != mutation["after"]
    path, test = mutation["noticed_by"].split("::")
    assert re.search(rf"^( *)def {re.escape(test.partition('[')[0])}\(", (ROOT / path).read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, to mutate."""
    root = tmp_path_factory.mktemp("mutated")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, root / name)
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_is_noticed(name: str, copied: Path) -> None:
    """The named test fails with the fault, and passes without it."""
    mutation = MUTATIONS[name]
    file = copied / mutation["file"]
    original = file.read_text()
    assert unchanged(copied, mutation["noticed_by"]) == "passed"
    file.write_text(original.replace(mutation["before"], mutation["after"]))
    try:
        assert run(copied, mutation["noticed_by"]) == "failed"
    finally:
        file.write_text(original)


@functools.cache
def unchanged(root: Path, test: str) -> str:
    """The outcome of a test without any fault."""
    return run(root, test)


def run(root: Path, test: str) -> str:
    """The outcome of a test in that copy of the project."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not docker", test]
    command += ["--hypothesis-seed=0"]  # not by chance
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode in OUTCOME, done.stdout[-3_000:] + done.stderr
    return OUTCOME[done.returncode]
