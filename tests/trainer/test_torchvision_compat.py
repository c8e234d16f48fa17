"""torchvision and timm can be imported with any build of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import torchvision_compat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module",
    [pytest.param("torchvision.models", marks=pytest.mark.slow), pytest.param("timm", marks=pytest.mark.guard)],
)
def test_imports_in_a_fresh_process(module: str) -> None:
    code = f"from trainer.torchvision_compat import import_module; import_module({module!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.guard
@pytest.mark.parametrize("beginning", ["import trainer", "start-up file"])
def test_other_programs_import_timm_and_torchvision(beginning: str, tmp_path: Path) -> None:
    if beginning == "start-up file":  # as `site` runs it
        (tmp_path / torchvision_compat.STARTUP_FILE).write_text(torchvision_compat.startup_line() + "\n")
        beginning = f"import site; site.addsitedir({str(tmp_path)!r})"
    code = (
        f"{beginning}\nimport sys; assert 'torch' not in sys.modules, 'starting is fast'\n"
        "import timm, torchvision; timm.create_model('resnet18', num_classes=0)\n"
        "from torchvision.transforms import v2; v2.Resize(8)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, cwd=tmp_path)
