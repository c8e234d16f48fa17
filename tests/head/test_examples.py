"""The scripts in examples/, with the libraries that they are for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
LIBRARIES = {
    "lightning_head": ["lightning"],
    "lightly_head": ["lightly"],
    "transformers_head": ["transformers", "accelerate"],
}


def test_examples_are_short() -> None:
    """As docs/own-loop.md says."""
    assert all(len(path.read_text().splitlines()) < 90 for path in EXAMPLES.values())


def run(name: str, output: Path, epochs: int) -> tuple[int, float]:
    """Runs an example for some epochs; returns the step and the loss that it prints last."""
    step, loss = re.findall(r"step (\d+): loss ([\d.]+)", printed(name, output, epochs))[-1]
    return int(step), float(loss)


def printed(name: str, output: Path, epochs: int) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES[name], output, str(epochs)],
        cwd=output.parent,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.guard
def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    """It continues where it ended."""
    first = run("own_loop", tmp_path / "run", 1)
    second = run("own_loop", tmp_path / "run", 2)
    assert (first[0], second[0]) == (14, 28)
    assert second[1] < first[1]


@pytest.mark.slow
def test_identities_that_were_never_seen_are_found(tmp_path: Path) -> None:
    """It continues where it ended, and what it learns from known identities holds for others."""
    first, second = (printed("identities", tmp_path / "run", epochs) for epochs in (1, 5))
    unseen = [int(percent) for percent in re.findall(r"unseen (\d+)%", first + second)]
    assert len(unseen) == 5
    assert unseen[-1] >= 1.5 * unseen[0], unseen
    assert "step 250:" in second


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LIBRARIES))
def test_examples_with_libraries(tmp_path: Path, name: str) -> None:
    """Those whose library saves checkpoints continue where they ended."""
    if missing := [library for library in LIBRARIES[name] if importlib.util.find_spec(library) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install -c constraints.txt '.[examples]'")
    first = run(name, tmp_path / "run", 2)
    assert first[0] == 28
    if name == "lightly_head":
        return
    second = run(name, tmp_path / "run", 4)
    assert second[0] == 56
    assert second[1] < first[1]
