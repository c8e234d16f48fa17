"""Weights & Biases gets the records of metrics.jsonl; without its package or server one line says so."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from tests.helpers.small_run import losses, small_run
from trainer.loop import train
from trainer.run.weights_and_biases import weights_and_biases

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the optional package wandb is not installed: make test-all does"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(wandb|pydantic).*")


def test_a_missing_package_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--wandb-project needs the package wandb: pip install"):
        train(small_run(tmp_path / "run", wandb_project="pic"))


def test_a_kill_leaves_no_empty_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, each part of the run would have a log of its own."""

    def killed(path: Path, _: str) -> NoReturn:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt), weights_and_biases(small_run(tmp_path), "pic"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_wandb
def test_a_run_and_its_resumption_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, in files: each contains every loss as in metrics.jsonl."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(small_run(tmp_path / "run", wandb_project="pic"))
    identity = (tmp_path / "run" / "wandb-id").read_text()
    train(small_run(tmp_path / "run", wandb_project="pic", resume=True, resume_step=39))
    assert (tmp_path / "run" / "wandb-id").read_text() == identity
    first, second = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity.strip()}*/*.wandb"))
    found = losses(tmp_path / "run")
    assert all(str(loss).encode() in first.read_bytes() for loss in found)
    assert str(found[-1]).encode() in second.read_bytes()
    assert str(found[0]).encode() not in second.read_bytes(), "it resumes from a checkpoint"


@pytest.mark.slow
@needs_wandb
def test_a_missing_key_gives_one_line(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-m", "trainer", "synthetic", "--wandb-project", "pic"]
    command += ["--output", str(tmp_path / "run")]
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert re.search(r"^trainer: --wandb-project pic cannot be used: .*API key", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr
