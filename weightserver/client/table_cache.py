"""The table as a client knows it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weightserver.client import agreement
from weightserver.client.agreement import Answers
from weightserver.client.fan_out import Shards
from weightserver.core.precision import Precision, precision_of
from weightserver.core.spec import TableSpec
from weightserver.protocol.codec import table_digest


@dataclass(frozen=True)
class KnownTable:
    """A table that all shards hold."""

    spec: TableSpec
    identity: bytes

    @cached_property
    def digest(self) -> int:
        """Names the table in requests."""
        return table_digest(self.spec, self.identity)

    @cached_property
    def precision(self) -> Precision:
        """How values of rows are sent."""
        return precision_of(self.spec)


class TableCache:
    """Remembers what the shards described, and asks them for what is missing."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.known: KnownTable | None = None

    @property
    def table(self) -> KnownTable:
        """The table; asks the shards if it is not known yet.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards do not hold one table.
        """
        if self.known is None:
            self.known = self.common_table(self._shards.describe())
        return self.known

    def forget(self) -> None:
        self.known = None

    def common_table(self, answers: Answers) -> KnownTable:
        return KnownTable(agreement.common_spec(answers), agreement.common_identity(answers, self._shards.names))
