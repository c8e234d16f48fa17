"""The table of a shard: what its rows are, which of them live here, and how they move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.correction import Schedule
from weightserver.core.errors import InvalidRequestError, NoTableError, TableMismatchError
from weightserver.core.sharding import Sharding
from weightserver.core.spec import TableSpec
from weightserver.protocol.codec import table_number
from weightserver.shard.rates import ScheduledRates


@dataclass(frozen=True)
class Table:
    """A table that exists."""

    spec: TableSpec
    codec: BlockCodec
    rates: ScheduledRates
    """The learning rates that its writes have used; or those of one request, which begin with these."""
    identity: bytes
    """16 random bytes of the call that created it."""
    num_rollbacks: int = 0
    """Since the shard started."""

    @classmethod
    def of(cls, spec: TableSpec, identity: bytes) -> Table:
        """The table without learning rates."""
        rates = ScheduledRates.of(spec, np.zeros(0, np.float32))
        return cls(spec, BlockCodec(spec), rates, identity)

    @property
    def schedule(self) -> Schedule:
        return self.rates.schedule

    def with_rates(self, rates: ScheduledRates) -> Table:
        return replace(self, rates=rates)

    def extended(self, num_rows: int) -> Table:
        spec = replace(self.spec, num_rows=num_rows)
        return replace(self, spec=spec, codec=BlockCodec(spec))

    @cached_property
    def number(self) -> int:
        """Names the table in requests, also after an extension."""
        return table_number(self.spec, self.identity)

    def check_number(self, number: int) -> None:
        """Raises TableMismatchError unless `number` names this table, or is 0."""
        if number not in (0, self.number):
            raise TableMismatchError(f"the table was replaced, it is now {self.spec}: call describe() and start over")

    def check_rows(self, rows: Int64Array, *, shard: int, num_shards: int) -> None:
        """Raises InvalidRequestError unless `rows` (int64 [n]) increase strictly and all live on the shard."""
        if len(rows) == 0:
            return
        if rows[0] < 0 or rows[-1] >= self.spec.num_rows:
            raise InvalidRequestError(f"rows must lie in 0..{self.spec.num_rows - 1}, got {rows[0]}..{rows[-1]}")
        if (rows[1:] <= rows[:-1]).any():  # a difference could wrap
            raise InvalidRequestError("the rows of one request must increase strictly")
        elsewhere = Sharding(self.spec.rows_per_block, num_shards).shard_of(rows) != shard
        if elsewhere.any():
            row = int(rows[elsewhere.argmax()])
            raise InvalidRequestError(f"row {row} does not live on shard {shard} of {num_shards}", row=row)


def existing(table: Table | None) -> Table:
    """The table. Raises NoTableError if there is none."""
    if table is None:
        raise NoTableError("the shard holds no table: a run begins one, or create_table()")
    return table
