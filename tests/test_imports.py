"""Importing changes nothing in the process: only commands do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

_IMPORT_ALL = """
import importlib, json, os, pkgutil, sys
sys.argv = ["pic-train"]
packages = ["weightserver", "trainer", "deploy"]
def modules():
    for package in packages:
        path = importlib.util.find_spec(package).submodule_search_locations
        for module in pkgutil.walk_packages(path, package + "."):
            if module.name != "weightserver.__main__":  # a command does its work
                yield module.name
def is_ours(name):
    return name.partition(".")[0] in packages
"""
_LIBRARIES = (
    _IMPORT_ALL
    + """
for name in modules():
    importlib.import_module(name)
print(json.dumps([name for name in sys.modules if not is_ours(name) and name != "__main__"]))
"""
)
"""Prints the names of all modules of libraries that ours import."""
_CHANGES = (
    _IMPORT_ALL
    + """
import atexit, contextlib, logging, signal, threading, warnings
from trainer.torchvision_schemas import declare_missing_schemas
declare_missing_schemas()  # of another library
for name in json.loads(sys.stdin.read()):
    with contextlib.suppress(ImportError):  # some parts of a library come into being by its import alone
        importlib.import_module(name)
import torch
from PIL import Image
def state():
    return {
        "sys.meta_path": list(sys.meta_path),
        "sys.path_hooks": list(sys.path_hooks),
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "os.environ": dict(os.environ),
        "warnings": list(warnings.filters),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "threads": threading.enumerate(),
        "log": (list(logging.getLogger().handlers), logging.getLogger().level),
        "atexit": atexit._ncallbacks(),
        "Pillow": (Image.MAX_IMAGE_PIXELS, sorted(Image.OPEN)),
        "standard streams": (sys.stdin, sys.stdout, sys.stderr),
    }
for name in [name for name in sys.modules if is_ours(name)]:
    del sys.modules[name]
for name in modules():
    before = state()
    importlib.import_module(name)
    after = state()
    for what, value in before.items():
        if after[what] != value:
            print(f"{name} changes {what}: {value!r}, then {after[what]!r}")
print("compared")
"""
)


def output(code: str, *, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        input=given,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.guard
def test_importing_changes_nothing_in_the_process() -> None:
    """Libraries are imported before: what they change is theirs."""
    libraries = output(_LIBRARIES)
    assert len(json.loads(libraries)) > 500
    assert output(_CHANGES, given=libraries).splitlines() == ["compared"]


def test_public_names_are_loaded_when_they_are_used() -> None:
    code = """
import sys, weightserver
assert not {"grpc", "numpy"} & set(sys.modules)
for package in ("weightserver", "trainer.data"):
    module = __import__(package, fromlist=["x"])
    for name in module.__all__:
        assert getattr(module, name) is getattr(module, name)
try:
    weightserver.Client
except AttributeError as error:
    print(error)
"""
    assert output(code) == "module 'weightserver' has no attribute 'Client'\n"
