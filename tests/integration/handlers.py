"""A shard's handlers in this process, without a channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from weightserver.server.metrics import ShardMetrics
from weightserver.server.request_memory import RequestMemory
from weightserver.server.service import WeightServerService
from weightserver.shard.changes import ShardChange
from weightserver.shard.group_commit import Committer
from weightserver.shard.shard import Shard
from weightserver.storage.interface import Storage


@dataclass
class Handlers:
    shard: Shard
    committer: Committer
    memory: RequestMemory
    service: WeightServerService

    def do(self, operation: Callable[[ShardChange], Any]) -> None:
        self.committer.submit(operation).result(60)


@contextmanager
def handlers(storage: Storage, *, num_shards: int = 1) -> Iterator[Handlers]:
    """Those of shard 0, with 64 MiB for requests."""
    shard, memory = Shard(storage, shard=0, num_shards=num_shards), RequestMemory(64 << 20)
    metrics = ShardMetrics(shard=0, num_shards=num_shards, version="0")
    with closing(Committer(shard.batch)) as committer:
        yield Handlers(shard, committer, memory, WeightServerService(shard, committer, metrics, memory))
