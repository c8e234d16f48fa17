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
    """Runs a command that ends with status 1; returns its one line, after what it says of a source."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert data_command(*arguments) == 1
        *of_source, line = capsys.readouterr().err.splitlines()
        assert all(one.startswith("left out of ") or " are splits: " in one for one in of_source)
        return line

    return run
