"""The lanes of a shard: whose call comes next."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.helpers.fake_context import FakeContext
from tests.helpers.simulated_lane import SimulatedLane
from tests.helpers.watching import wait_until
from weightserver import OverloadedError
from weightserver.server.lanes import LANES, MAX_WAITING, Lane


def test_the_call_that_has_tried_longest_comes_first() -> None:
    """Arrival order does not matter. Calls of vanished callers are skipped; of too many the latest is refused."""
    refused = list[str]()
    lane, entered = Lane("write", refused.append), list[str]()
    for _ in range(LANES["write"]):
        lane.enter(FakeContext())

    def enter(name: str, context: FakeContext) -> None:
        lane.enter(context)
        entered.append(name)

    with ThreadPoolExecutor(MAX_WAITING["write"] + 8) as pool, ExitStack() as stack:
        for _ in range(MAX_WAITING["write"]):
            stack.callback(lane.leave)  # no thread waits without end
        gone = FakeContext("900000")
        callers = {
            "new": FakeContext(),
            "old": FakeContext("500000"),
            "gone": gone,
            "older": FakeContext("700000"),
            "odd": FakeContext("soon"),
        }
        turns = {}
        for number, (name, context) in enumerate(callers.items(), start=1):
            turns[name] = pool.submit(enter, name, context)
            wait_until(lambda: lane.num_waiting == number and bool(context.gone))  # noqa: B023
        gone.gone[0]()
        with pytest.raises(CancelledError):
            turns.pop("gone").result(60)
        for number in range(1, 5):
            lane.leave()
            wait_until(lambda: len(entered) == number)  # noqa: B023
        assert entered == ["older", "old", "new", "odd"]
        assert not refused

        rest = [pool.submit(enter, "", FakeContext("100000")) for _ in range(MAX_WAITING["write"])]
        wait_until(lambda: lane.num_waiting == MAX_WAITING["write"])
        with pytest.raises(OverloadedError, match="busy with 16 write calls"):
            lane.enter(FakeContext())
        last = pool.submit(enter, "last", FakeContext("300000"))
        wait_until(lambda: len(refused) == 2)
        wait_until(lambda: sum(one.done() for one in rest) == 1)
        lane.leave()
        last.result(60)
    assert refused == ["write", "write"]
    assert lane.num_waiting == 0


@pytest.mark.parametrize(
    ("name", "num_clients", "call_seconds"),
    [("Fetch", 136, 0.002), ("Fetch", 300, 0.01), ("write", 100, 1.0)],
)
def test_equal_clients_are_served_equally(
    name: str, num_clients: int, call_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More clients than may wait call as fast as they can, so that some are refused. At simulated times: neither side
    ever lacks a processor."""
    lane = SimulatedLane(name, num_clients=num_clients, call_seconds=call_seconds, seed=0, monkeypatch=monkeypatch)
    rounds = 12
    lane.run(4 * num_clients)  # the lane learns how long calls take
    before, refused_before = list(lane.served), lane.num_refused
    assert min(before) > 0
    lane.run(rounds * num_clients)
    served = [last - first for last, first in zip(lane.served, before, strict=True)]
    assert max(served) <= 1.5 * min(served), sorted(served)
    assert 0 < lane.num_refused - refused_before < 3 * rounds * num_clients
