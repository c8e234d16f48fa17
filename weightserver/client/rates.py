"""The learning rates that a request names; see `shard.rates`."""

from __future__ import annotations

from collections.abc import Iterator

from weightserver.core.rates import HashedRates
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import to_bytes

_MOST_CARRIED = 1 << 17
"""Learning rates that a request carries; further ones are brought by requests of their own."""
_FURTHER = 1024
"""Known learning rates of later steps that a fetch brings too if it brings any, for the fetches of those steps."""


class CarriedRates:
    """The learning rates of the first `num_steps` steps, as one call names them to each shard.

    Args:
        held: how many of them each shard has, as far as the client knows.
        further: whether those of later steps may be brought too, as by a fetch.
    """

    def __init__(self, known: HashedRates, num_steps: int, held: list[int], *, further: bool = False) -> None:
        self._known = known
        self._num_steps = num_steps
        self._stop = min(num_steps + _FURTHER, len(known)) if further else num_steps
        self._held = held

    def of_shard(self, num_steps: int) -> CarriedRates:
        """The learning rates of the first `num_steps` alone, for a shard whose part of a write uses no others."""
        return CarriedRates(self._known, num_steps, self._held)

    def message(self, shard: int) -> pb.Rates:
        """What a request names. If too many are missing, it names all by their digest: `missing` brings the others."""
        start = min(self._held[shard], self._num_steps)
        if self._num_steps - start > _MOST_CARRIED:
            start = self._num_steps
        return self._named(start, self._stop if start < self._num_steps else start)

    def missing(self, shard: int) -> Iterator[pb.FetchRequest]:
        """Requests that bring the learning rates that are too many for one."""
        while self._num_steps - (start := self._held[shard]) > _MOST_CARRIED:
            stop = min(start + _MOST_CARRIED, self._num_steps)
            yield pb.FetchRequest(step=stop, rates=self._named(start, stop))
            self._held[shard] = stop

    def _named(self, start: int, stop: int) -> pb.Rates:
        rates = self._known.values[start:stop]
        return pb.Rates(start=start, digest=self._known.digest(start), learning_rates=to_bytes(rates))

    def are_missing(self, shard: int, num_used: int) -> None:
        """The shard has refused the call because it lacks some; it has used `num_used`."""
        self._held[shard] = num_used

    def were_taken(self, shard: int) -> None:
        """The shard has answered, and therefore has them."""
        if self._held[shard] < self._num_steps:
            self._held[shard] = self._stop
