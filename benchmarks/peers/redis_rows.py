"""Redis with one row a key: pipelined MGET and MSET."""

from __future__ import annotations

from itertools import chain
from typing import Any

from benchmarks.peers.peer import (
    CORRECTION,
    DURABILITY,
    EXACTLY_ONCE,
    ServedPeer,
    Server,
    free_port,
    keys_of,
    made_rows,
    missing_of,
    rows_of,
    values_of,
)
from weightserver.core.arrays import Float32Array, Int64Array

_KEYS_PER_COMMAND = 1_024
"""The fastest of 256, 1,024, 8,192 and 65,536 for 65,536 rows."""


class Redis(ServedPeer):
    key, name, durable = "redis", "Redis, no AOF", False
    does_not: tuple[str, ...] = (CORRECTION, DURABILITY, EXACTLY_ONCE)
    _client: Any = None

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(modules=["redis", "hiredis"], program="redis-server", package="redis-server")

    def start(self) -> None:
        import redis

        port = free_port()
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "yes" if self.durable else "no", "--appendfsync", "always"]
        command += ["--auto-aof-rewrite-percentage", "0"]  # which would take the other peers' time
        self._server = Server(command, self.directory / "log")
        self._client = redis.Redis("127.0.0.1", port)

        def answers() -> bool:
            try:
                return bool(self._client.ping())
            except redis.ConnectionError:
                return False

        self._server.wait_until(answers)

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self.write(ids, rows)

    def fetch(self, ids: Int64Array) -> Float32Array:
        pipeline, keys = self._client.pipeline(transaction=False), keys_of(ids)
        for first in range(0, len(keys), _KEYS_PER_COMMAND):
            pipeline.mget(keys[first : first + _KEYS_PER_COMMAND])
        return rows_of(list(chain.from_iterable(pipeline.execute())))

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        """Atomic for each command, not for all rows."""
        pipeline = self._client.pipeline(transaction=False)
        items = list(zip(keys_of(ids), values_of(rows), strict=True))
        for first in range(0, len(items), _KEYS_PER_COMMAND):
            pipeline.mset(dict(items[first : first + _KEYS_PER_COMMAND]))
        pipeline.execute()

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()


class DurableRedis(Redis):
    key, name, durable = "redis-aof", "Redis, AOF synced", True
    does_not = (CORRECTION, EXACTLY_ONCE)
