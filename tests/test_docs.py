"""The documents: their links lead somewhere, their commands can be parsed, and those of the first pages run.

Each code block of README.md and docs/start-here.md is named in this file, so a new block without a test fails here.
Blocks run as they are printed, except for substitutions that make them short (`shortened`).
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import trainer.data.__main__
import trainer.embed
import trainer.export.__main__
import trainer.report.__main__
import weightserver.cli
from benchmarks.figures import FILE, TABLES, gib, updated
from benchmarks.head import NUM_ACTIVE, SIZES, tensor_bytes
from benchmarks.readme_figure import FILE as FIGURE
from benchmarks.readme_figure import draw, panels
from docs.install_commands import FILES as FILES_WITH_COMMANDS
from docs.install_commands import updated as install_commands
from experiments.first_hour import STEPS
from experiments.paper.__main__ import PROTOCOLS as PAPERS
from tests.helpers.image_tree import plain_tree
from tests.helpers.ports import reserved_ports
from trainer.arguments import parse_config
from trainer.evaluate.command import parse as parse_evaluation
from trainer.evaluate.protocols import PROTOCOLS
from trainer.presets import PRESETS
from weightserver.common.installing import install_command
from weightserver.core.blocks import BlockCodec
from weightserver.torch import ClassifierHead

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "weightserver ": weightserver.cli._parser,
    "pic export ": trainer.export.__main__._parser,
    "pic embed ": trainer.embed._parser,
    "pic report ": trainer.report.__main__._parser,
    "pic ": trainer.data.__main__._parser,
}
COMMANDS = [
    (document, line.strip().removeprefix("$ "))
    for document in ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
    for line in (ROOT / document).read_text().replace("\\\n", " ").splitlines()
    if line.startswith("    ")
]
PARSED = [
    (document, command)
    for document, command in COMMANDS
    if command.startswith(tuple(PARSERS)) and not command.startswith(("pic train ", "pic evaluate ", "pic serve "))
]
_EVALUATES = (
    r"(?:torchrun [^#]* -m -- (?:trainer.evaluate|experiments.paper)|\S*pic evaluate|python -m experiments.paper)"
)
EVALUATED = [(document, found[1]) for document, line in COMMANDS if (found := re.match(f"{_EVALUATES} (.*)", line))]
TRAINED = [
    (document, match.group(1))
    for document, line in COMMANDS
    if (match := re.match(rf"(?:torchrun\b.* -m trainer|pic train) ((?:{'|'.join(PRESETS)}).*)", line))
]


# ---- commands of all documents


@functools.cache
def parser(prefix: str) -> argparse.ArgumentParser:
    return PARSERS[prefix]()


@pytest.mark.parametrize(("document", "command"), PARSED)
def test_commands_in_documents_can_be_parsed(document: str, command: str) -> None:
    prefix = next(prefix for prefix in PARSERS if command.startswith(prefix))
    parser(prefix).parse_args(shlex.split(command.removeprefix(prefix), comments=True))


@pytest.mark.parametrize(("document", "arguments"), TRAINED)
def test_training_commands_in_documents_can_be_parsed(document: str, arguments: str) -> None:
    parse_config(shlex.split(arguments, comments=True))


def test_every_command_is_documented() -> None:
    shown = {command.split()[1] for _, command in COMMANDS if command.startswith("weightserver ")}
    assert shown == weightserver.cli.COMMANDS.keys()


def test_make_targets_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "bench", "docs"} <= targets
    for document in DOCUMENTS:
        if document.name not in ("CHANGELOG.md", "LOG.md"):  # which also name earlier targets
            named = re.findall(r"(?:`|^ +)make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE)
            assert set(named) <= targets, document.name


@pytest.mark.parametrize(("document", "arguments"), EVALUATED)
def test_evaluations_in_documents_can_be_parsed(document: str, arguments: str) -> None:
    parse_evaluation(shlex.split(arguments, comments=True), PROTOCOLS | PAPERS)


def test_pages_say_how_the_package_can_be_installed_now() -> None:
    texts = [file.read_text() for file in FILES_WITH_COMMANDS]
    assert [install_commands(text) for text in texts] == texts, "python -m docs.install_commands"
    text, command = (
        "Run `pip install\n'pic-weightserver[faiss]'`, or `pip install '.[faiss]'`.",
        install_command("faiss"),
    )
    assert install_commands(text).replace("\n", " ") == f"Run `{command}`, or `{command}`."


def test_every_protocol_is_documented() -> None:
    assert {arguments.split()[0] for document, arguments in EVALUATED if document == "docs/evaluate.md"} == {
        *PROTOCOLS,
        *PAPERS,
    }


# ---- links and pictures


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(document: Path) -> list[tuple[str, str]]:
    """(file, anchor) of each link and picture of a document that leads into the repository."""
    text = document.read_text()
    targets = re.findall(r"\]\(([^)\s]*)\)", text)
    targets += re.findall(r"(?:src|srcset|href)=\"([^\"]*)\"", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    inside = [target for target in targets if not re.match(r"\w+:", target)]
    return [(file, anchor) for file, _, anchor in (target.partition("#") for target in inside)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in links(document):
        path = (document.parent / target) if target else document
        assert path.exists(), f"{document.name}: {target}"
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{document.name}: {target}#{anchor}"


def test_the_figure_shows_the_recorded_results(tmp_path: Path) -> None:
    draw(panels(), tmp_path / "figure.svg")
    for file in (FIGURE, tmp_path / "figure.svg"):
        said = ElementTree.parse(file).findtext(".//{http://purl.org/dc/elements/1.1/}description") or ""
        assert json.loads(said) == json.loads(json.dumps(panels())), "python -m benchmarks.readme_figure"


def test_the_tables_of_figures_show_the_recorded_results() -> None:
    text = FILE.read_text()
    assert updated(text) == text, "python -m benchmarks.figures"
    assert re.findall("<!-- figures: (.*) -->", text) == list(TABLES), "each once"


def test_the_figures_of_the_heads_memory_count_the_same_tensors() -> None:
    (row,) = (row for row in TABLES["training"]() if row.what.startswith("the head's step"))
    assert f", {gib(tensor_bytes(NUM_ACTIVE))} of tensors" in row.measured
    assert row.compared.endswith(f", {gib(tensor_bytes(SIZES['ImageNet-1K']))}")


@pytest.mark.parametrize("document", ["design", "guarantees"])
def test_a_document_names_files_that_exist(document: str) -> None:
    """A module is named by its place in the repository, a package or a folder of it."""
    tracked = {
        str(path.relative_to(ROOT))
        for top in ("weightserver", "trainer", "tests", "benchmarks")
        for path in (ROOT / top).rglob("*.py")
    }
    named = set(re.findall(r"`([\w/]+\.py)\b", (ROOT / f"docs/{document}.md").read_text()))
    assert len(named) > 40
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in tracked)}
    assert not missing


def test_the_reference_has_every_public_name() -> None:
    """Those of the head are the names that its trainer does not need alone."""
    reference = (ROOT / "docs/api.md").read_text()
    documented = re.findall(r"^::: weightserver\.(\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(weightserver.__all__)
    of_head = re.findall(r"^::: weightserver\.torch\.(\w+)$", reference, re.MULTILINE)
    imports = [ast.walk(ast.parse(path.read_text())) for path in (ROOT / "trainer").rglob("*.py")]
    of_trainer = {
        alias.name
        for node in itertools.chain(*imports)
        if isinstance(node, ast.ImportFrom) and node.module == "weightserver.torch"
        for alias in node.names
    }
    assert set(weightserver.torch.__all__) == of_trainer.union(of_head)


# ---- the blocks of the first pages


def blocks_of(document: str) -> list[str]:
    """The code blocks, fenced or indented, without their fence or indentation."""
    text = (ROOT / document).read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?<=\n\n)((?:    .*\n|\n(?=    ))+)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [*fenced, *(re.sub("^    ", "", block, flags=re.MULTILINE) for block in indented)]


BLOCKS = {document: blocks_of(document) for document in ("README.md", "docs/start-here.md", "docs/own-loop.md")}
NAMED: list[str] = []


def block(document: str, beginning: str) -> str:
    """The one block of a document that begins like this; a test of this file runs it."""
    (found,) = [block for block in BLOCKS[document] if block.lstrip().startswith(beginning)]
    NAMED.append(found)
    return found


MAKE = block("README.md", "make demo")
TABLE = block("README.md", "Top-1 on the test images")
FOLDER = block("README.md", "pic train pictures/")
IMAGES = block("README.md", "pic pack")
SERVERS = block("README.md", "weightserver serve")
(PYTHON,) = [block for block in blocks_of("docs/servers.md") if block.startswith("import numpy")]
HEAD = block("README.md", "from torch.utils.data import DataLoader")
LAYOUT = block("README.md", "weightserver/")
START_MAKE = block("docs/start-here.md", "make demo")
START_TABLE = block("docs/start-here.md", "Top-1 on the test images")
START_LOOK = block("docs/start-here.md", "ls runs/demo-1")
OWN_INSTALL = block("docs/own-loop.md", install_command("torch"))
OWN_GROUPS = block("docs/own-loop.md", "from weightserver.torch import Loss")
OWN_LOOPS = [
    block("docs/own-loop.md", beginning)
    for beginning in (
        "import torch",
        "for ids, images in batches:\n    loss",
        "(first_ids, first)",
        "for ids, images in batches:\n    with",
        "found = ",
        "scaler = ",
        "model = ",
        "rows = ",
    )
]
SHORT_RUN = (
    "--steps 3 --batch-size 4 --num-negatives 8 --window-size 12 --window-stride 4 --dim 8 --precision float32 "
    "--encoder.name torchvision:resnet18 --encoder.image-size 32"
)
"""Settings with which a preset for ImageNet trains on 24 images in seconds."""


def test_every_block_has_a_test() -> None:
    assert sorted(NAMED) == sorted(block for blocks in BLOCKS.values() for block in blocks)


def shortened(block: str, *substitutions: tuple[str, str]) -> str:
    """The block with each (old, new) text replaced; fails where the old one is not in it any more."""
    for old, new in substitutions:
        assert old in block, f"{old!r} is not in\n{block}"
        block = block.replace(old, new)
    return block


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the programs of an installation in .venv/bin, where readers have them; see `few_images`."""
    directory = tmp_path_factory.mktemp("reader")
    (programs := directory / ".venv" / "bin").mkdir(parents=True)
    short = f"EPOCHS=0.5 OUTPUT={directory}/runs/demo-1 PYTEST_FLAGS='--collect-only tests/test_docs.py'"
    commands = {
        "python": f"{sys.executable} -m tests.helpers.few_images",
        "pic": f"{sys.executable} -m tests.helpers.few_images -m trainer.pic",
        "weightserver": f"{sys.executable} -m weightserver",
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "make": f"{shutil.which('make')} -C {ROOT} -o {directory}/.venv/.installed VENV={directory}/.venv {short}",
    }
    for name, command in commands.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    return directory


