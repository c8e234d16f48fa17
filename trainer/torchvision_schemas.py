"""Imports torchvision, and timm and torchmetrics, which need it, even with a CPU-only torch.

The torchvision wheel on PyPI is linked against CUDA; with a CPU-only torch its library cannot load, and
`import torchvision` fails with "operator torchvision::nms does not exist". Its Python code (models, data sets,
transforms) only looks up the schemas of two operators.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


@functools.cache  # also keeps the Library object: dropping it would undeclare the schemas
def declare_missing_schemas() -> Any:
    """Declares the schemas that torchvision looks up, unless its own operators load; call it before importing it.

    Returns:
        The declaration; None if torchvision's operators work.
    """
    operators: Any = torch.ops
    spec = importlib.util.find_spec("torchvision")
    for path in Path((spec and spec.origin) or "").parent.glob("_C.*"):
        with suppress(OSError):
            operators.load_library(str(path))
    if hasattr(operators.torchvision, "nms"):
        return None
    libraries: Any = torch.library
    library = libraries.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def import_module(name: str) -> Any:
    """Imports and returns the module `name` of torchvision, or of a library that imports it."""
    declare_missing_schemas()
    return importlib.import_module(name)
