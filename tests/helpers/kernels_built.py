"""The compiled kernel, built from its source by itself, and switches between it and NumPy."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from weightserver.core import kernel

ROOT = Path(__file__).parents[2]
(EXTENSION,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
NUMPY = None


class RefusedError(Exception):
    """Some files are not compiled: `args` are what the compiler says of each."""


def build(directory: Path, *flags: str, cflags: Sequence[str] = (), ldflags: Sequence[str] = ()) -> Path:
    """Compiles the kernel into a folder as setuptools does; skips the test without a C compiler or Python's headers.

    Args:
        flags: further options, after all others.
        cflags: CFLAGS of the environment. They come before the extension's own options, and the linker gets them too.
        ldflags: LDFLAGS, likewise.

    Raises:
        RefusedError: the compiler does not take all files.
    """
    compiler, headers = shutil.which("cc") or shutil.which("gcc"), Path(sysconfig.get_paths()["include"])
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("there is no C compiler with Python's headers")
    options = [*cflags, *EXTENSION["extra-compile-args"], *flags, "-Wall", "-Wextra", "-Werror"]
    objects, refusals = list[str](), list[str]()
    for source in EXTENSION["sources"]:
        objects.append(str(directory / f"{Path(source).stem}.o"))
        command = [compiler, *options, "-fPIC", f"-I{headers}", "-c", str(ROOT / source), "-o", objects[-1]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            refusals.append(done.stderr)
    if refusals:
        raise RefusedError(*refusals)
    library = directory / "_kernel.abi3.so"
    options = [*ldflags, *cflags, *objects, *EXTENSION["extra-link-args"], *flags]
    subprocess.run([compiler, "-shared", *options, "-o", str(library)], check=True)
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
