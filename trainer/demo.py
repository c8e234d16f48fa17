"""The command `python -m trainer.demo`: trains on real images with local weight servers."""

from __future__ import annotations

from typing import NoReturn

from trainer.loading import loading_libraries


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line: see `trainer.demonstration`."""
    with loading_libraries("trainer.demo"):
        from trainer.demonstration import run
    run(arguments)


if __name__ == "__main__":
    main()
