"""The packages as they are installed: built from the sources, into an empty environment, in every Python at hand."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from trainer.loading import NEEDED
from weightserver.common.installing import install_advice

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PACKAGES = ("weightserver", "trainer")
OTHER_PYTHONS = [version for version in ("3.11", "3.12", "3.13", "3.14") if not sys.version.startswith(f"{version}.")]
NEEDS_TRAINER = {"torch", "torchvision", "trainer", "benchmarks", "experiments"}
KERNEL = "weightserver/core/_kernel.abi3.so"
HAS_COMPILER = shutil.which("cc") is not None and Path(sysconfig.get_paths()["include"], "Python.h").exists()
USE = """
import numpy as np, weightserver
from weightserver import LocalCluster, TableSpec, WeightClient
with LocalCluster(2) as cluster, WeightClient(cluster.addresses) as client:
    client.create_table(TableSpec(num_rows=1000, dim=8))
    client.extend_schedule(0, np.full(10, 0.1, np.float32))
    client.open_session("run")
    rows = np.arange(0, 1000, 7)
    before = client.fetch(rows, step=0)
    client.push_gradients(rows, np.ones((len(rows), 8), np.float32), step=0)
    moved = client.fetch(rows, step=1) - before
    assert np.allclose(moved, -0.1, atol=1e-4), moved
    assert client.describe().rows_stored == len(rows)
print(weightserver.__file__)
"""
TRAIN = """
import sys
from pathlib import Path
from tests.helpers.small_run import small_run
from trainer.loop import train
result = train(small_run(Path(sys.argv[1])))
import torch
print(torch.__version__.partition("+")[0], result.summary["loss"])
"""
SHOW_KERNEL = "from weightserver.core import kernel; print(kernel.name())"
IMPORT_ALL = """
import importlib, pkgutil, weightserver
for module in pkgutil.walk_packages(weightserver.__path__, "weightserver."):
    if not module.name.endswith("__main__") and not module.name.startswith("weightserver.torch"):
        importlib.import_module(module.name)
