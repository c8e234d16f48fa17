"""Row stores: who holds the classifier's rows. Training with any of them is the same, up to rounding."""

from trainer.rows.dense import DenseRows
from trainer.rows.remote import RemoteRows
from trainer.rows.resident import ResidentRows
from trainer.rows.store import RowCounters, RowStore

__all__ = ["DenseRows", "RemoteRows", "ResidentRows", "RowCounters", "RowStore"]
