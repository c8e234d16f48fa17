"""Imports torchvision, and timm and torchmetrics, which need it, even with a CPU-only torch.

The torchvision wheel on PyPI is linked against CUDA; with a CPU-only torch its library cannot load, and
`import torchvision` fails with "operator torchvision::nms does not exist". We use only its Python code (models, data
sets), so declaring the two schemas that it looks up is enough. If torchvision's own library loads, nothing is declared.
"""

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_module(name: str) -> Any:
    """Imports and returns the module `name` of torchvision, timm or torchmetrics."""
    _declare_missing_operators()
    return importlib.import_module(name)


@functools.cache  # also keeps the Library object: dropping it would undeclare the schemas
def _declare_missing_operators() -> Any:
    if operators_load():
        return None
    torch_library: Any = torch.library
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
    operators: Any = torch.ops
    for path in Path(spec.origin).parent.glob("_C.*"):
        try:
            operators.load_library(str(path))
        except OSError:
            continue
        return True
    return False
