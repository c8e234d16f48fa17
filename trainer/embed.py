"""The command `python -m trainer.embed`: computes the features of images with a trained encoder."""

from __future__ import annotations

from typing import NoReturn

from trainer.loading import loading_libraries


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line: see `trainer.embedding`."""
    with loading_libraries("trainer.embed"):
        from trainer.embedding import run
    run(arguments)


if __name__ == "__main__":
    main()
