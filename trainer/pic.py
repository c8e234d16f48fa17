"""The command `pic`: one name for everything that a user of images does.

    pic train pictures/          # or python -m trainer.pic, where the command is not on the PATH
    pic report runs/pictures

Each command leads to the module that runs it, which is imported when it is needed. `--help` prints a page of
`trainer.short_help` without any import of torch; `--help-all` prints the module's own help, with every option.
"""

from __future__ import annotations

import difflib
import sys
from importlib import import_module, metadata
from typing import NamedTuple, NoReturn

from trainer.short_help import PAGES, overview
from weightserver.common.processes import end_at_sigterm


class Command(NamedTuple):
    """Where a command is run."""

    module: str
    """It has a function main(arguments)."""
    first: tuple[str, ...] = ()
    """Arguments of that function before those of the command line."""
    all_options: tuple[str, ...] = ()
    """Arguments before --help that list every option where the command line has none."""


COMMANDS = {
    "train": Command("trainer.__main__", all_options=("images",)),
    "demo": Command("trainer.demo"),
    "report": Command("trainer.__main__", ("report",)),
    "evaluate": Command("trainer.evaluate.__main__"),
    "embed": Command("trainer.embed"),
    "export": Command("trainer.export.__main__"),
    "duplicates": Command("trainer.__main__", ("duplicates",)),
    "inspect": Command("trainer.data.__main__", ("inspect",)),
    "pack": Command("trainer.data.__main__", ("pack",)),
    "verify": Command("trainer.data.__main__", ("verify",)),
    "preview": Command("trainer.data.__main__", ("preview",)),
    "serve": Command("weightserver.cli", ("serve",)),
}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs a command; exits with its status, and with 2 if there is no such command."""
    end_at_sigterm()
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "--help-all"):
        _print_and_exit(overview())
    if name == "--version":
        _print_and_exit(metadata.version("pic-weightserver"))
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "pic --help lists the commands"
        print(f"pic: unknown command {name!r}: {hint}", file=sys.stderr)
        sys.exit(2)
    if not {"-h", "--help"}.isdisjoint(options):
        _print_and_exit(PAGES[name])
    command = COMMANDS[name]
    if options == ["--help-all"]:
        options = [*command.all_options, "--help"]
    options = ["--help" if option == "--help-all" else option for option in options]
    sys.exit(import_module(command.module).main([*command.first, *options]))


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    sys.exit(0)


if __name__ == "__main__":
    main()
