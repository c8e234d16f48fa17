"""The command `pic`: one name for everything that a user of images does.

    pic train pictures/          # or python -m trainer.pic, where the command is not on the PATH
    pic report runs/pictures

Each command leads to the module that runs it, which is imported when it is needed; none imports torch for `--help`. A
command with many options has a page of `trainer.short_help`, and lists all of them with `--help-all`.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import NamedTuple, NoReturn

from trainer.short_help import PAGES
from weightserver.common.processes import end_at_sigterm, ends_with_its_reader
from weightserver.common.spelling import did_you_mean


class Command(NamedTuple):
    """Where a command is run."""

    summary: str
    module: str
    """Name of a module with a function main(arguments)."""
    first: tuple[str, ...] = ()
    """Arguments of that function before those of the command line."""


_GROUPS = {
    "train": {
        "train": Command("Trains an encoder by instance classification", "trainer.__main__"),
        "demo": Command("Trains on 10,000 images of Fashion-MNIST", "trainer.demo"),
    },
    "look at a run": {
        "report": Command("Writes one HTML page about a run", "trainer.__main__", ("report",)),
        "evaluate": Command("Evaluates an encoder on labelled images", "trainer.evaluate.__main__"),
    },
    "use an encoder": {
        "embed": Command("Computes the features of images with a trained encoder", "trainer.embed"),
        "export": Command("Exports a run's encoder for another library, or its rows", "trainer.export.__main__"),
    },
    "prepare images": {
        "inspect": Command("Says what a source of images is read as", "trainer.data.__main__", ("inspect",)),
        "pack": Command("Packs images into large files", "trainer.data.__main__", ("pack",)),
        "verify": Command("Compares packed files with their checksums", "trainer.data.__main__", ("verify",)),
    },
    "servers": {
        "serve": Command("Serves one shard of a classifier's rows until SIGTERM", "weightserver.cli", ("serve",)),
    },
}
COMMANDS = {name: command for commands in _GROUPS.values() for name, command in commands.items()}


@ends_with_its_reader()
def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command; exits with its status, and with 2 if there is no such command."""
    end_at_sigterm()
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "--help-all"):
        _print_and_exit(overview())
    if name == "--version":
        _print_and_exit(metadata.version("pic-weightserver"))
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, "pic --help lists the commands")
        print(f"pic: unknown command {name!r}: {hint}", file=sys.stderr)
        sys.exit(2)
    if name in PAGES:
        if not {"-h", "--help"}.isdisjoint(options):
            _print_and_exit(PAGES[name])
        if name == "train" and options == ["--help-all"]:
            options = ["images", *options]  # a preset, which has them all
    command = COMMANDS[name]
    sys.exit(import_module(command.module).main([*command.first, *options]))


def overview() -> str:
    """The help of `pic` itself: each command with its summary."""
    lines = ["usage: pic COMMAND ...", "", "Trains image encoders without labels: every image is a class.", ""]
    for group, commands in _GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<12}{command.summary}" for name, command in commands.items()), ""]
    lines += [
        "begin with:",
        "  pic train pictures/",
        "",
        "pic COMMAND --help says more. Commands for operators: weightserver --help",
    ]
    return "\n".join(lines)


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    sys.exit(0)


if __name__ == "__main__":
    main()
