"""Rules of the whole tree: which folders import which, fresh generated code, a documented contract."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grpc
import pytest

import weightserver
import weightserver.torch
from weightserver.core import errors
from weightserver.core.errors import WeightServerError
from weightserver.protocol.status import ERROR_OF_STATUS

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "protos/pic/weightserver/v1/weight_server.proto"


@cache
def import_lines(path: Path) -> list[tuple[str, list[str]]]:
    """All modules that a file imports, at the top or inside functions, with the names that it takes from them."""
    found = list[tuple[str, list[str]]]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or ".", [alias.name for alias in node.names]))
    return found


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports."""
    return {module.partition(".")[0] for module, _ in import_lines(path)}


MAY_IMPORT = {
    "common": set[str](),
    "core": {"common"},
    "protocol": {"common", "core"},
    "storage": {"common", "core"},
    "shard": {"common", "core", "protocol", "storage"},
    "server": {"common", "core", "protocol", "storage", "shard"},
    "client": {"common", "core", "protocol"},
    "operations": {"common", "core", "protocol", "storage", "client"},
    "torch": {"common", "core"},
}
"""Folders of `weightserver`, and the others that each of them may import."""
TRAINER_MAY_IMPORT = {
    "data": set[str](),
    "run": {"data"},
    "evaluate": {"data", "run"},
    "export": {"data", "run"},
    "report": {"data", "evaluate", "run"},
}
"""Folders of `trainer`, and the other folders that each of them may import."""


def folders_imported(path: Path, package: str = "weightserver") -> set[str]:
    """The names after `weightserver.` in the imports of a file; "" for `weightserver` itself."""
    parts = [module.split(".") for module, _ in import_lines(path)]
    return {"".join(names[1:2]) for names in parts if names[0] == package}


@pytest.mark.parametrize("folder", [path.parent.name for path in (ROOT / "weightserver").glob("*/__init__.py")])
def test_imports_point_one_way(folder: str) -> None:
    assert documented_imports("weightserver", folder) == MAY_IMPORT[folder], "its __init__ says something else"
    for path in (ROOT / "weightserver" / folder).rglob("*.py"):
        public = {""} if folder == "torch" else set[str]()
        assert folders_imported(path) <= MAY_IMPORT[folder] | {folder} | public, path
        assert not imports(path) & ({"torch"} - {folder} | {"torchvision", "trainer"}), path
        assert "lmdb" not in imports(path) or folder == "storage", path
        assert "argparse" not in imports(path) or folder in ("common", "server", "operations"), path


def test_row_stores_import_two_modules_of_the_head() -> None:
    files = (ROOT / "weightserver/torch/rows").glob("*.py")
    modules = [module.split(".") for path in files for module, _ in import_lines(path)]
    of_the_head = {names[2] for names in modules if names[:2] == ["weightserver", "torch"]} - {"rows"}
    assert of_the_head == documented_imports("weightserver", "torch/rows")


def documented_imports(package: str, folder: str) -> set[str]:
    """The folders that an __init__ names after "It may import:"."""
    documented = ast.get_docstring(ast.parse((ROOT / package / folder / "__init__.py").read_text())) or ""
    assert "\nImport from it: " in documented
    assert "\nIt may import: " in documented
    return set(re.findall(r"`(\w+)`", documented.partition("\nIt may import: ")[2]))


@pytest.mark.parametrize("folder", TRAINER_MAY_IMPORT)
def test_folders_of_the_trainer_import_those_they_may(folder: str) -> None:
    folders = {path.parent.name for path in (ROOT / "trainer").glob("*/__init__.py")}
    assert folders == TRAINER_MAY_IMPORT.keys()
    assert documented_imports("trainer", folder) == TRAINER_MAY_IMPORT[folder], "its __init__ says something else"
    for path in (ROOT / "trainer" / folder).rglob("*.py"):
        imported = folders_imported(path, "trainer")
        assert imported & folders <= TRAINER_MAY_IMPORT[folder] | {folder}, path
        assert not imported & {"", "__main__", "build", "demo", "loop"}, f"{path} imports what is built on it"
        below = TRAINER_MAY_IMPORT[folder].union(*(TRAINER_MAY_IMPORT[other] for other in TRAINER_MAY_IMPORT[folder]))
        assert modules_of_the_trainer(path) & folders <= below | {folder}, f"{path} leads to a folder above it"


