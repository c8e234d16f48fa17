"""Row stores, which hold the classifier's rows. Training gives the same result with each of them, up to rounding.

Import from it: the names below, by the modules of the folder above it.
It may import: `rates` and `transfer` of that folder, and what that folder may.
"""

from weightserver.torch.rows.dense import DenseRows
from weightserver.torch.rows.remote import RemoteRows
from weightserver.torch.rows.resident import ResidentRows
from weightserver.torch.rows.store import RowCounters, RowStore

__all__ = ["DenseRows", "RemoteRows", "ResidentRows", "RowCounters", "RowStore"]
