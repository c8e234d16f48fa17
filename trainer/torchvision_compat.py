"""Imports torchvision, and timm and torchmetrics, which need it, even with a CPU-only torch.

The torchvision wheel on PyPI is linked against CUDA; with a CPU-only torch its library cannot load, and
`import torchvision` fails with "operator torchvision::nms does not exist". Only its Python code is used (models, data
sets, transforms), so declaring the two schemas that it looks up is enough. If torchvision's own library loads, nothing
is declared.

    python -m trainer.torchvision_compat

makes `import torchvision` and `import timm` work in every program of the environment that it runs in, by a .pth file
that calls `declare_on_import` at start-up. Programs that import `trainer` need no such file. This module loads torch
when torchvision is imported, not before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
STARTUP_FILE = "pic_torchvision.pth"
# one line, as site requires; it reads this file alone and not the package
_STARTUP = (
    "import importlib.util as _u; _s = _u.spec_from_file_location('_pic_torchvision', {path!r}); "
    "_m = _u.module_from_spec(_s); _s.loader.exec_module(_m); _m.declare_on_import()\n"
)


def import_module(name: str) -> Any:
    """Imports and returns the module `name` of torchvision, timm or torchmetrics."""
    _declare_missing_operators()
    return importlib.import_module(name)


def declare_on_import() -> None:
    """Declares the missing operators as soon as something imports torchvision."""
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds torchvision as Python does, with a loader that declares the operators first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        loader: Any = spec and spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            _declare_missing_operators()
            execute(module)

        loader.exec_module = exec_module
        return spec


@functools.cache  # also keeps the Library object: dropping it would undeclare the schemas
def _declare_missing_operators() -> Any:
    if operators_load():
        return None
    import torch

    torch_library: Any = torch.library
    if hasattr(torch.ops.torchvision, "nms"):  # another copy of this module has declared them
        return None
    library = torch_library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)
    return library


@functools.cache
def operators_load() -> bool:
    """Whether torchvision's compiled operators can be loaded into this process."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    import torch

    operators: Any = torch.ops
    for path in Path(spec.origin).parent.glob("_C.*"):
        try:
            operators.load_library(str(path))
        except OSError:
            continue
        return True
    return False


def startup_line() -> str:
    """The content of the .pth file."""
    return _STARTUP.format(path=str(Path(__file__).resolve()))


def main() -> None:
    """Writes the .pth file, if it is needed, into the environment of this interpreter."""
    file = Path(sysconfig.get_path("purelib")) / STARTUP_FILE
    if operators_load():
        file.unlink(missing_ok=True)
    else:
        file.write_text(startup_line())


if __name__ == "__main__":
    main()
