"""A sharded, durable store of classifier rows that corrects untouched rows exactly when they are fetched.

The names listed in `__all__` are the public interface; everything else may change. The trainer, which is released with
this package, uses them and the modules of `core` and `common`, and `operations.export`.
"""

import os
import sys
from pathlib import Path

# gRPC reads this when it is imported. It would log failed handshakes, which the client's errors explain better.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if sys.argv and Path(sys.argv[0]).name.startswith(("-m", "weightserver", "pic-")):  # "-m" while it finds a module
    from weightserver.common.interrupts import end_quietly

    end_quietly()  # of a command, before imports that take a moment

from weightserver.client.client import WeightClient
from weightserver.client.results import RowState, TableInfo
from weightserver.client.security import ClientSecurity
from weightserver.common.version import __version__ as __version__
from weightserver.core.checkpoints import Checkpoint
from weightserver.core.errors import (
    AuthenticationError,
    ClusterError,
    DataLossError,
    FencedError,
    InvalidRequestError,
    NoTableError,
    OverloadedError,
    ShardUnavailableError,
    StepError,
    StorageError,
    TableMismatchError,
    WeightServerError,
)
from weightserver.core.spec import TableSpec
from weightserver.local_cluster import LocalCluster

__all__ = [
    "AuthenticationError",
    "Checkpoint",
    "ClientSecurity",
    "ClusterError",
    "DataLossError",
    "FencedError",
    "InvalidRequestError",
    "LocalCluster",
    "NoTableError",
    "OverloadedError",
    "RowState",
    "ShardUnavailableError",
    "StepError",
    "StorageError",
    "TableInfo",
    "TableMismatchError",
    "TableSpec",
    "WeightClient",
    "WeightServerError",
]
