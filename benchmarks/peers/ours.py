"""One of our shards: exact correction in every fetch, durable pushes of gradients."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from benchmarks.peers.peer import DIM, Peer, made_rows
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array, Int64Array

GAP = 18_000
"""Steps between a filled row's last update and the step it is fetched for, as over an epoch of ImageNet-11K."""
STEPS_PER_WRITE = 500
"""Between two writes, so that rows that are written again have missed updates as well."""
NUM_STEPS = 400_000
MAX_WRITES = (NUM_STEPS - 2 * GAP) // (STEPS_PER_WRITE + 1)


class Ours(Peer):
    key, name, durable, does_not = "ours", "ours", True, ()

    def __init__(self, directory: Path, num_rows: int) -> None:
        super().__init__(directory, num_rows)
        self._cluster: LocalCluster | None = None
        self._steps = itertools.count(GAP)
        self._out = np.empty((0, DIM), np.float32)

    def start(self) -> None:
        self._cluster = LocalCluster(1, self.directory)
        self._client = WeightClient(self._cluster.addresses)
        self._client.create_table(TableSpec(num_rows=self.num_rows, dim=DIM))
        self._client.extend_schedule(0, np.linspace(0.06, 0, NUM_STEPS, dtype=np.float32))
        self._client.open_session("benchmark")

    def fill(self) -> None:
        """The rows' last updates spread over the first 300 steps."""
        momentum = np.random.default_rng(2).standard_normal((1 << 14, DIM), np.float32)
        for ids, rows in made_rows(self.num_rows):
            self._client.write_state(ids, rows, momentum[: len(ids)], ids // 512 % 300)

    def fetch(self, ids: Int64Array) -> Float32Array:
        """Corrected for a step that was not asked for before."""
        if len(self._out) != len(ids):
            self._out = np.empty((len(ids), DIM), np.float32)
        return self._client.fetch(ids, step=next(self._steps), out=self._out)

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        step = next(self._steps)
        self._client.push_gradients(ids, rows, step=step)
        self._steps = itertools.count(step + STEPS_PER_WRITE)

    def server_pid(self) -> int | None:
        assert self._cluster is not None
        return self._cluster.processes[0].pid

    def stop(self) -> None:
        if self._cluster is not None:
            self._client.close()
            self._cluster.close()
