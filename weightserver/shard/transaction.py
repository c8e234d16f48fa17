"""One write transaction of a shard, and the header of a write in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weightserver.core.lineage import split_mark
from weightserver.core.versions import by_block, unneeded
from weightserver.shard.lease import Lease
from weightserver.shard.rates import GivenRates, ScheduledRates
from weightserver.shard.table import Table, existing
from weightserver.storage.interface import Transaction
from weightserver.storage.records import State


@dataclass(frozen=True)
class WriteHeader:
    """Identifies a write: the session, the writer, and its number; see the wire contract."""

    epoch: int
    session_id: bytes
    writer: bytes
    sequence: int
    step: int
    rates: GivenRates = field(default_factory=GivenRates)
    """The learning rates that it uses."""


@dataclass
class WriteTransaction:
    """A write transaction under way. Operations replace `state` and `peers`, which are stored before the commit, and
    `table`."""

    txn: Transaction
    state: State
    mark: str
    """The shard's mark once this is committed."""
    table: Table | None
    peers: Sequence[str]
    """The marks of all shards that a client reported last."""
    shard: int
    ahead: ScheduledRates | None
    """Learning rates beyond the used ones that the shard has in memory."""
    lease: Lease
    to_sweep: list[int] = field(default_factory=list)
    """Blocks whose unneeded versions are deleted once the state is stored, as that does not change it."""
    is_cancelled: Callable[[], bool] = lambda: False
    """Whether the caller of the running operation has stopped waiting for it."""

    def note_rows(self) -> None:
        """Takes note that rows are changed."""
        self.state = replace(self.state, rows_commit=split_mark(self.mark)[1])

    def delete_unneeded(self, block: int) -> None:
        """Deletes the versions of a block that neither the newest state nor a checkpoint needs."""
        found, versions = next(by_block(self.txn.versions(block)), (block, []))
        if found == block:
            for version in unneeded(versions, self.state.checkpoints):
                self.txn.delete_block(version)

    def require_table(self) -> Table:
        """The table. Raises NoTableError if there is none."""
        return existing(self.table)
