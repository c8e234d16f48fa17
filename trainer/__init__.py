"""Trains an encoder by instance classification; `python -m trainer --help`."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from trainer.torchvision_compat import declare_on_import

# Spinning OpenMP threads would take the cores from the shards, the data loading and each other. The variable is read
# once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import_module("weightserver")  # first, so that Ctrl-C during the import of a command leaves no traceback
declare_on_import()

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

_program = Path(sys.argv[0]).name  # "-m" while Python finds a module
if _program.startswith("pic-") or (_program == "-m" and any(word.startswith("trainer") for word in sys.orig_argv)):
    from trainer.display import show_loading

    show_loading()
