"""The notebook in examples/: its cells run one after the other, as a reader runs them, with a shorter training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = json.loads((ROOT / "examples/quickstart.ipynb").read_text())


def test_it_is_a_notebook_without_stored_output() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    cells = NOTEBOOK["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            compile("".join(cell["source"]), cell["id"], "exec")  # plain Python, without IPython's own syntax


@pytest.mark.slow  # four commands that import torch: half a minute
@pytest.mark.timeout(600)
def test_its_cells_train_look_at_neighbours_and_export(tmp_path: Path) -> None:
    script = "\n\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    assert "--epochs 100" in script
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script.replace("--epochs 100", "--steps 20")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "% of the images have a nearest neighbour of the same class" in done.stdout
    assert "features: (1, 128)" in done.stdout
