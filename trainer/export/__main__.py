"""The command `python -m trainer.export`: exports rows and encoders, and imports encoders."""

from __future__ import annotations

from typing import NoReturn

from trainer.loading import loading_libraries


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line: see `trainer.export.command`."""
    with loading_libraries("trainer.export"):
        from trainer.export.command import run
    run(arguments)


if __name__ == "__main__":
    main()
