"""Trains an encoder by instance classification; `python -m trainer --help`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Spinning OpenMP threads would take the cores from the shards, the data loading and each other. The variable is read
# once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NEEDED = (
    "defusedxml",
    "jinja2",
    "matplotlib",
    "PIL",
    "sklearn",
    "tensorboard",
    "timm",
    "torch",
    "torchmetrics",
    "torchvision",
    "tyro",
)
"""Modules that the extra `trainer` installs."""

if missing := [name for name in NEEDED if find_spec(name) is None]:
    _message = (
        f"the trainer needs {', '.join(missing)}, which a weight server does not: install the extra too, "
        "pip install 'pic-weightserver[trainer]'"
    )
    if Path(sys.argv[0]).name.startswith("pic-"):  # a console script imports this module before its own code runs
        sys.exit(_message)
    raise ModuleNotFoundError(_message, name=__name__)  # `python -m` prints an error of this name as one line
