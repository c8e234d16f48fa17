"""Commands of data in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.commands import data_command


@pytest.fixture
def done(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that succeeds; returns what it prints."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert data_command(*arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that ends with status 1; returns the last line that it says."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert data_command(*arguments) == 1
        return capsys.readouterr().err.splitlines()[-1]

    return run
