"""The table and its learning rates as a client knows them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weightserver.client import agreement
from weightserver.client.agreement import Answers
from weightserver.client.fan_out import Shards
from weightserver.client.schedule_caller import KnownSchedule, common_schedule
from weightserver.core.arrays import Float32Array
from weightserver.core.errors import ClusterError, StepError, TableMismatchError
from weightserver.core.precision import Precision, precision_of
from weightserver.core.spec import TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import ScheduleHash, float32_from_bytes, table_digest

_MAX_READS = 10
"""How many times a schedule that changes while it is read is read again."""


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
        self._table: KnownTable | None = None
        self.schedule: KnownSchedule | None = None
        """Learning rates by which this client reads and writes; None until they are first needed."""

    @property
    def table(self) -> KnownTable:
        """The table; asks the shards if it is not known yet.

        Raises:
            NoTableError: a shard holds no table.
            ClusterError: the shards do not hold one table.
        """
        if self._table is None:
            self._table = self._common_table(self._shards.describe())
        return self._table

    @table.setter
    def table(self, table: KnownTable) -> None:
        self._table = table

    def learn(self, answers: Answers) -> KnownTable:
        """Replaces what is known by what the shards described; returns the table."""
        table, schedule = self._common_table(answers), self._common_schedule(answers)
        self._table, self.schedule = table, schedule
        return table

    def forget(self) -> None:
        self._table = self.schedule = None

    def schedule_digest(self, num_steps: int) -> int:
        """Digest of the known learning rates; asks the shards for more if fewer than `num_steps` are known.

        Raises:
            StepError: only some of the shards have learning rates for so many steps.
            TableMismatchError: known learning rates were changed too.
        """
        known = self.schedule
        if known is None or num_steps > known.horizon:
            answers = self._shards.describe()
            now = self._common_schedule(answers)
            if now.horizon < num_steps <= max(answer.horizon for answer in answers):
                raise StepError(
                    f"a shard has learning rates for {now.horizon} steps, others for more: call extend_schedule() with "
                    "all of them"
                )
            if known and now != known and ScheduleHash(self.learning_rates(0)[: known.horizon]).digest != known.digest:
                raise TableMismatchError(
                    f"learning rates of steps below {known.horizon} were changed by another call: call describe() to "
                    "use the current ones"
                )
            self.schedule = known = now
        return known.digest

    def learning_rates(self, shard: int) -> Float32Array:
        """All learning rates of a shard, float32 [horizon of the shard]."""
        connection = self._shards.connections()[shard]
        for _ in range(_MAX_READS):
            parts = [np.zeros(0, np.float32)]
            while True:
                request = pb.ReadScheduleRequest(start_step=sum(map(len, parts)))
                answer = connection.call("ReadSchedule", request)
                parts.append(float32_from_bytes(answer.learning_rates, "learning_rates"))
                if not len(parts[-1]):
                    break
            rates = np.concatenate(parts)
            if ScheduleHash(rates).digest == answer.schedule:
                return rates
        raise ClusterError(f"the learning rates of shard {shard} change while they are read: call again")

    def _common_table(self, answers: Answers) -> KnownTable:
        return KnownTable(agreement.common_spec(answers), agreement.common_identity(answers, self._shards.names))

    def _common_schedule(self, answers: Answers) -> KnownSchedule:
        """The learning rates that all shards have.

        Raises:
            ClusterError: they differ, also when asked again; the first answers may show a change in progress.
        """
        with contextlib.suppress(ClusterError):
            return common_schedule(answers, self.learning_rates)
        return common_schedule(self._shards.describe(), self.learning_rates)
