"""The learning rates of a run's updates: known in advance, or told step by step."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import numpy.typing as npt

from weightserver import StepError, TableSpec, WeightClient
from weightserver.core.arrays import Float32Array
from weightserver.core.correction import Schedule, require_stable
from weightserver.torch.ranks import Ranks

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.5
_LEAST_ROOM = 1024
_REPEATED_STEPS = 1024
"""Updates ahead for which a learning rate is assumed that stays the same: telling the servers takes two commits."""


class _Copy:
    """What another place holds of the learning rates: the first ones, and some ahead that may turn out to be wrong.

    Rates that are told one by one are copied one by one if they differ; while they stay the same, they are repeated for
    later updates, since a copy costs more than a number.
    """

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right
        self._ahead = np.zeros(0, np.float32)  # what it holds from num_right on

    def compare(self, known: Float32Array, ahead: Float32Array | None = None) -> None:
        """Notes what is right by now; `ahead` is what the place holds from `num_right` on, if that was read."""
        ahead, known = self._ahead if ahead is None else ahead, known[self.num_right :]
        differ = np.flatnonzero(ahead[: len(known)] != known[: len(ahead)])
        num_right = int(differ[0]) if len(differ) else min(len(ahead), len(known))
        self.num_right += num_right
        self._ahead = ahead[num_right:]

    def missing(self, known: Float32Array) -> Float32Array:
        """What to write there from `num_right` on."""
        repeated = _REPEATED_STEPS if len(known) > 1 and known[-1] == known[-2] else 0
        return np.concatenate([known[self.num_right :], np.full(repeated, known[-1], np.float32)])

    def written(self, known: Float32Array, rates: Float32Array) -> None:
        """Notes that `missing` was written."""
        self._ahead = rates[len(known) - self.num_right :]
        self.num_right = len(known)


class LearningRates:
    """The learning rate of each update so far, and of later ones as far as they were given.

    One thread tells and uses them; any thread may call `known`, and reads all that were told before.

    Args:
        given: float32 [n], those of the first n updates.
    """

    def __init__(self, spec: TableSpec, given: npt.ArrayLike = ()) -> None:
        self._schedule = Schedule.of_table(spec, given)
        self._rates = self._schedule.learning_rates  # float32, with room for more
        self._num_known = len(self._rates)
        self._in_schedule = _Copy(self._num_known)

    def __len__(self) -> int:
        return self._num_known

    def tell(self, step: int, learning_rate: float) -> None:
        """Sets the learning rate of update `step`, the first that is not known.

        Raises:
            ValueError: the learning rate of `step` is known and differs, or it is negative, infinite, NaN or unstable.
        """
        with np.errstate(over="ignore"):
            rate = np.float32(learning_rate)
        if not 0 <= rate < math.inf:
            raise ValueError(f"the learning rate of step {step} must be a finite number ≥ 0, got {learning_rate!r}")
        if step < self._num_known:
            if rate != self._rates[step]:
                raise ValueError(
                    f"the learning rate of step {step} was given as {self.of_step(step):g}, got {learning_rate:g}: "
                    "omit it, or give no learning_rates in advance"
                )
            return
        assert step == self._num_known, "updates are told in order"
        schedule = self._schedule
        require_stable(
            np.array([rate]), momentum=schedule.momentum, weight_decay=schedule.weight_decay, start_step=step
        )
        if step == len(self._rates):  # a new array, so that slices of the former one stay valid
            self._rates = np.concatenate([self._rates, np.zeros(max(_LEAST_ROOM, step), np.float32)])
        self._rates[step] = rate
        self._num_known += 1

    def of_step(self, step: int) -> float:
        """The learning rate of update `step`, as the float32 that rows are updated with."""
        return float(self._rates[step])

    def schedule(self, num_steps: int = 0) -> Schedule:
        """The transfer products of at least the first `num_steps` updates; those of later ones may be wrong."""
        copy, known = self._in_schedule, self.known()
        if num_steps > copy.num_right:
            copy.compare(known)
        if num_steps > copy.num_right:
            missing = copy.missing(known)
            self._schedule.extend(copy.num_right, missing)
            copy.written(known, missing)
        return self._schedule

    def known(self) -> Float32Array:
        """All known learning rates, float32 [n]; they never change."""
        return self._rates[: self._num_known]


def as_learning_rates(spec: TableSpec, learning_rates: LearningRates | npt.ArrayLike) -> LearningRates:
    """The object itself, or one of learning rates that are all known in advance, float32 [num_steps]."""
    return learning_rates if isinstance(learning_rates, LearningRates) else LearningRates(spec, learning_rates)


class PublishedRates:
    """Makes the weight servers know learning rates before a write needs them. Any thread may call it.

    Rank 0 extends the servers' schedule, and the other ranks wait until it has. Rates ahead that turn out to be wrong
    are rewritten: no write has reached them.

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
        self._servers = _Copy(num_published)
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()

    def require(self, num_steps: int) -> None:
        """Returns once the servers know the learning rates of the first `num_steps` updates.

        Raises:
            StepError: rank 0 did not make them known in time.
        """
        with self._lock:
            self._servers.compare(known := self._rates.known())
            if num_steps <= self._servers.num_right:
                return
            if self._is_first:
                missing = self._servers.missing(known)
                self._client.extend_schedule(self._servers.num_right, missing)
                self._servers.written(known, missing)
            else:
                self._wait_for(num_steps, known)

    def _wait_for(self, num_steps: int, known: Float32Array) -> None:
        deadline, wait = time.monotonic() + self._timeout_seconds, _FIRST_WAIT_SECONDS
        while True:
            self._servers.compare(known, self._client.learning_rates()[self._servers.num_right :])
            if self._servers.num_right >= num_steps and self._client.describe().horizon >= num_steps:
                return
            if time.monotonic() > deadline:
                raise StepError(
                    f"this rank writes rows after {num_steps} updates, but the weight servers have its learning rates "
                    f"of {self._servers.num_right}: rank 0 was given no learning rate, or another one, for "
                    f"{self._timeout_seconds:g} s"
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
