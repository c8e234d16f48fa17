"""The learning rates of a run's updates: known in advance, or told step by step."""

from __future__ import annotations

import numpy.typing as npt

from weightserver import TableSpec
from weightserver.core.correction import Schedule


class LearningRates:
    """The learning rate of each update so far, and of later ones as far as they were given.

    Args:
        given: float32 [n], those of the first n updates.
    """

    def __init__(self, spec: TableSpec, given: npt.ArrayLike = ()) -> None:
        self._schedule = Schedule.of_table(spec, given)
        self._rates: list[float] = self._schedule.learning_rates.tolist()  # each a float32
        self._num_given = len(self._rates)

    def __len__(self) -> int:
        return len(self._rates)

    def tell(self, step: int, learning_rate: float) -> None:
        """Sets the learning rate of update `step`, a float32 and the first that was not made; another one may have been
        told for an attempt at it that failed. Raises ValueError if that of `step` was given in advance and differs.
        """
        if step < self._num_given:
            if learning_rate != self._rates[step]:
                raise ValueError(
                    f"the learning rate of step {step} was given as {self.of_step(step):g}, got {learning_rate:g}: "
                    "omit it, or give no learning_rates in advance"
                )
            return
        assert step in (len(self) - 1, len(self)), "updates are told in order"
        self._rates[step:] = [learning_rate]

    def of_step(self, step: int) -> float:
        """The learning rate of update `step`, as the float32 that rows are updated with."""
        return self._rates[step]

    def schedule(self, num_steps: int = 0) -> Schedule:
        """The transfer products of at least the first `num_steps` updates."""
        if num_steps > (horizon := self._schedule.horizon):
            self._schedule = self._schedule.followed_by(self._rates[horizon:num_steps])
        return self._schedule
