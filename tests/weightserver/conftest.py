"""The compiled kernel, for several files."""

from __future__ import annotations

import pytest

from tests.helpers.kernels_built import build, load
from weightserver.core import kernel


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> kernel.Kernel:
    """Today's source, compiled as an installation compiles it."""
    return load(build(tmp_path_factory.mktemp("kernel")))
