"""torch.distributed.rpc: another process holds the matrix in memory."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.peer import CORRECTION, DIM, DURABILITY, EXACTLY_ONCE, ServedPeer, Server, made_rows, missing_of
from weightserver.common.malloc import keep_large_buffers
from weightserver.core.arrays import Float32Array, Int64Array

if TYPE_CHECKING:
    import torch

_STOP_SECONDS = 30
_matrix: Any = None
"""float32 [num_rows, DIM] in the server."""


def fetched(ids: torch.Tensor) -> torch.Tensor:
    """The rows of `ids`; runs in the server."""
    return _matrix[ids]


def write(ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Replaces rows; runs in the server."""
    _matrix[ids] = rows


def join(rank: int, meeting_point: Path) -> Any:
    """Joins server (rank 0) and client (rank 1) on loopback; returns torch.distributed.rpc."""
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    from torch.distributed import rpc

    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own call
    # Messages travel over TCP; tensors may go from one process's memory to the other's, where the system allows it.
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}", _transports=["uv"])
    rpc.init_rpc(("server", "client")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def serve(num_rows: int, meeting_point: Path) -> None:
    """Holds the matrix until this process is ended."""
    global _matrix
    import torch

    keep_large_buffers()
    _matrix = torch.zeros(num_rows, DIM)
    join(0, meeting_point).shutdown()


class TorchRpc(ServedPeer):
    key, name, durable = "torch-rpc", "torch.distributed.rpc", False
    does_not = (CORRECTION, DURABILITY, EXACTLY_ONCE)
    _rpc: Any = None

    @classmethod
    def missing(cls) -> str | None:
        return missing_of(modules=["torch"])

    def start(self) -> None:
        meeting_point = self.directory / "meeting-point"
        # Not -m: functions are sent by the name of their module.
        code = f"from pathlib import Path; from {__name__} import serve; "
        code += f"serve({self.num_rows}, Path({str(meeting_point)!r}))"
        self._server = Server([sys.executable, "-c", code], self.directory / "log")
        self._rpc = join(1, meeting_point)

    def fill(self) -> None:
        for ids, rows in made_rows(self.num_rows):
            self.write(ids, rows)

    def fetch(self, ids: Int64Array) -> Float32Array:
        import torch

        return np.asarray(self._rpc.rpc_sync("server", fetched, args=(torch.from_numpy(ids),)))

    def write(self, ids: Int64Array, rows: Float32Array) -> None:
        import torch

        self._rpc.rpc_sync("server", write, args=(torch.from_numpy(ids), torch.from_numpy(rows)))

    def disconnect(self) -> None:
        if self._rpc is not None:
            is_alive = self._server is not None and self._server.process.poll() is None
            self._rpc.shutdown(graceful=is_alive, timeout=_STOP_SECONDS)
