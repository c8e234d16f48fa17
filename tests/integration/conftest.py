"""The command line in this process."""

from __future__ import annotations

import pytest

from tests.helpers.operations import Weightserver
from weightserver.cli import main


@pytest.fixture
def weightserver(capsys: pytest.CaptureFixture[str]) -> Weightserver:
    """Runs a command; returns its exit status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int | str | None, str, str]:
        capsys.readouterr()  # discards earlier output
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        return stopped.value.code, *capsys.readouterr()

    return run
