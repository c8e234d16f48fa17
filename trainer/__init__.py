"""Trains an encoder by instance classification; `python -m trainer --help`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# OpenMP threads that spin while they wait take the cores from the shards, the data loading and each other; it is read
# once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NEEDED = ("jinja2", "matplotlib", "PIL", "sklearn", "tensorboard", "timm", "torch", "torchvision", "tyro")
"""What the extra `trainer` installs, as it is imported."""

if lacking := [name for name in NEEDED if find_spec(name) is None]:
    _message = (
        f"the trainer needs {', '.join(lacking)}, which a weight server does not: install the extra too, "
        "pip install 'pic-weightserver[trainer]'"
    )
    if Path(sys.argv[0]).name.startswith(
        "pic-"
    ):  # a console script imports this before any of our code can print_error
        sys.exit(_message)
    raise ModuleNotFoundError(_message, name=__name__)  # `python -m` tells an error of this name in one line