"""


def run(
    *command: object, ok: bool = True, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Without what would lead Python to the sources."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= variables
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )
    assert (done.returncode == 0) == ok, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python_of(version: str) -> Path | None:
    """An interpreter of that version on the PATH or in pyenv."""
    found = [shutil.which(f"python{version}")]
    found += sorted(map(str, (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python3")), reverse=True)
    for path in filter(None, found):
        code = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:  # pyenv's shims are there for versions that it does not run
            return Path(path)
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and, made from it, the wheel."""
    directory = tmp_path_factory.mktemp("built")
    sources, tools, built = directory / "sources", directory / "tools", directory / "dist"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "runs", "data-*", "build", "*.so")
    for name in ("weightserver", "trainer", "tests", "benchmarks", "experiments", "deploy", "docs", "protos"):
        shutil.copytree(ROOT / name, sources / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    (backend,) = PROJECT["build-system"]["requires"]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    fetched = subprocess.run([*pip, "install", "-q", "--target", tools, backend], capture_output=True, check=False)
    if fetched.returncode:
        pytest.skip(f"no package index to install {backend} from")
    make = (
        f"import os, sys; sys.path.insert(0, {str(tools)!r})\n"
        "from setuptools import build_meta\n"
        f"os.makedirs({str(built)!r}); build_meta.build_sdist({str(built)!r})\n"
    )
    run(sys.executable, "-c", make, cwd=sources)
    (archive,) = built.glob("*.tar.gz")
    run(*pip, "wheel", "-q", "--no-deps", "-w", built, archive)
    return built


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_without_kernel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the source archive by a compiler that fails."""
    directory, (archive,) = tmp_path_factory.mktemp("without-kernel"), built.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "-w", directory, archive, CC="/bin/false")
    (wheel,) = directory.glob("*.whl")
    return wheel


def environment(directory: Path, python: Path, *packages: object) -> Path:
    """The folder of the programs of a new environment with these packages."""
    run(python, "-m", "venv", directory)
    pip = (directory / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-c", ROOT / "constraints.txt", *packages)
    run(*pip, "check")
    return directory / "bin"


def check_weight_server(programs: Path, elsewhere: Path) -> None:
    """The weight server works without torch, and the trainer's commands say how to install what they need."""
    installed = run(programs / "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=elsewhere)
    assert installed.stdout.strip() == "None"
    run(programs / "python", "-W", "error", "-c", IMPORT_ALL, cwd=elsewhere)
    used = run(programs / "python", "-W", "error", "-c", USE, cwd=elsewhere).stdout
    assert Path(used.strip()).is_relative_to(programs.parent), used
    assert "serve" in run(programs / "weightserver", "--help", cwd=elsewhere).stdout
    *_, last = run(programs / "python", "-c", "import weightserver.torch", ok=False, cwd=elsewhere).stderr.splitlines()
    assert last == f"ModuleNotFoundError: weightserver.torch needs torch: {install_advice('torch')}"
    message = install_advice("trainer")
    assert "weightserver" in run(programs / "pic", "serve", "--help-all", cwd=elsewhere).stdout
    commands: list[list[object]] = [[programs / "pic", "train", "x"]]
    commands += [[programs / name] for name in ("pic-train", "pic-evaluate", "pic-data")]
    commands += [[programs / "python", "-m", name] for name in ("trainer", "trainer.evaluate", "trainer.data")]
    for command in commands:
        (line,) = run(*command, "--help-all", ok=False, cwd=elsewhere).stderr.splitlines()
        assert "the trainer needs" in line, line
        assert message in line, line


# ---- declared requirements


def names(requirements: list[str]) -> set[str]:
    """Normalised names of the packages that are required."""
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}


def modules(path: Path) -> set[str]:
    """Full names of all modules that a file imports, and of all else that it imports by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imported(package: str) -> set[str]:
    """Packages, as they are declared, that its modules import wherever they do."""
    found = {name.partition(".")[0] for path in (ROOT / package).rglob("*.py") for name in modules(path)}
    others = found - sys.stdlib_module_names - {*PACKAGES, "google"}  # whose package is protobuf
    return names([providers()[name][0] for name in others if name in providers()])


@functools.cache
def providers() -> Mapping[str, list[str]]:
    """The package that installed a module."""
    return importlib.metadata.packages_distributions()


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    server = names(PROJECT["project"]["dependencies"])
    optional = {name for extra in ("faiss", "otel", "torch") for name in names(extras[extra])}
    assert imported("weightserver") <= server | optional
    assert imported("trainer") <= server | {
        name for extra in ("heic", "ray", "trainer", "wandb") for name in names(extras[extra])
    }
    assert names([providers()[name][0] for name in NEEDED]) <= names(extras["trainer"])


TOOLS = ("dev", "docs")
"""Extras that are for work on the project itself."""


def required(*, tools: bool = False) -> list[str]:
    """All requirements of the package, on request with those of its development."""
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    groups = [requirements for name, requirements in extras.items() if tools or name not in TOOLS]
    return [*PROJECT["project"]["dependencies"], *(one for group in groups for one in group)]


def explained() -> set[str]:
    """The requirements in pyproject.toml whose line has a comment."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return {found[1] for line in lines if (found := re.match(r'\s*"([^"]+)",\s*#', line))}


def test_requirements_are_lower_bounds() -> None:
    pinned = [one for one in required(tools=True) if not re.fullmatch(r"[\w.-]+(\[\w+\])?>=(\d+!)?[\d.]+", one)]
    assert set(pinned) <= explained(), "a cap says which version is known to break"
    assert not [one for one in required(tools=True) if "==" in one]


def test_a_bound_that_excludes_all_but_the_pinned_version_says_why() -> None:
    exact = dict(line.lower().replace("_", "-").split("==") for line in CONSTRAINTS if "==" in line)
    bounds = [(one, *one.lower().replace("_", "-").split(">=")) for one in required()]
    assert {one for one, name, least in bounds if f"{exact[name]}.".startswith(f"{least}.")} <= explained()


def test_exact_versions_of_all_are_in_the_constraints() -> None:
    assert names(required(tools=True)) <= names(CONSTRAINTS)
    exact = [line for line in CONSTRAINTS if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[^=]+", line) for line in exact)


# ---- installed files


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_packages_and_serves_without_the_trainer(
    wheel: Path, wheel_without_kernel: Path, tmp_path: Path
) -> None:
    """With the compiled kernel; then the wheel that is made without a compiler, which works as well."""
    contents = zipfile.ZipFile(wheel).namelist()
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "*.pyi", "*.html", "*.jinja", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    kernel = {KERNEL} if HAS_COMPILER else set()
    assert wanted | kernel == {name for name in contents if ".dist-info/" not in name}
    (entries,) = [name for name in contents if name.endswith("entry_points.txt")]
    scripts = zipfile.ZipFile(wheel).read(entries).decode()
    for name, target in PROJECT["project"]["scripts"].items():
        assert f"{name} = {target}" in scripts
    programs = environment(tmp_path / "venv", Path(sys.executable), wheel)
    check_weight_server(programs, tmp_path)
    shown = run(programs / "python", "-c", SHOW_KERNEL, cwd=tmp_path)
    assert shown.stdout == ("compiled\n" if HAS_COMPILER else "numpy\n")
    assert KERNEL not in zipfile.ZipFile(wheel_without_kernel).namelist()
    pip = (programs / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-deps", "--force-reinstall", wheel_without_kernel)
    assert run(programs / "python", "-c", SHOW_KERNEL, cwd=tmp_path).stdout == "numpy\n"
    run(programs / "python", "-W", "error", "-c", USE, cwd=tmp_path)


@pytest.fixture(params=OTHER_PYTHONS)
def other_python(request: pytest.FixtureRequest) -> Path:
    path = python_of(request.param)
    if path is None:
        pytest.skip(f"there is no Python {request.param} with venv on the PATH or in pyenv")
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_other_pythons(wheel: Path, other_python: Path, tmp_path: Path) -> None:
    """Installed as above; then the quick tests that need no trainer, from the sources."""
    programs = environment(tmp_path / "venv", other_python, wheel)
    check_weight_server(programs, tmp_path)
    if HAS_COMPILER:  # one build serves all Pythons
        assert run(programs / "python", "-c", SHOW_KERNEL, cwd=tmp_path).stdout == "compiled\n"
    needed = ["grpcio-tools", "hypothesis", "psutil", "pytest", "pytest-timeout", "PyYAML", "scipy"]
    run(programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *needed)
    chosen = [
        path.relative_to(ROOT)
        for folder in ("weightserver", "integration")
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        if not needs_trainer(path)
    ]
    assert len(chosen) > 20
    done = run(programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=ROOT)
    assert " passed" in done.stdout


def needs_trainer(path: Path) -> bool:
    """Whether a test, or a helper that it imports, needs what the extra installs."""
    found = modules(path)
    helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in found if name.startswith("tests.")]
    return bool({name.partition(".")[0] for name in found} & NEEDS_TRAINER) or any(
        needs_trainer(helper) for helper in helpers if helper.exists()
    )


# ---- beside another torch


def torch_versions() -> Iterator[str]:
    """One version of torch for each minor version of the range that is not that of the constraints, newest first."""
    (least,) = [one.partition(">=")[2] for one in PROJECT["project"]["optional-dependencies"]["torch"]]
    (ours,) = [line.partition("==")[2] for line in CONSTRAINTS if line.startswith("torch==")]
    pip = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    shown = subprocess.run(pip, capture_output=True, text=True, check=False).stdout
    found = re.search(r"Available versions: (.*)", shown)
    seen = {minor(ours)}
    for version in re.findall(r"[\d.]+(?=,|$)", found[1] if found else ""):
        if minor(version) not in seen and minor(version) >= minor(least) and is_offered(version):
            seen.add(minor(version))
            yield version


def is_offered(version: str) -> bool:
    """Whether pip would install that torch here: its settings may exclude versions that the index has."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", f"torch=={version}"]
    return subprocess.run(pip, capture_output=True, check=False).returncode == 0


def minor(version: str) -> tuple[int, int]:
    first, second, *_ = version.split(".")
    return int(first), int(second)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("which", ["newest", "oldest"])
def test_the_trainer_installs_beside_another_torch(which: str, wheel: Path, tmp_path: Path) -> None:
    """Which it keeps, and trains with. The torchvision of that torch is there too, as PyTorch's instructions install
    both: for a torch alone pip takes the newest torchvision, and the torch that this one names."""
    versions = list(torch_versions())
    if not versions:
        pytest.skip("the package index has no other version of torch that the package allows")
    version = versions[0 if which == "newest" else -1]
    others = [line for line in CONSTRAINTS if not line.startswith(("torch==", "torchvision=="))]
    (tmp_path / "constraints.txt").write_text("\n".join(others))
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", f"torch=={version}", "torchvision")
    run(*pip, "install", "-q", "-c", tmp_path / "constraints.txt", f"{wheel}[trainer]")
    run(*pip, "check")
    done = run(python, "-c", TRAIN, tmp_path / "run", cwd=ROOT)
    trained_with, loss = done.stdout.split()
    assert trained_with == version
    assert float(loss) < 5
