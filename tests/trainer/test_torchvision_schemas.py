"""torchvision and timm can be imported with any build of torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.torchvision_schemas import declare_missing_schemas

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    [pytest.param("torchvision.models", marks=pytest.mark.slow), pytest.param("timm", marks=pytest.mark.guard)],
)
def test_imports_in_a_fresh_process(module: str) -> None:
    code = f"from trainer.torchvision_schemas import import_module; import_module({module!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.guard
def test_a_program_of_ones_own_imports_timm_and_torchvision(tmp_path: Path) -> None:
    code = (
        "from trainer.torchvision_schemas import declare_missing_schemas; declare_missing_schemas()\n"
        "import timm, torchvision; timm.create_model('resnet18', num_classes=0)\n"
        "from torchvision.transforms import v2; v2.Resize(8)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, cwd=tmp_path)


def test_one_short_function_declares_the_schemas() -> None:
    assert len(inspect.getsource(declare_missing_schemas).splitlines()) <= 40
