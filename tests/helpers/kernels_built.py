"""The compiled kernel, built from its source by itself, and switches between it and NumPy."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from weightserver.core import kernel

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "weightserver/core").glob("*.c"))
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off")
NUMPY = None


def build(directory: Path, *flags: str) -> Path:
    """Compiles the kernel into a folder; skips the test without a C compiler or Python's headers."""
    compiler, headers = shutil.which("cc") or shutil.which("gcc"), Path(sysconfig.get_paths()["include"])
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("there is no C compiler with Python's headers")
    library = directory / "_kernel.abi3.so"
    options = [*(flags or FLAGS), "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run([compiler, *options, *map(str, SOURCES), "-o", str(library)], check=True)
    return library


def load(library: Path) -> kernel.Kernel:
    """The kernel in a file, as a module of its own."""
    loader = importlib.machinery.ExtensionFileLoader("weightserver.core._kernel", str(library))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return cast("kernel.Kernel", module)


@contextlib.contextmanager
def computing_with(module: kernel.Kernel | None) -> Iterator[None]:
    """Within the context, passes are computed by this kernel, or by NumPy (None)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "compiled", lambda: module)
        yield
