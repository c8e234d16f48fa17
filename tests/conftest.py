"""What tests share: one two-shard cluster for all that need servers, and a fresh table on it for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from weightserver import LocalCluster, WeightClient

# A busy machine is no failure.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Command lines that run in this process set it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny networks gain nothing from more, and busy machines lose much."""
    import torch  # a weight server's tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two real shard processes; tests may not stop them."""
    with LocalCluster(2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[WeightClient]:
    """A client of the shared cluster, without a table; whatever table the test makes is dropped."""
    with WeightClient(cluster.addresses, timeout_seconds=10, retry_seconds=10) as client:
        client.drop_table()
        yield client
        client.drop_table()
