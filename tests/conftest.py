"""Shared fixtures: one cluster of two shards for all tests that need servers, and a fresh table on it for each."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from weightserver import LocalCluster, WeightClient

if TYPE_CHECKING:
    from tests.helpers.gpus import Gpus

# Programs that a shell starts in the background ignore Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine must not fail a test.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """Restores logging, which command lines that run in this process set up."""
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One torch thread: more do not help tiny networks, and slow down busy machines."""
    import torch  # the weight server's tests do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two real shard processes, which tests must not stop."""
    with LocalCluster(2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[WeightClient]:
    """A client of the shared cluster, without a table; the table that the test makes is dropped."""
    assert all(process.poll() is None for process in cluster.processes), "a test before this one ended a shard"
    with WeightClient(cluster.addresses, timeout_seconds=30, retry_seconds=40) as client:
        client.drop_table()
        yield client
        client.drop_table()


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Gpus:
    """Real GPUs for a test with the marker gpu, simulated ones for others; skips the test if there are none."""
    import torch  # the weight server's tests do not need it

    from tests.helpers import pretended_gpu
    from tests.helpers.gpus import NUM_PRETENDED, Gpus

    if request.node.get_closest_marker("gpu") is None:
        if (reason := pretended_gpu.unavailable()) is not None:
            pytest.skip(reason)
        pretended_gpu.compile_library()
        return Gpus(NUM_PRETENDED, pretended=True)
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        pytest.skip("needs a GPU, and torch finds none: see nvidia-smi, and whether torch is a CUDA build")
    return Gpus(number, pretended=False)
