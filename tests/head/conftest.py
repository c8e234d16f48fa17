"""Heads on the shared shards, of which each test gets empty ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.own_loop import DIM, NUM_CLASSES, SETTINGS
from tests.helpers.torchrun import torchrun
from weightserver import LocalCluster, WeightClient
from weightserver.torch import ClassifierHead

MakeHead = Callable[..., ClassifierHead]


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Tiny networks."""


@pytest.fixture
def make_head(cluster: LocalCluster, client: WeightClient) -> Iterator[MakeHead]:
    """Makes heads on the shared servers (none for dense rows), and closes them."""
    with ExitStack() as stack:

        def make(rows: str = "resident", **settings: Any) -> ClassifierHead:
            servers = None if rows == "dense" else cluster.addresses
            given: dict[str, Any] = {"servers": servers, "retry_seconds": 20} | SETTINGS | settings
            head = ClassifierHead(NUM_CLASSES, DIM, rows=rows, **given)  # type: ignore[arg-type]
            return stack.enter_context(head)

        yield make


@pytest.fixture(scope="session")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what two ranks have written: see ranks.py."""
    directory = tmp_path_factory.mktemp("ranks")
    with LocalCluster(2) as cluster:
        torchrun("tests.head.ranks", directory, *cluster.addresses, seconds=500)
    return directory


def drop_table(servers: list[str]) -> None:
    """Drops the ranks' table when all of them are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        with WeightClient(servers) as client:
            client.drop_table()
    dist.barrier()


@pytest.fixture
def embeddings() -> torch.Tensor:
    """A batch of four, (4, D)."""
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(0), requires_grad=True)
