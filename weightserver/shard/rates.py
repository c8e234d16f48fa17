"""The learning rates by which a shard moves rows: those that its writes have used, and those that requests bring.

A request names the learning rates of the steps below its own: how many of them it believes the shard has, their digest,
and those that follow (`GivenRates`). A write stores those that it uses first, with the rows, so a shard stores exactly
the learning rates of the steps below its clock. A fetch stores nothing; the shard keeps the newest learning rates that
one brought in memory, so that requests for the same step need not bring them again.

No used learning rate changes, except that a rollback forgets those after the checkpoint. Requests whose learning rates
differ from the used ones are refused; so shards may know different numbers of them, never different ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weightserver.core.arrays import Float32Array
from weightserver.core.correction import MAX_STEPS, Schedule
from weightserver.core.errors import InvalidRequestError, MissingRatesError, StepError, TableMismatchError
from weightserver.core.rates import HashedRates, first_difference
from weightserver.core.spec import TableSpec


@dataclass(frozen=True)
class GivenRates:
    """The learning rates that a request names: the first `start` ones, which have `digest`, and those that follow."""

    start: int = 0
    digest: int = 0
    learning_rates: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def stop(self) -> int:
        return self.start + len(self.learning_rates)

    def require(self, num_steps: int) -> None:
        """Raises StepError unless these are the learning rates of at least `num_steps` steps."""
        if num_steps > self.stop:
            raise StepError(
                f"this needs the learning rates of {num_steps} steps, the request has those of {self.stop}: extend the "
                "schedule first"
            )
        if self.stop > MAX_STEPS:
            raise StepError(f"a schedule has at most {MAX_STEPS} steps, not {self.stop}: give fewer")

    def up_to(self, num_steps: int) -> GivenRates:
        """The learning rates of the first `num_steps` (≥ start) steps."""
        return GivenRates(self.start, self.digest, self.learning_rates[: max(0, num_steps - self.start)])


@dataclass(frozen=True)
class ScheduledRates:
    """The learning rates of the first steps, and the schedule that moves rows by them. Immutable."""

    schedule: Schedule
    hashed: HashedRates

    @classmethod
    def of(cls, spec: TableSpec, learning_rates: Float32Array) -> ScheduledRates:
        return cls.by(Schedule.of_table(spec, learning_rates))

    @classmethod
    def by(cls, schedule: Schedule, before: HashedRates | None = None) -> ScheduledRates:
        return cls(schedule, HashedRates(schedule.learning_rates, before))

    def __len__(self) -> int:
        return len(self.hashed)

    def followed_by(self, learning_rates: Float32Array) -> ScheduledRates:
        """These, and those of further steps (float32 [n]). Raises InvalidRequestError if rows could not follow them."""
        if not len(learning_rates):
            return self
        try:
            schedule = self.schedule.followed_by(learning_rates)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        return self.by(schedule, self.hashed)

    def begins_with(self, other: ScheduledRates) -> bool:
        """Whether these are the other ones and perhaps more, and move rows alike: of a table that was dropped they may
        be the same learning rates, with another momentum."""
        return (
            len(self) >= len(other)
            and self.schedule.moves_as(other.schedule)
            and self.hashed.begins_with(other.hashed, len(other))
        )

    def named(self, given: GivenRates, ahead: ScheduledRates | None) -> ScheduledRates:
        """The learning rates that a request names, and perhaps more.

        Args:
            ahead: others that the shard has in memory.

        Raises:
            TableMismatchError: they differ from these.
            MissingRatesError: the shard does not have those by which the request names its first ones.
        """
        if ahead is not None and not ahead.begins_with(self):
            ahead = None
        holder = self if given.start <= len(self) else ahead
        if holder is None or given.start > len(holder) or holder.hashed.digest(given.start) != given.digest:
            if given.start <= len(self):
                raise TableMismatchError(
                    f"rows were updated by other learning rates before step {given.start} than the request has: call "
                    "describe() to use those, or roll back to a checkpoint before they were used"
                )
            raise MissingRatesError(len(self))
        if not len(given.learning_rates):
            return holder
        known = self.hashed.values[given.start :]  # which the request repeats
        if (differs := first_difference(known, given.learning_rates)) is not None:
            raise TableMismatchError(
                f"the learning rate of step {given.start + differs} is {known[differs]:g} and was used, not "
                f"{given.learning_rates[differs]:g}: only steps from {len(self)} on may have others"
            )
        return self._continued(holder, given, ahead)

    def _continued(self, holder: ScheduledRates, given: GivenRates, ahead: ScheduledRates | None) -> ScheduledRates:
        """The result of `named`, where nothing differs."""
        used = len(self)
        new = [holder.hashed.values[used : given.start], given.learning_rates[max(0, used - given.start) :]]
        beyond = np.concatenate(new)
        if not len(beyond):
            return self
        if ahead is None or first_difference(ahead.hashed.values[used:], beyond) is not None:
            return self.followed_by(beyond)
        return ahead.followed_by(beyond[len(ahead) - used :])

    def up_to(self, spec: TableSpec, num_steps: int) -> ScheduledRates:
        """The learning rates of the first `num_steps` steps."""
        return self if num_steps == len(self) else self.of(spec, self.hashed.values[:num_steps])
