"""Row stores, which hold the classifier's rows. Training gives the same result with each of them, up to rounding.

Import from it: the names below, by `run`, the loop and what builds it.
It may import: no other folder.
"""

from trainer.rows.dense import DenseRows
from trainer.rows.remote import RemoteRows
from trainer.rows.resident import ResidentRows
from trainer.rows.store import RowCounters, RowStore

__all__ = ["DenseRows", "RemoteRows", "ResidentRows", "RowCounters", "RowStore"]
