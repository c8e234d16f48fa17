"""python -m weightserver: the same as the command `weightserver`."""

from __future__ import annotations

from typing import NoReturn

from weightserver.common.processes import end_at_sigterm


def main() -> NoReturn:
    """Runs one command; its libraries, which take a second to import, come after the handler of SIGTERM."""
    end_at_sigterm()
    from weightserver.cli import main as run

    run()


if __name__ == "__main__":
    main()