def run_in(directory: Path, script: str) -> str:
    """Runs a block with bash, to its first command that fails; returns what it printed."""
    environment = os.environ | {
        "PATH": f"{directory}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    # The trap ends servers that a block starts in the background.
    command = ["bash", "-euo", "pipefail", "-c", f"trap 'jobs -p | xargs -r kill; wait' EXIT\n{script}"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def form(table: str) -> list[str]:
    """The lines of a printed table, without its frame and with # for each number."""
    text = re.sub(r"(?<![\w-])\d[\d.e-]*", "#", re.sub(r"[\u2500-\u257f]", " ", table))
    return [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_start_here_repeats_the_readme() -> None:
    assert START_MAKE.strip() == MAKE.splitlines()[0].partition("#")[0].strip()
    assert TABLE.startswith(START_TABLE.rstrip("\n"))


@pytest.mark.slow  # .ci/run runs the demo in short form by itself
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_demo_and_what_follows_it(place: Path) -> None:
    """`make demo` and `make test` in short form, the table that the demo prints, and the commands to look at it."""
    printed = run_in(place, MAKE).replace(f"{place}/", "")
    expected, lines = form(TABLE), form(printed)
    assert [line for line in lines if line in expected] == expected, printed
    assert "test_every_block_has_a_test" in printed  # `make test` ran pytest

    named = re.findall(r"[\w./-]+", START_LOOK.splitlines()[0].partition("#")[2])
    assert set(named) <= {path.name + "/" * path.is_dir() for path in (place / "runs/demo-1").iterdir()}
    assert "knn" in run_in(place, START_LOOK).lower()
    assert "<html" in (place / "runs/demo-1/report.html").read_text().lower()


def test_a_folder_of_your_own_images() -> None:
    """Its commands are those of the first hour, which tests/experiments/test_first_hour.py runs."""
    shown = [step.command.replace("pictures/test", "pictures") for step in STEPS]
    commands = [line.partition("#")[0].replace("pictures/", "pictures").strip() for line in FOLDER.splitlines()]
    assert len(commands) == 4
    assert set(commands) <= set(shown)


@pytest.mark.slow  # five programs that import torch, two of them on two ranks: a minute
@pytest.mark.timeout(600)
def test_your_own_images(place: Path) -> None:
    plain_tree(place / "images/train", 24)
    plain_tree(place / "images/val", 12, first=24)
    substitutions = [
        ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("imagenet-1k", f"imagenet-1k {SHORT_RUN}"),
        ("evaluate linear", "evaluate linear --epochs 1 --batch-size 8"),
    ]
    run_in(place, shortened(IMAGES, *substitutions))
    assert json.loads((place / "runs/a/summary.json").read_text())["steps"] == 3
    assert (place / "encoder/config.json").exists()


@pytest.mark.guard  # two shards and a run on two ranks: half a minute
@pytest.mark.timeout(600)
def test_your_own_servers(place: Path) -> None:
    with reserved_ports(2) as (first, second):
        plain_tree(place / "more", 24)
        substitutions = [
            ("--nproc-per-node 8", "--nproc-per-node 2"),
            ("imagenet-1k", f"imagenet-1k {SHORT_RUN}"),
            ("packed/", "more-packed/"),
            ("runs/a", "runs/b"),
            ("/data/", f"{place}/data/"),
            ("50051", str(first)),
            ("50052", str(second)),
        ]
        block = re.sub(r"^weightserver serve .*$", r"\g<0> &", shortened(SERVERS, *substitutions), flags=re.MULTILINE)
        run_in(place, f"pic pack more more-packed\n{block}")
        assert json.loads((place / "runs/b/summary.json").read_text())["steps"] == 3
        for shard in range(2):
            looked = json.loads(run_in(place, f"weightserver inspect {place}/data/ws{shard}"))
            assert looked["checkpoints"], "the run did not write to these shards"


def test_settings_are_the_same_in_groups() -> None:
    made: dict[str, Any] = {"ClassifierHead": weightserver.torch.ClassifierHead}
    exec(OWN_GROUPS, made)
    flat, grouped = made["flat"], made["grouped"]
    assert flat._settings == grouped._settings
    assert flat._table.servers == grouped._table.servers


def test_the_python_example() -> None:
    namespace: dict[str, object] = {}
    exec(PYTHON, namespace)
    weight = namespace["weight"]
    assert isinstance(weight, np.ndarray)
    assert weight.shape == (2, 128)


SMALL_HEAD = [
    ('servers="ws0:50051,ws1:50051"', "directory=directory"),
    ("10_000_000", "64"),
    ("65_536", "16"),
    ("131_072", "32"),
    ("16_384", "8"),
    ("batch_size=512", "batch_size=8"),
]


def own_loop(directory: Path) -> dict[str, Any]:
    """What the blocks take for granted."""
    encoder = torch.nn.Linear(5, 128)
    dataset: Any = [(number, torch.randn(5)) for number in range(64)]
    return {
        "directory": directory,
        "dataset": dataset,
        "batches": list(torch.utils.data.DataLoader(dataset, batch_size=8)),
        "encoder": encoder,
        "optimizer": torch.optim.SGD(encoder.parameters(), lr=0.1),
        "device": torch.device("cpu"),
    }


def test_the_head_in_your_own_loop(tmp_path: Path) -> None:
    """The README's loop, as it is printed but for the sizes and the servers."""
    namespace = own_loop(tmp_path / "rows")
    exec(shortened(HEAD, *SMALL_HEAD), namespace)
    assert namespace["head"].num_steps == 8
    namespace["head"].close()


@pytest.mark.guard
def test_the_page_on_your_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, one after the other."""
    assert OWN_INSTALL.strip() in HEAD
    monkeypatch.chdir(tmp_path)
    namespace = own_loop(tmp_path / "rows")
    exec(shortened(OWN_LOOPS[0], *SMALL_HEAD), namespace)
    for block in OWN_LOOPS[1:]:
        exec(block, namespace)
    assert namespace["rows"].shape == (3, 128)


@pytest.mark.parametrize("margin", ["arcface", "adaface"])
def test_what_changes_in_a_script_of_partial_fc(margin: str, tmp_path: Path) -> None:
    """The lines that the page adds and keeps train, whichever way the loader orders identities."""
    (changes,) = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/from-partial-fc.md").read_text(), re.M | re.S)
    script = "".join(line[1:] + "\n" for line in changes.splitlines() if not line.startswith("-"))
    assert len([line for line in changes.splitlines() if line.startswith("+")]) <= 6
    substitutions = [
        ('servers="ws0:50051,ws1:50051"', f"directory={str(tmp_path)!r}"),
        ("65_536", "16"),
        (").cuda()", ")"),
        ('"arcface"', repr(margin)),
    ]
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 5, generator=generator), torch.randint(0, 64, (8,), generator=generator))] * 4
    namespace: dict[str, Any] = {
        "torch": torch,
        "ClassifierHead": ClassifierHead,
        "num_identities": 64,
        "backbone": torch.nn.Linear(5, 512),
        "train_loader": batches,
    }
    exec(shortened(script, *substitutions), namespace)
    assert namespace["head"].num_steps == 4
    namespace["head"].close()


def test_the_disks_of_a_script_of_partial_fc_hold_its_blocks() -> None:
    """Of identities in any order, which a loader of its own gives."""
    (row,) = re.findall(r"weight servers' disks \|(.*)\|", (ROOT / "docs/from-partial-fc.md").read_text())
    spec = ClassifierHead(1_000, 512, num_negatives=100).spec
    bytes_of_one = BlockCodec(spec).stored_bytes / spec.rows_per_block
    for number, text in zip((10**5, 10**6, 10**7), row.split("|"), strict=True):
        assert float(text.removesuffix(" GB ")) == pytest.approx(number * bytes_of_one / 1e9, rel=0.07)


def test_the_layout_names_what_is_there() -> None:
    """Every file and folder that the README's layout names exists, and every folder of the packages is named."""
    for package in ("weightserver", "trainer"):
        (text,) = re.findall(rf"^{package}/ +(.*?)(?=^\w+/)", LAYOUT, re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"[\w.]+", re.sub(r"\([^)]*\)", "", text)))
        folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} - {"_generated"}
        assert folders <= named, folders - named
        assert all((ROOT / package / name).exists() for name in named), named
    for name in re.findall(r"(?:^|  )([\w.]+/|[A-Z]+\.md) ", LAYOUT, re.MULTILINE):
        assert (ROOT / name).exists(), name