def modules_of_the_trainer(path: Path) -> set[str]:
    """Folders and modules of `trainer` that a file imports, directly or through modules that are in no folder."""
    found, new = set[str](), folders_imported(path, "trainer")
    while new:
        found |= new
        files = (ROOT / "trainer" / f"{name}.py" for name in new)
        new = {name for file in files if file.exists() for name in folders_imported(file, "trainer")} - found
    return found


@pytest.mark.parametrize("rule", [MAY_IMPORT, TRAINER_MAY_IMPORT], ids=["weightserver", "trainer"])
def test_no_folders_import_each_other(rule: dict[str, set[str]]) -> None:
    TopologicalSorter(rule).prepare()  # raises CycleError


def files_imported(path: Path) -> set[Path]:
    """The files of the project that a file imports; the `__init__` of folders aside."""
    names = {name for module, taken in import_lines(path) for name in (module, *(f"{module}.{one}" for one in taken))}
    return {file for name in names if (file := ROOT / f"{name.replace('.', '/')}.py").exists()}


@pytest.mark.parametrize("top", ["weightserver", "trainer", "experiments", "benchmarks", "deploy"])
def test_no_files_import_each_other(top: str) -> None:
    files = {path: files_imported(path) for path in (ROOT / top).rglob("*.py")}
    assert any(files.values())
    TopologicalSorter(files).prepare()  # raises CycleError, which names the files


def test_the_trainer_takes_public_names_only() -> None:
    """The names that `weightserver` exports, and those of the folders that everyone may import."""
    commands = ("weightserver.operations.arguments", "weightserver.operations.export")
    everyone = ("weightserver.core.", "weightserver.common.", *commands)
    for path in (ROOT / "trainer").rglob("*.py"):
        assert "lmdb" not in imports(path), path
        for module, names in import_lines(path):
            if module in ("weightserver", "weightserver.torch"):
                assert names, f"{path} imports the whole module"
                assert set(names) <= set(sys.modules[module].__all__), path
            elif module.startswith("weightserver"):
                assert names, f"{path} imports the whole module"
                assert module.startswith(everyone), (path, module)
                assert not any(name.startswith("_") for name in names), (path, names)


def test_help_imports_no_command() -> None:
    """`weightserver --help` and each command import only what they need."""
    heavy = ("lmdb", "cryptography", "safetensors.numpy", "weightserver.server")
    code = f"import sys; from weightserver import cli; cli._parser(()); sys.exit(any(map(sys.modules.get, {heavy})))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_nothing_is_unpickled() -> None:
    """Apart from what processes of our own send one another: joblib counts cores, and starts those that list tars."""
    own_processes = (ROOT / "trainer/cores.py", ROOT / "trainer/data/numbered_shards.py")
    for package in ("weightserver", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            assert not imports(path) & {"pickle", "dill", "cloudpickle", "shelve"}, path
            assert "joblib" not in imports(path) or path in own_processes, path
            text = path.read_text()
            if path == ROOT / "trainer/export/weights_file.py":  # weights of other trainers
                text = text.replace('torch.load(path, map_location="cpu", weights_only=True,', "")
            assert not re.search(r"torch\.load\(|allow_pickle=True|weights_only=False", text), path


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "protos/generate.py"))["generate"](tmp_path)
    generated = {path.name for path in tmp_path.iterdir()}
    assert generated == {"weight_server_pb2.py", "weight_server_pb2.pyi"}
    for name in generated:
        assert (tmp_path / name).read_text() == (ROOT / "weightserver/protocol/_generated" / name).read_text(), (
            "make protos"
        )


