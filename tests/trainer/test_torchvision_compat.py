"""torchvision and timm can be imported with any build of torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [pytest.param("torchvision.models", marks=pytest.mark.slow), pytest.param("timm", marks=pytest.mark.guard)],
)
def test_imports_in_a_fresh_process(module: str) -> None:
    code = f"from trainer.torchvision_compat import import_module; import_module({module!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
