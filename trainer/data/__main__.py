"""The command `python -m trainer.data`: packs, verifies and previews images."""

from __future__ import annotations

from typing import NoReturn

from trainer.loading import loading_libraries


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line: see `trainer.data.command`."""
    with loading_libraries("trainer.data"):
        from trainer.data.command import run
    run(arguments)


if __name__ == "__main__":
    main()