def test_every_part_of_the_contract_is_documented() -> None:
    lines = [line.strip() for line in PROTO.read_text().splitlines()]
    documented = 0
    for number, line in enumerate(lines):
        declared = re.match(r"(?:rpc|message) (\w+)|(?:[\w.]+ )(\w+) = \d+;", line)
        if declared is None or line.endswith("{}"):
            continue
        name = declared.group(1) or declared.group(2)
        first = number
        while lines[first - 1].startswith("//"):
            first -= 1
        comment = lines[first] if first < number else ""
        if line.startswith("message") and name.endswith(("Request", "Response")):
            continue  # their call is documented
        assert comment.startswith(f"// {name} "), f"line {number + 1}: {line} has no comment that begins with its name"
        documented += 1
    assert documented > 40


def test_each_error_has_a_status_of_its_own() -> None:
    public = [getattr(weightserver, name) for name in weightserver.__all__]
    classes = {error for error in public if inspect.isclass(error) and issubclass(error, Exception)}
    classes -= {errors.ClusterError}  # which clients alone raise
    assert set(ERROR_OF_STATUS.values()) == classes
    assert len(ERROR_OF_STATUS) == len(classes), "two errors share a status"
    assert grpc.StatusCode.UNKNOWN not in ERROR_OF_STATUS
    assert all(issubclass(error, WeightServerError) for error in classes)


def test_the_documented_statuses_are_the_errors_own() -> None:
    """The tree in the docstring of core/errors.py has every class with its status and below its base."""
    documented = re.findall(r"^[├└]── (\w+) +([A-Z_]+) ", errors.__doc__ or "", re.MULTILINE)
    statuses = {error: status for status, error in ERROR_OF_STATUS.items() if error is not WeightServerError}
    assert dict(documented) == {error.__name__: status.name for error, status in statuses.items()}
    assert len(documented) == len(statuses), "an error is there twice"
    assert all(error.__bases__ == (WeightServerError,) for error in statuses), "the tree has one level"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("__init__", "addresses, *, credentials, token, timeout_seconds, retry_seconds"),
        ("create_table", "spec"),
        ("extend_table", "num_rows"),
        ("drop_table", ""),
        ("extend_schedule", "start_step, learning_rates"),
        ("learning_rates", "*, shard"),
        ("open_session", "name, *, join"),
        ("fetch", "rows, *, step"),
        ("fetch_state", "rows, *, step"),
        ("push_gradients", "rows, gradients, *, step"),
        ("write_state", "rows, weight, momentum_buffer, last_step"),
        ("describe", ""),
        ("close", ""),
    ],
)
def test_the_public_interface_stays(name: str, parameters: str) -> None:
    """Keyword arguments may be added; nothing may be removed or moved."""
    positional, _, keywords = parameters.partition("*")
    signature = inspect.signature(getattr(weightserver.WeightClient, name)).parameters
    assert [n for n, p in signature.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:] == re.findall(r"\w+", positional)
    assert set(re.findall(r"\w+", keywords)) <= {n for n, p in signature.items() if p.kind is p.KEYWORD_ONLY}


def test_the_public_fields_stay() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(weightserver.WeightClient).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert (defaults["timeout_seconds"], defaults["retry_seconds"]) == (30, 300)
    assert [field.name for field in fields(weightserver.RowState)] == ["weight", "momentum_buffer", "last_step"]
    known = {field.name for field in fields(weightserver.TableInfo)}
    assert {"spec", "epoch", "clock", "horizon", "rows_stored", "disk_bytes", "shards"} <= known
    assert {"addresses", "metrics_addresses", "processes"} <= set(weightserver.LocalCluster.__annotations__)


def test_the_public_classes_stay() -> None:
    spec = inspect.signature(weightserver.TableSpec).parameters
    assert {name: parameter.default for name, parameter in spec.items()} == {
        "num_rows": inspect.Parameter.empty,
        "dim": inspect.Parameter.empty,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "init_std": 0.01,
        "seed": 0,
        "rows_per_block": 63,
        "correction": True,
        "dtype": "float32",
    }
    assert list(inspect.signature(weightserver.LocalCluster).parameters)[:2] == ["num_shards", "directory"]
    assert list(inspect.signature(weightserver.LocalCluster.restart).parameters) == ["self", "shard"]
