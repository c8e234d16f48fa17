"""All shards of a cluster as a client sees them: lazy connections in the order of shards, and calls of many at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from weightserver.client import threads
from weightserver.client.calls import WATCH
from weightserver.client.channels import CLOSED
from weightserver.client.connection import ShardConnection
from weightserver.client.threads import raise_first
from weightserver.common.version import __version__, works_with
from weightserver.core.errors import ClusterError, DataLossError
from weightserver.protocol._generated import weight_server_pb2 as pb

Result = TypeVar("Result")
Answers = Sequence[pb.DescribeResponse]
"""How the shards describe themselves, in the order of shards."""
ONE_CLUSTER = "give the addresses of one cluster"
_PAUSE_SECONDS = 0.5
"""Before names that lead to one shard are looked up again."""


class Shards:
    """The shards at some addresses, in the order of shards. Safe to use from any thread; connects with the first call.

    Args:
        addresses: host:port of every shard, in any order; each shard says which one it is.
        options: passed to every `ShardConnection`.
    """

    def __init__(self, addresses: Sequence[str], **options: Any) -> None:
        self._addresses = list(addresses)
        self._options = options
        self._lock = threading.Lock()
        self._connections: list[ShardConnection] | None = None
        self._open: set[ShardConnection] = set()
        """The connections, and those of threads that are connecting."""
        self._closed = False
        self.identity, self.table = b"", 0
        """The table's identity, and its number in requests; empty and 0 while none is known."""
        self._process = os.getpid()

    # ---- calls

    @staticmethod
    def in_parallel(call: Callable[..., Result], arguments: Iterable[tuple[Any, ...]]) -> list[Result]:
        """Calls once for each shard's arguments; all the calls end before the first error is raised."""
        outcomes = threads.outcomes(call, arguments)
        raise_first(outcomes)
        return outcomes

    def describe(self) -> list[pb.DescribeResponse]:
        return self._describe(self.connections())

    def _describe(self, connections: list[ShardConnection]) -> list[pb.DescribeResponse]:
        request = pb.DescribeRequest()
        return self.in_parallel(lambda connection: connection.call("Describe", request), zip(connections, strict=True))

    def timeline(self) -> bytes:
        """Names the newest rollback, restore or forced session of shard 0."""
        answer: pb.DescribeResponse = self.connections()[0].call("Describe", pb.DescribeRequest())
        return answer.timeline

    def marks(self) -> list[str]:
        """The newest mark of each shard that this client has seen; empty for a shard that has answered nothing yet."""
        return [connection.acknowledged for connection in self.connections()]

    # ---- connections

    def name_table(self, identity: bytes, number: int) -> None:
        """From now on, calls are for shards of this table; of any if the identity is empty and the number 0."""
        self.identity, self.table = identity, number
        for connection in self.connections():
            connection.table = identity

    @property
    def data_loss(self) -> DataLossError | None:
        """One that a call of a shard raised since `forget_data_loss`."""
        return next((shard.data_loss for shard in self._connections or () if shard.data_loss), None)

    def forget_data_loss(self) -> None:
        for connection in self.connections():
            connection.data_loss = None

    @property
    def names(self) -> list[str]:
        """The shards' names in error messages."""
        return [connection.name for connection in self.connections()]

    @property
    def are_inherited(self) -> bool:
        """Whether they were made in a process of which this one is a fork."""
        return self._process != os.getpid()

    def require_usable(self) -> None:
        """Raises ValueError if they are closed, or were made in a process of which this one is a fork: neither the
        threads nor the locks of gRPC are usable here. Every call of a client passes here before it takes a lock."""
        if self.are_inherited:
            raise ValueError(
                f"this client was made in another process ({self._process}) and cannot be used in a fork of it: make "
                "one in each process, for example in a DataLoader's worker_init_fn, with "
                "multiprocessing_context='forkserver' if other threads use a client meanwhile"
            )
        if self._closed:
            raise ValueError(CLOSED)

    def connections(self) -> list[ShardConnection]:
        """Raises ValueError unless they are usable."""
        self.require_usable()
        if self._connections is None:  # not under the lock: no caller waits for another's attempts
            self._adopt(self._connect())
        return self._connections or self.connections()

    def close(self) -> None:
        """Closes the connections, which ends calls of other threads and those left by interrupts. Safe to repeat."""
        with self._lock:
            self._closed = True
        self._disconnect(list(self._open))
        WATCH.look()  # the process may end before its next look, which would tell that a shard answers again

    def _connect(self) -> list[ShardConnection]:
        """Connects to every address, and asks each which shard it is; again while two names lead to one shard."""
        deadline = time.monotonic() + self._options["connect_seconds"]
        while True:
            connections = [ShardConnection(address, **self._options) for address in self._addresses]
            self._open.update(connections)
            try:
                self.require_usable()  # `close` may have come before it could know of them
                answers = self._describe(connections)
                is_doubled = len({answer.shard for answer in answers}) < len(set(self._addresses))
                if not is_doubled or time.monotonic() >= deadline:
                    ordered = [connections[position] for position in _shard_order(answers, self._addresses)]
                    homes = [connection.address for connection in ordered]
                    for shard, connection in enumerate(ordered):
                        connection.identify(shard, homes)
                    return ordered
            except BaseException:
                self._disconnect(connections)
                raise
            self._disconnect(connections)
            time.sleep(_PAUSE_SECONDS)

    def _adopt(self, connections: list[ShardConnection]) -> None:
        """Keeps these connections, unless another thread connected first."""
        with self._lock:
            if self._connections is None and not self._closed:
                self._connections = connections
                return
        self._disconnect(connections)

    def _disconnect(self, connections: list[ShardConnection]) -> None:
        for connection in connections:
            connection.close()
        self._open.difference_update(connections)


def _shard_order(answers: Answers, addresses: Sequence[str]) -> list[int]:
    """Positions of the addresses in the order of shards.

    Args:
        answers: one for each address, in the order of `addresses`.

    Raises:
        ClusterError: a shard is of another version or cluster, given twice, or missing.
    """
    num_shards = answers[0].num_shards
    position: dict[int, int] = {}
    for number, (answer, address) in enumerate(zip(answers, addresses, strict=True)):
        if not works_with(answer.server_version):
            raise ClusterError(
                f"{address} is a shard of version {answer.server_version or 'unknown'}, this client is of "
                f"{__version__}: use one minor version for all"
            )
        if answer.num_shards != num_shards:
            raise ClusterError(
                f"{address} is a shard of {answer.num_shards}, {addresses[0]} one of {num_shards}: {ONE_CLUSTER}"
            )
        if (other := position.setdefault(answer.shard, number)) != number:
            raise ClusterError(f"{addresses[other]} and {address} are both shard {answer.shard}: give each shard once")
    if missing := [str(shard) for shard in range(num_shards) if shard not in position]:
        raise ClusterError(
            f"{len(addresses)} of {num_shards} shards were given: add the address of shard {', '.join(missing)}"
        )
    return [position[shard] for shard in range(num_shards)]
