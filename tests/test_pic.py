"""The command `pic`: short help at once, and one name for every command."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainer.pic
from tests.helpers.image_tree import plain_tree
from trainer.command_line import pic
from trainer.pic import COMMANDS, overview
from trainer.presets import PRESETS
from trainer.short_help import PAGES

ROOT = Path(__file__).parent.parent


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        trainer.pic.main(arguments)
    assert not ended.value.code
    return capsys.readouterr().out


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed([name, "--help"] if name else [], capsys).splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80] == []
    if name:
        assert lines[0].startswith(f"usage: pic {name} ")
        assert f"  {name} " in overview()


@pytest.mark.parametrize(
    ("commands", "slow"),
    [
        (["--help", "train --help", "evaluate knn -h", "serve -h"], {"torch", "numpy", "rich", "tyro", "grpc"}),
        (["embed --help", "pack --help-all", "export encoder --help"], {"torch", "timm", "torchvision", "matplotlib"}),
    ],
)
def test_help_imports_nothing_that_takes_time(commands: list[str], slow: set[str]) -> None:
    code = """
import contextlib, sys
from trainer.pic import main
for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main(command.split())
print("MODULES", *sys.modules)
"""
    printed, _, modules = run(sys.executable, "-c", code, *commands, cwd=ROOT).partition("MODULES")
    assert printed.count("usage: ") == len(commands)
    assert not slow & set(modules.split())


def test_all_options_of_ones_own_images_say_that_defaults_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert "chosen from images and machine, not by these defaults" in printed(["train", "--help-all"], capsys)


@pytest.mark.parametrize("name", PAGES)
def test_every_option_of_a_page_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    complete = printed([name, *["knn"] * (name == "evaluate"), "--help-all"], capsys)
    options = set(re.findall(r"(?<=[ \n])--[a-z][\w.-]*", PAGES[name])) - {"--help-all", "--nproc-per-node"}
    known = set(re.findall(r"--[a-z][\w.-]*", complete)) | {"--config", "--print-config"}
    assert options <= known


def test_options_to_read_images_are_in_the_long_help(capsys: pytest.CaptureFixture[str]) -> None:
    short, complete = (printed(["pack", option], capsys) for option in ("--help", "--help-all"))
    assert "--label-key" not in short
    assert "--help-all lists more options: how to read the images" in short
    assert "--label-key" in complete


def test_the_page_of_train_names_the_presets() -> None:
    (presets,) = re.findall(r"^presets:\n(.*?)\n\n", PAGES["train"], re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^  ([\w-]+)", presets, re.MULTILINE)) == PRESETS.keys() - {"images", "demo"}


def test_a_mistyped_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for given, hint in (("evalute", "did you mean evaluate?"), ("x", "pic --help lists the commands")):
        with pytest.raises(SystemExit) as ended:
            trainer.pic.main([given])
        assert ended.value.code == 2
        assert hint in capsys.readouterr().err


def test_it_is_installed_beside_the_old_names() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["pic"] == "trainer.pic:main"
    assert {"weightserver", "pic-train", "pic-evaluate", "pic-data"} <= scripts.keys()


@pytest.mark.guard  # six programs that import torch
@pytest.mark.timeout(600)
def test_from_a_folder_to_what_its_run_says_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line below "Next:" is a command that works as it is printed, in the folder in which the run was started."""
    monkeypatch.chdir(tmp_path)
    plain_tree(tmp_path / "my pictures", 36)
    command = [*shlex.split(pic()), "train", "my pictures/", "--steps", "3"]
    following = run(*command, cwd=tmp_path).partition("Next:\n")[2].splitlines()
    assert len(following) == 3
    for line in following:
        run("bash", "-c", line, cwd=tmp_path)
    assert (tmp_path / "runs/my pictures/report.html").exists()
