"""Row stores, which hold the classifier's rows. Training gives the same result with each of them, up to rounding."""

from trainer.rows.dense import DenseRows
from trainer.rows.remote import RemoteRows
from trainer.rows.resident import ResidentRows
from trainer.rows.store import RowCounters, RowStore

__all__ = ["DenseRows", "RemoteRows", "ResidentRows", "RowCounters", "RowStore"]
