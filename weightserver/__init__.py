"""A sharded, durable store of classifier rows that corrects untouched rows exactly when they are fetched.

The names listed in `__all__` are the public interface; everything else may change. The trainer, which is released with
this package, uses them and the modules of `core` and `common`, and `operations.export`. Importing the package changes
nothing in the process, and loads only the names that are used.
"""

from typing import TYPE_CHECKING

from weightserver.common.lazy_names import lazy_names
from weightserver.common.version import __version__ as __version__

if TYPE_CHECKING:
    from weightserver.client.client import WeightClient
    from weightserver.client.results import RowState, TableInfo
    from weightserver.client.security import ClientSecurity
    from weightserver.core.checkpoints import Checkpoint
    from weightserver.core.errors import (
        AuthenticationError,
        ClusterError,
        DataLossError,
        FencedError,
        InvalidRequestError,
        NoTableError,
        OverloadedError,
        SessionInUseError,
        ShardUnavailableError,
        StepError,
        StorageError,
        TableMismatchError,
        WeightServerError,
        WrongShardError,
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
    "SessionInUseError",
    "ShardUnavailableError",
    "StepError",
    "StorageError",
    "TableInfo",
    "TableMismatchError",
    "TableSpec",
    "WeightClient",
    "WeightServerError",
    "WrongShardError",
]
_ELSEWHERE = {
    "WeightClient": "weightserver.client.client",
    "RowState": "weightserver.client.results",
    "TableInfo": "weightserver.client.results",
    "ClientSecurity": "weightserver.client.security",
    "Checkpoint": "weightserver.core.checkpoints",
    "TableSpec": "weightserver.core.spec",
    "LocalCluster": "weightserver.local_cluster",
}
__getattr__ = lazy_names(__name__, {name: _ELSEWHERE.get(name, "weightserver.core.errors") for name in __all__})
