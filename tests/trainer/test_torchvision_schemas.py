"""torchvision and timm can be imported with any build of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.guard
def test_a_program_of_ones_own_imports_timm_and_torchvision(tmp_path: Path) -> None:
    code = (
        "from trainer.torchvision_schemas import declare_missing_schemas; declare_missing_schemas()\n"
        "import timm, torchvision; timm.create_model('resnet18', num_classes=0)\n"
        "from torchvision.transforms import v2; v2.Resize(8)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, cwd=tmp_path)
