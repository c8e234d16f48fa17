"""Equal clients of one lane, at simulated times: the shard's lane and the client's retries, without threads."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc
import pytest

from tests.helpers.fake_context import FakeContext
from weightserver.client import retries
from weightserver.client.calls import Call
from weightserver.client.retries import Failure, Retries
from weightserver.protocol.codec import RETRY_HINT
from weightserver.server import lanes
from weightserver.server.lanes import Lane, LaneFullError

_ONE_WAY_SECONDS = 0.0002
"""From a client to the shard, and back."""
_BUDGET_SECONDS = 600.0


class _Refusal(grpc.RpcError):
    """What a client sees of a refusal."""

    def __init__(self, error: LaneFullError) -> None:
        super().__init__()
        self._retry_after_ms = error.retry_after_ms

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return "the lane is full"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((RETRY_HINT, str(self._retry_after_ms)),)


class SimulatedLane:
    """A lane, and clients that call as fast as they can.

    Args:
        call_seconds: how long a call has its place, give or take a fifth.

    Attributes:
        served: how often each client was served.
        num_refused: refusals of all of them.
    """

    def __init__(
        self, name: str, *, num_clients: int, call_seconds: float, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.served = [0] * num_clients
        self.num_refused = 0
        self._random = random.Random(seed)
        self._now = self._pause = 0.0
        self._events: list[tuple[float, float, Callable[[], None]]] = []
        self._call_seconds = call_seconds
        monkeypatch.setattr(lanes, "time", self)
        monkeypatch.setattr(retries, "time", self)
        monkeypatch.setattr(retries, "random", self._random)
        self._lane = Lane(name, lambda _: None)
        for number in range(num_clients):
            self._after(0.001 * self._random.random(), lambda number=number: self._call(number))

    def run(self, num_calls: int) -> None:
        """Returns when so many more calls were served."""
        enough = sum(self.served) + num_calls
        while sum(self.served) < enough:
            self._now, _, act = heapq.heappop(self._events)
            act()

    # ---- as the module `time`

    def monotonic(self) -> float:
        return self._now + self._pause

    def sleep(self, seconds: float) -> None:
        self._pause = seconds

    # ---- what happens

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, self._random.random(), act))

    def _call(self, number: int) -> None:
        call = Call("0", "shard 0", "Fetch", started=self._now)
        self._attempt(number, call, Retries(call, _BUDGET_SECONDS))

    def _attempt(self, number: int, call: Call, tries: Retries) -> None:
        waited_ms = round(1000 * tries.waited)
        context: Any = FakeContext(str(waited_ms) if waited_ms else "")

        def arrive() -> None:
            turn = self._lane.line_up(context)
            if turn is None:
                self._execute(number)
            else:
                turn.place.add_done_callback(answer)

        def answer(place: Future[None]) -> None:
            error = place.exception()
            if error is None:
                self._execute(number)
            else:
                assert isinstance(error, LaneFullError)
                self._after(_ONE_WAY_SECONDS, lambda: self._retry(number, call, tries, Failure.of(_Refusal(error))))

        self._after(_ONE_WAY_SECONDS, arrive)

    def _retry(self, number: int, call: Call, tries: Retries, failure: Failure) -> None:
        self.num_refused += 1
        tries.note_failure(failure)
        assert not tries.is_spent, f"client {number} was not served for {_BUDGET_SECONDS} s"
        tries.pause(failure)
        pause, self._pause = self._pause, 0.0
        self._after(pause, lambda: self._attempt(number, call, tries))

    def _execute(self, number: int) -> None:
        def leave() -> None:
            self.served[number] += 1
            self._lane.leave()
            self._after(_ONE_WAY_SECONDS, lambda: self._call(number))

        self._after(self._call_seconds * self._random.uniform(0.8, 1.2), leave)
