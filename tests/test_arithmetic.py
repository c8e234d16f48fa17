"""Rows, orders, schedules and learning rates are the same bits on every machine: yesterday's, and on aarch64."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import arithmetic
from tests.helpers.aarch64 import Aarch64

GOLDEN = json.loads((Path(__file__).parent / "golden/arithmetic.json").read_text())


def test_arithmetic_is_yesterdays() -> None:
    """A change of these bits changes the values of rows that were stored before."""
    assert arithmetic.digests() == GOLDEN


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Aarch64:
    lacking = [tool for tool in ("qemu-aarch64", "apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"this machine lacks {', '.join(lacking)}: on Debian, apt-get install qemu-user")
    try:
        return Aarch64(tmp_path_factory.mktemp("aarch64"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"packages for aarch64 cannot be had: {error.cmd[0]} said {error.stderr.strip().splitlines()[-1:]}")


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["cortex-a57", "max"], ids="{} of qemu".format)
def test_arithmetic_is_the_same_on_aarch64(processor: str, aarch64: Aarch64) -> None:
    """Without and with vectors of any length (SVE)."""
    assert json.loads(aarch64.run(Path(arithmetic.__file__), processor=processor)) == GOLDEN
