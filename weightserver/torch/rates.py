"""The learning rates of a run's updates: known in advance, or told step by step."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import numpy.typing as npt

from weightserver import StepError, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array
from weightserver.core.correction import Schedule
from weightserver.torch.ranks import Ranks

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.5


class LearningRates:
    """The learning rate of each update so far, and of later ones as far as they were given.

    One thread tells and uses them; any thread may call `known`.

    Args:
        given: float32 [n], those of the first n updates.
    """

    def __init__(self, spec: TableSpec, given: npt.ArrayLike = ()) -> None:
        self._schedule = Schedule.of_table(spec, given)
        self._told: list[float] = []  # those of the updates from the schedule's horizon on
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._schedule.horizon + len(self._told)

    def tell(self, step: int, learning_rate: float) -> None:
        """Sets the learning rate of update `step`, the first that is not known.

        Raises:
            ValueError: the learning rate of `step` is known and differs, or it is negative, infinite or NaN.
        """
        if not (isinstance(learning_rate, int | float) and 0 <= learning_rate < math.inf):
            raise ValueError(f"the learning rate of step {step} must be a finite number ≥ 0, got {learning_rate!r}")
        if step < len(self):
            if np.float32(learning_rate) != np.float32(self.of_step(step)):
                raise ValueError(
                    f"the learning rate of step {step} was given as {self.of_step(step):g}, got {learning_rate:g}: "
                    "omit it, or give no learning_rates in advance"
                )
            return
        assert step == len(self), "updates are told in order"
        self._told.append(learning_rate)

    def of_step(self, step: int) -> float:
        """The learning rate of update `step`, as the float32 that rows are updated with."""
        horizon = self._schedule.horizon
        return float(self._schedule.learning_rates[step] if step < horizon else np.float32(self._told[step - horizon]))

    def schedule(self, num_steps: int = 0) -> Schedule:
        """The transfer products of at least the first `num_steps` updates."""
        if num_steps > self._schedule.horizon:
            with self._lock:
                self._schedule.extend(self._schedule.horizon, np.array(self._told, np.float32))
                self._told = []
        return self._schedule

    def known(self) -> Float32Array:
        """All known learning rates, float32 [n]."""
        with self._lock:
            return np.concatenate([self._schedule.learning_rates, np.array(self._told, np.float32)])


def as_learning_rates(spec: TableSpec, learning_rates: LearningRates | npt.ArrayLike) -> LearningRates:
    """The object itself, or one of learning rates that are all known in advance, float32 [num_steps]."""
    return learning_rates if isinstance(learning_rates, LearningRates) else LearningRates(spec, learning_rates)


class PublishedRates:
    """Makes the weight servers know learning rates before a write needs them. Any thread may call it.

    Rank 0 extends the servers' schedule, and the other ranks wait until it has.

    Args:
        num_published: number of learning rates that the servers know.
        timeout_seconds: time for which another rank waits for rank 0.
    """

    def __init__(
        self,
        rates: LearningRates,
        client: WeightClient,
        ranks: Ranks,
        *,
        num_published: int,
        timeout_seconds: float = 300,
    ) -> None:
        self._rates = rates
        self._client = client
        self._is_first = ranks.is_first
        self._num_published = num_published
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()

    def require(self, num_steps: int) -> None:
        """Returns once the servers know the learning rates of the first `num_steps` updates.

        Raises:
            StepError: rank 0 did not make them known in time.
        """
        with self._lock:
            if num_steps <= self._num_published:
                return
            if self._is_first:
                known = self._rates.known()
                self._client.extend_schedule(self._num_published, known[self._num_published :])
                self._num_published = len(known)
            else:
                self._num_published = self._wait_for(num_steps)

    def _wait_for(self, num_steps: int) -> int:
        deadline, wait = time.monotonic() + self._timeout_seconds, _FIRST_WAIT_SECONDS
        while (horizon := self._client.describe().horizon) < num_steps:
            if time.monotonic() > deadline:
                raise StepError(
                    f"the weight servers know the learning rates of {horizon} updates, this rank writes rows after "
                    f"{num_steps}: rank 0 has not told them for {self._timeout_seconds:g} s"
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        return horizon
