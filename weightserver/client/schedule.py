"""The learning rates by which a client reads and writes. They travel with the requests that need them.

The client keeps the learning rates that it was given, after those that the shards have used. A request for a step names
all below it (`shard.rates`): the digest of those that the shard has, as far as the client knows, and the others
themselves. A shard that has fewer says how many, and the client sends the others in the next attempt.
"""

from __future__ import annotations

import threading

import numpy as np

from weightserver.client import agreement
from weightserver.client.agreement import Answers
from weightserver.client.fan_out import Shards
from weightserver.client.rates import CarriedRates, FixedSteps
from weightserver.core.arrays import Float32Array
from weightserver.core.correction import MAX_STEPS
from weightserver.core.errors import ClusterError, StepError, TableMismatchError
from weightserver.core.rates import HashedRates, first_difference
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import float32_from_bytes

_LEAST_ROOM = 1024


class ClientSchedule:
    """The learning rates that one client knows. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forgets all learning rates, as those of another table."""
        with self._lock:
            self._known = HashedRates(np.zeros(0, np.float32))
            self._room = self._known.values  # `_known` is its beginning
            self._is_learnt = False
            self._fixed = FixedSteps()
            self.held: list[int] = []
            """How many of the learning rates each shard has, as far as the client knows."""

    def forget_used(self) -> None:
        """After a rollback: asks the shards again, at the next call, which learning rates they have used."""
        with self._lock:
            self._is_learnt = False
            self._fixed.in_doubt = 0

    # ---- what the shards have used

    def learn(self, answers: Answers) -> HashedRates:
        """Puts the learning rates that the shards have used before those that were given; returns all. The given ones
        are dropped where they contradict the used ones.

        Raises:
            ClusterError: two shards have used different ones for a step.
        """
        while True:
            before = self._known
            known = self._after_used(answers, before)
            with self._lock:
                if self._known is before:
                    self._known, self._is_learnt = known, True
                    self._room = self._room if known is before else known.values
                    self.held = [answer.clock for answer in answers]
                    self._fixed.used = max(self.held)
                    return known

    def _after_used(self, answers: Answers, known: HashedRates) -> HashedRates:
        longest = max(answers, key=lambda answer: answer.clock)
        if len(known) < longest.clock or known.digest(longest.clock) != longest.schedule_digest:
            known = self._read(longest, known)
        for answer in answers:
            if known.digest(answer.clock) != answer.schedule_digest:
                raise self._contradiction(answer, known)
        return known

    def _read(self, answer: pb.DescribeResponse, known: HashedRates) -> HashedRates:
        """Reads what a shard has used, as far as that is not known."""
        for start in (min(len(known), answer.clock), 0):
            parts = [known.values[:start]]
            while (have := sum(map(len, parts))) < answer.clock:
                part = self._read_part(answer.shard, have)[: answer.clock - have]
                if not len(part):
                    break
                parts.append(part)
            rates = HashedRates(np.concatenate(parts))
            if rates.digest(len(rates)) == answer.schedule_digest:
                return rates
        raise ClusterError(f"the learning rates of shard {answer.shard} changed while they were read: call again")

    def _read_part(self, shard: int, start_step: int) -> Float32Array:
        request = pb.ReadScheduleRequest(start_step=start_step)
        answer = self._shards.connections()[shard].call("ReadSchedule", request)
        return float32_from_bytes(answer.learning_rates, "learning_rates")

    def _contradiction(self, answer: pb.DescribeResponse, known: HashedRates) -> ClusterError:
        theirs = self._read(answer, HashedRates(known.values[:0])).values
        step = first_difference(known.values, theirs)
        which = "" if step is None else f" for step {step}, {theirs[step]:g} and {known.values[step]:g}"
        return ClusterError(
            f"shard {answer.shard} and another one have used different learning rates{which}, so two writers gave "
            "different ones: take all shards to a checkpoint from before ('weightserver rollback'), or restore all of "
            "them from one backup"
        )

    def used_by(self, shard: int) -> Float32Array:
        """The learning rates that one shard has used, float32 [its clock]."""
        return self._read(self._shards.describe()[shard], HashedRates(np.zeros(0, np.float32))).values

    def _learnt(self) -> HashedRates:
        if not self._is_learnt:
            answers = self._shards.describe()
            agreement.common_identity(answers, self._shards.names)
            return self.learn(answers)
        return self._known

    # ---- what was given

    @property
    def rates(self) -> Float32Array:
        """All known learning rates, float32 [horizon], which never change."""
        return self._learnt().values

    def extend(self, start_step: int, rates: Float32Array) -> None:
        """See `WeightClient.extend_schedule`; `rates` are checked, float32 [n]."""
        stop = start_step + len(rates)
        if stop > MAX_STEPS:
            raise StepError(f"a schedule has at most {MAX_STEPS} steps, not {stop}: give fewer")
        self._learnt()
        with self._lock:
            known = self._known.values
            if start_step > len(known):
                raise StepError(f"the schedule ends at {len(known)}: step {start_step} would leave a gap before it")
            fixed = max(self._fixed.used, self._fixed.in_doubt)
            differs = first_difference(known[start_step:], rates)
            if differs is None:
                self._append(rates[len(known) - start_step :])
            elif start_step + differs >= fixed:
                self._room = np.concatenate([known[:start_step], rates, known[stop:]])
                self._known = HashedRates(self._room)
                self.held = [min(held, start_step) for held in self.held]
            else:
                raise TableMismatchError(
                    f"the learning rate of step {start_step + differs} is {known[start_step + differs]:g} and was "
                    f"used: only steps from {fixed} on may be rewritten"
                )

    def _append(self, rates: Float32Array) -> None:
        if not len(rates):
            return
        before, start = self._known, len(self._known)
        if (stop := start + len(rates)) > len(self._room):
            self._room = np.append(before.values, np.zeros(max(len(rates), start, _LEAST_ROOM), np.float32))
        self._room[start:stop] = rates
        self._known = HashedRates(self._room[:stop], before)

    # ---- what requests carry

    def needed(self, num_steps: int) -> CarriedRates:
        """The learning rates of the first `num_steps` steps, for one fetch.

        Raises:
            StepError: neither the client nor a shard knows so many.
            ClusterError: as `learn`.
        """
        return CarriedRates(self._at_least(num_steps), num_steps, self.held)

    def used(self, num_steps: int) -> CarriedRates:
        """As `needed`, for a write."""
        return CarriedRates(self._at_least(num_steps), num_steps, self.held, self._fixed)

    def _at_least(self, num_steps: int) -> HashedRates:
        known = self._learnt()
        if num_steps > len(known):
            known = self.learn(self._shards.describe())
        if num_steps > len(known):
            raise StepError(
                f"this needs the learning rates of {num_steps} steps, but this client and the shards know those of "
                f"{len(known)}: extend the schedule first"
            )
        return known
