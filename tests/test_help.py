"""Help at 80 columns, the answers to mistyped options, and what commands load before they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import trainer.__main__
import trainer.data.__main__
import trainer.demo
import trainer.embed
import trainer.evaluate.__main__
import trainer.export.__main__
import weightserver.cli
from trainer.evaluate.protocols import PROTOCOLS
from trainer.presets import PRESETS
from weightserver.common.command_line import Parser

COLUMNS = 80
Main = Callable[[list[str]], object]


def commands() -> Iterable[tuple[str, Main, list[str]]]:
    mains: dict[str, tuple[Main, Iterable[str]]] = {
        "weightserver": (weightserver.cli.main, weightserver.cli.COMMANDS),
        "trainer": (trainer.__main__.main, [*PRESETS, "report"]),
        "trainer.data": (trainer.data.__main__.main, ["inspect", "pack", "verify"]),
        "trainer.demo": (trainer.demo.main, []),
        "trainer.embed": (trainer.embed.main, []),
        "trainer.evaluate": (trainer.evaluate.__main__.main, PROTOCOLS),
        "trainer.export": (trainer.export.__main__.main, ["rows", "encoder", "import"]),
    }
    for name, (main, subcommands) in mains.items():
        yield name, main, []
        for subcommand in subcommands:
            yield f"{name} {subcommand}", main, [subcommand]


@pytest.mark.guard  # forty commands
@pytest.mark.parametrize(("name", "main", "arguments"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_help_fits_a_terminal(
    name: str, main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help-all" if name.startswith(("trainer.data", "trainer.embed")) else "--help"])
    assert not ended.value.code
    usage, _, text = capsys.readouterr().out.partition("\n\n")  # a usage is no text, and may hold long lists
    assert usage.startswith("usage: ")
    assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    has_subcommands = not arguments and name not in ("trainer.demo", "trainer.embed")
    assert has_subcommands or "--log-format" in text


MISTYPED: list[tuple[Main, str, str]] = [
    (weightserver.cli.main, "serve --zz", "weightserver serve: unknown option --zz: see --help"),
    (weightserver.cli.main, "--verson", "weightserver: unknown option --verson: did you mean --version?"),
    (
        weightserver.cli.main,
        "insepct",
        "weightserver: argument COMMAND: invalid choice 'insepct': did you mean inspect?",
    ),
    (
        weightserver.cli.main,
        "inspect d --log-format jsn",
        "weightserver inspect: argument --log-format: invalid choice 'jsn': did you mean json?",
    ),
    (trainer.embed.main, "--otput x", "pic embed: unknown option --otput: did you mean --output?"),
    (
        trainer.data.__main__.main,
        "inspect --labelkey=a",
        "pic inspect: unknown option --labelkey: did you mean --label-key?",
    ),
]


@pytest.mark.parametrize(("main", "arguments", "said"), [pytest.param(*one, id=one[1]) for one in MISTYPED])
def test_a_mistyped_option_or_command_is_answered_with_the_nearest(
    main: Main, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, although arguments that are required are missing."""
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_what_argparse_takes_is_no_mistyped_option() -> None:
    """An option cut short, a value with a space, and what follows "--"."""
    parser = Parser(prog="a")
    parser.add_argument("--output")
    parser.add_argument("files", nargs="*")
    parsed = parser.parse_args(["--out", "--a b", "--", "--otput"])
    assert (parsed.output, parsed.files) == ("--a b", ["--otput"])


@pytest.mark.guard
def test_no_command_loads_libraries_that_it_may_not_need() -> None:
    """They would double or triple the time that every command takes to start."""
    modules = ["trainer.loop", "trainer.results", "trainer.own_images", "trainer.data.command", "trainer.embedding"]
    modules += ["trainer.evaluate.run", "trainer.evaluate.classification", "trainer.export.importing"]
    modules += ["weightserver.cli"]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"torch._dynamo", "sklearn", "pandas", "faiss", "transformers"} & set(run.stdout.split())


ANSWERED = {
    "evaluate --help": "linear-cached",
    "evaluate linear --help": "--learning-rates",
    "evaluate linear --pixels --learningrates 8": "--learning-rates",
    "evaluate knn --pixels --k 0": "give one or more numbers, at least 1",
    "--help": "fashion-mnist",
    "fashion-mnist --help": "--num-negatives",
    "images --help": "--num-negatives",
    "fashion-mnst": "did you mean fashion-mnist?",
    "fashion-mnist --batchsize 8": "--batch-size",
    "fashion-mnist --num-negatives many": "--num-negatives",
    "--resume --output nowhere": "holds no run",
}
"""Command lines of the trainer, and what they are told."""
ANSWERS = """
import contextlib, importlib, io, json, sys
answers = []
for line in sys.stdin.read().splitlines():
    is_evaluation, arguments = line.startswith("evaluate "), line.removeprefix("evaluate ").split()
    main = importlib.import_module("trainer.evaluate.__main__" if is_evaluation else "trainer.__main__").main
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as ended:
            answers.append([ended.code or 0, said.getvalue()])
print(json.dumps([answers, list(sys.modules)]))
"""


def test_the_trainer_answers_before_it_loads_its_libraries(tmp_path: Path) -> None:
    """torch and its relatives take seconds to import."""
    environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parent.parent)}
    run = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        input="\n".join(ANSWERED),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
        check=True,
    )
    answers, modules = json.loads(run.stdout)
    for (line, expected), (status, said) in zip(ANSWERED.items(), answers, strict=True):
        assert status == (0 if line.endswith("--help") else 2), (line, said)
        assert expected in said, line
    assert not {"torch", "timm", "torchvision", "matplotlib", "grpc", "sklearn"} & set(modules)
