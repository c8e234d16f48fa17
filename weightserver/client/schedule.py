"""The learning rates by which a client reads and writes. They travel with the requests that need them.

The client keeps the learning rates that it was given, after those that the shards have used. A request for a step names
all below it (`shard.rates`): the digest of those that the shard has, as far as the client knows, and the others
themselves. A shard that has fewer says how many, and the client sends the others in the next attempt.
"""

from __future__ import annotations

import threading

import numpy as np

from weightserver.client.fan_out import Answers, Shards
from weightserver.client.rates import CarriedRates
from weightserver.client.table import common_identity
from weightserver.client.writer import Writer
from weightserver.core.arrays import Float32Array
from weightserver.core.correction import MAX_STEPS
from weightserver.core.errors import ClusterError, StepError, TableMismatchError
from weightserver.core.rates import NO_RATES, HashedRates, first_difference
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import float32_from_bytes


class ClientSchedule:
    """The learning rates that one client knows. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forgets all learning rates, as those of another table."""
        with self._lock:
            self._known, self._is_learnt, self._num_used = NO_RATES, False, 0
            self._held: list[int] = []
            """How many of the learning rates each shard has, as far as the client knows."""

    def forget_used(self) -> None:
        """After a rollback: asks the shards again, at the next call, which learning rates they have used."""
        with self._lock:
            self._is_learnt = False

    # ---- what the shards have used

    def learn(self, answers: Answers) -> HashedRates:
        """Puts the learning rates that the shards have used before those that were given; returns all. The given ones
        are dropped where they contradict the used ones.

        Raises:
            ClusterError: two shards have used different ones for a step.
        """
        longest = max(answers, key=lambda answer: answer.clock)
        while True:
            known = before = self._known
            if len(known) < longest.clock or known.digest(longest.clock) != longest.schedule_digest:
                known = self._read(longest, known)
            for answer in answers:
                if known.digest(answer.clock) != answer.schedule_digest:
                    raise self._contradiction(answer, known)
            with self._lock:
                if self._known is before:
                    self._known, self._is_learnt = known, True
                    self._held = [answer.clock for answer in answers]
                    self._num_used = longest.clock
                    return known

    def _read(self, answer: pb.DescribeResponse, known: HashedRates = NO_RATES) -> HashedRates:
        """What a shard has used; reads what follows `known`, or all if it has used others."""
        shard = self._shards.connections()[answer.shard]
        for start in (min(len(known), answer.clock), 0):
            parts, have = [known.values[:start]], start
            while have < answer.clock:
                read = shard.call("ReadSchedule", pb.ReadScheduleRequest(start_step=have)).learning_rates
                parts.append(float32_from_bytes(read, "learning_rates"))
                if not len(parts[-1]):
                    break
                have += len(parts[-1])
            rates = HashedRates(np.concatenate(parts)[: answer.clock])
            if rates.digest(len(rates)) == answer.schedule_digest:
                return rates
        raise ClusterError(f"the learning rates of shard {answer.shard} changed while they were read: call again")

    def _contradiction(self, answer: pb.DescribeResponse, known: HashedRates) -> ClusterError:
        theirs = self._read(answer).values
        step = first_difference(known.values, theirs)
        which = "" if step is None else f" for step {step}, {theirs[step]:g} and {known.values[step]:g}"
        return ClusterError(
            f"shard {answer.shard} and another one have used different learning rates{which}, so two writers gave "
            "different ones: take all shards to a checkpoint from before ('weightserver rollback'), or restore all of "
            "them from one backup"
        )

    def used_by(self, shard: int) -> Float32Array:
        """The learning rates that one shard has used, float32 [its clock]."""
        return self._read(self._shards.describe()[shard]).values

    def _learnt(self, num_steps: int = 0) -> HashedRates:
        """All that are known, at least those of the first `num_steps` steps. Raises StepError if neither the client nor
        a shard knows that many, ClusterError as `learn`."""
        known = self._known
        if not self._is_learnt or num_steps > len(known):
            answers = self._shards.describe()
            common_identity(answers, self._shards.names)
            known = self.learn(answers)
        if num_steps > len(known):
            raise StepError(
                f"this needs the learning rates of {num_steps} steps, but this client and the shards know those of "
                f"{len(known)}: extend the schedule first"
            )
        return known

    # ---- what was given

    @property
    def rates(self) -> Float32Array:
        """All known learning rates, float32 [horizon], which never change."""
        return self._learnt().values

    def extend(self, start_step: int, rates: Float32Array, writer: Writer) -> None:
        """See `WeightClient.extend_schedule`; `rates` are checked, float32 [n]."""
        stop = start_step + len(rates)
        if stop > MAX_STEPS:
            raise StepError(f"a schedule has at most {MAX_STEPS} steps, not {stop}: give fewer")
        self._learnt()
        with self._lock:
            known = self._known.values
            if start_step > len(known):
                raise StepError(f"the schedule ends at {len(known)}: step {start_step} would leave a gap before it")
            fixed = max(writer.num_steps_in_doubt, self._num_used)  # in this order, as a write ends
            differs = first_difference(known[start_step:], rates)
            if differs is not None and (step := start_step + differs) < fixed:
                how = "was used" if step < self._num_used else "may have been used"
                raise TableMismatchError(
                    f"the learning rate of step {step} is {known[step]:g} and {how}: only steps from {fixed} on may "
                    "be rewritten"
                )
            if differs is not None:
                self._held = [min(held, start_step) for held in self._held]
            elif stop <= len(known):
                return
            values = np.concatenate([known[:start_step], rates, known[stop:]])
            self._known = HashedRates(values, self._known if differs is None else NO_RATES)

    # ---- what requests carry

    def needed(self, num_steps: int) -> CarriedRates:
        """The learning rates of the first `num_steps` steps, for one fetch. Raises as `_learnt`."""
        return CarriedRates(self._learnt(num_steps), num_steps, self._held, further=True)

    def used(self, num_steps: int) -> CarriedRates:
        """The learning rates that a write carries."""
        return CarriedRates(self._learnt(num_steps), num_steps, self._held)

    def were_used(self, num_steps: int) -> None:
        """All shards have made a write that used the learning rates of the first `num_steps` steps."""
        self._num_used = max(self._num_used, num_steps)
