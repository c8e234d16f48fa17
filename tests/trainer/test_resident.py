"""Resident rows while they arrive, stay and leave, with real servers and a client whose writes can be delayed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.sizes import resident_rows
from tests.helpers.watching import wait_until
from trainer.presets import PRESETS
from weightserver import FencedError, RowState, ShardUnavailableError, StepError, TableSpec, WeightClient
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import BlockCodec
from weightserver.operations.plan import Workload, plan
from weightserver.protocol.codec import MAX_WRITE_BYTES
from weightserver.server.config import ServerConfig
from weightserver.server.request_memory import write_bytes
from weightserver.torch import Rows
from weightserver.torch.rates import LearningRates
from weightserver.torch.rows import ResidentRows, resident
from weightserver.torch.rows.slots import NoRoomError

SPEC = TableSpec(num_rows=500, dim=8, rows_per_block=7, weight_decay=0.01)
RATES = np.full(200, 0.1, np.float32)


class WatchedClient:
    """Counts fetched and written rows; writes wait while `paused`."""

    def __init__(self, client: WeightClient) -> None:
        self._client = client
        self.require_session, self.fetch = client.require_session, client.fetch
        self.fetched: list[Int64Array] = []
        self.written: list[Int64Array] = []
        self.may_write = threading.Event()
        self.may_write.set()

    def fetch_state(self, rows: Int64Array, **options: Any) -> RowState:
        self.fetched.append(rows)
        return self._client.fetch_state(rows, **options)

    def write_state(self, rows: Int64Array, *state: Any) -> None:
        assert self.may_write.wait(120)
        self._client.write_state(rows, *state)
        self.written.append(rows)


@pytest.fixture
def watched(client: WeightClient) -> WatchedClient:
    client.create_table(SPEC)
    client.extend_schedule(0, RATES)
    client.open_session("resident")
    return WatchedClient(client)


@pytest.fixture
def make_store(watched: WatchedClient) -> Iterator[Any]:
    stores = []

    def make(
        *, capacity: int, prefetch_steps: int = 2, write_back_rows: int = 1, spec: TableSpec = SPEC
    ) -> ResidentRows:
        stores.append(
            ResidentRows(
                watched,  # type: ignore[arg-type]
                spec,
                LearningRates(spec, RATES),
                capacity=capacity,
                prefetch_steps=prefetch_steps,
                write_back_rows=write_back_rows,
                device=torch.device("cpu"),
            )
        )
        return stores[-1]

    yield make
    watched.may_write.set()
    for store in stores:
        store.close()


def test_rows_and_bytes_are_as_planned(make_store: Any) -> None:
    """`weightserver plan` computes them without the trainer."""
    preset = PRESETS["synthetic"][1]
    for num_rows in (150_000, 10**6, 10**9):
        (planned, _, _) = plan(Workload(num_rows=num_rows))["a trainer's memory, per rank"]
        assert planned.value == resident_rows(preset, num_rows)
    load = Workload(num_rows=500, dim=8, window_size=40, window_stride=5, num_negatives=40, batch_size=8)
    (resident, num_bytes, _) = plan(load)["a trainer's memory, per rank"]
    store = make_store(capacity=resident.value)
    store.prefetch(np.arange(resident.value), step=0)
    slots, values = store._slots, store._values
    arrays = [values.weight, values.momentum_buffer, values.last_step, values.changed, slots.row, slots.last_announced]
    assert sum(array.nbytes for array in [*arrays, slots._rows, slots._slots]) == num_bytes.value


def rows(*numbers: int) -> Int64Array:
    return np.array(numbers, np.int64)


def step_with(store: ResidentRows, step: int, active: Int64Array) -> None:
    store.weights(active, step=step)
    store.apply_gradients(active, torch.full((len(active), SPEC.dim), float(step + 1)), step=step)


def test_a_row_that_enters_while_it_is_written_back_comes_from_there(watched: WatchedClient, make_store: Any) -> None:
    store = make_store(capacity=2, prefetch_steps=0)
    watched.may_write.clear()
    step_with(store, 0, rows(1, 2))
    step_with(store, 1, rows(3, 4))  # 1 and 2 leave; their write waits
    assert len(watched.written) == 0
    step_with(store, 2, rows(1, 5))  # 1 returns before its write is done
    assert [part.tolist() for part in watched.fetched] == [[1, 2], [3, 4], [5]]
    watched.may_write.set()


def test_a_row_that_leaves_twice_before_its_write_is_written_once(watched: WatchedClient, make_store: Any) -> None:
    """As it left last: older updates alone would be a loss."""
    store = make_store(capacity=2, prefetch_steps=0, write_back_rows=100)
    for step in range(6):
        step_with(store, step, rows(1, 2) if step % 2 == 0 else rows(3, 4))
    held = store.peek(rows(1, 2, 3, 4), step=6)
    store.flush()
    assert sorted(np.concatenate(watched.written).tolist()) == [1, 2, 3, 4]
    np.testing.assert_array_equal(watched.fetch(rows(1, 2, 3, 4), step=6), held)


def test_rows_that_return_are_counted_with_their_gaps(make_store: Any) -> None:
    store = make_store(capacity=2, prefetch_steps=0)
    for step, active in enumerate([rows(1, 2), rows(2, 9), rows(1, 2), rows(8, 9), rows(2, 9)]):
        step_with(store, step, active)
    counters = store.counters  # step 2: row 1 missed 1; step 3: row 9 missed 1, row 8 is new; step 4: row 2 missed 1
    assert (counters.corrected_rows, counters.missed_steps, counters.largest_gap) == (3, 3, 1)
    step_with(store, 9, rows(1, 9))  # updates 3 to 8, and 5 to 8
    assert (counters.corrected_rows, counters.missed_steps, counters.largest_gap) == (5, 3 + 6 + 4, 6)


def test_a_row_that_a_prefetch_wants_does_not_leave(watched: WatchedClient, make_store: Any) -> None:
    """Row 1 was active for the longest past step, but is announced again: row 2 makes room."""
    store = make_store(capacity=3, prefetch_steps=2)
    step_with(store, 0, rows(1))
    step_with(store, 1, rows(2))
    store.prefetch(rows(1), step=2)
    store.prefetch(rows(3, 4), step=3)
    step_with(store, 2, rows(1))
    step_with(store, 3, rows(3, 4))
    assert sorted(np.concatenate(watched.fetched).tolist()) == [1, 2, 3, 4]
    store.flush()
    assert watched.written[0].tolist() == [2]


def test_a_step_that_was_not_announced_waits_for_rows_that_a_later_one_requested(
    watched: WatchedClient, make_store: Any
) -> None:
    store = make_store(capacity=6, prefetch_steps=2)
    store.prefetch(rows(1, 2), step=1)
    expected = watched._client.fetch(rows(2, 3), step=0)
    assert torch.equal(store.weights(rows(2, 3), step=0), torch.from_numpy(expected))


def test_a_step_that_is_repeated_lets_no_row_of_the_next_one_leave(make_store: Any) -> None:
    store = make_store(capacity=4)
    store.prefetch(rows(1, 2), step=0)
    store.prefetch(rows(1, 3), step=1)
    store.weights(rows(1, 2), step=0)
    step_with(store, 0, rows(1, 2))
    expected = store.weights(rows(1, 3), step=1)
    with pytest.raises(NoRoomError, match="step 1 needs 1 more"):
        store.prefetch(rows(4, 5, 6), step=2)
    assert torch.equal(store.weights(rows(1, 3), step=1), expected)


def test_leaving_rows_wait_for_room_in_the_queue(watched: WatchedClient, make_store: Any) -> None:
    """write_back_rows 1 allows 4 rows in the queue: a trainer that outruns the servers waits."""
    store = make_store(capacity=1, prefetch_steps=0, write_back_rows=1)
    watched.may_write.clear()
    for step in range(5):
        step_with(store, step, rows(step))
    assert store.counters.write_back_pending_rows == 4
    blocked = threading.Thread(target=step_with, args=(store, 5, rows(5)))
    before = store.counters.waited_seconds()
    blocked.start()
    wait_until(lambda: store.counters.waited_seconds() > before + 0.2)
    assert blocked.is_alive()
    watched.may_write.set()
    blocked.join(60)
    assert not blocked.is_alive()
    assert store.counters.wait_seconds > before + 0.2


def test_a_step_whose_rows_exceed_the_queue_waits_for_earlier_writes_only(
    watched: WatchedClient, make_store: Any
) -> None:
    """As with sampled negatives, all of which leave at once."""
    store = make_store(capacity=10, prefetch_steps=0, write_back_rows=1)
    watched.may_write.clear()
    step_with(store, 0, np.arange(10))
    step_with(store, 1, np.arange(10, 20))  # which returns although no write may end
    assert store.counters.write_back_pending_rows == 10
    watched.may_write.set()
    step_with(store, 2, np.arange(20, 30))
    assert watched.written[0].tolist() == list(range(10))
    assert store.counters.write_back_pending_rows == 10


def test_rows_of_a_step_may_leave_in_several_parts(
    client: WeightClient, make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "_ROWS_PER_PART", 4)
    store = make_store(capacity=10, prefetch_steps=0)
    step_with(store, 0, np.arange(10))
    held = store.peek(np.arange(10), step=1)
    step_with(store, 1, np.arange(10, 20))
    store.flush()
    np.testing.assert_array_equal(client.fetch(np.arange(10), step=1), held)


def test_writes_are_such_as_shards_take(
    watched: WatchedClient, make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, of 65,536 rows in as many blocks, or with 2,048 values each, they would not."""
    for dim, rows_per_block in [(128, 63), (512, 63), (700, 7), (1_024, 7), (2_048, 1), (65_536, 1), (65_536, 63)]:
        spec = replace(SPEC, dim=dim, rows_per_block=rows_per_block)
        store = make_store(capacity=1, write_back_rows=1 << 14, spec=spec)
        gathered = store._write_back._batch_rows
        num_rows, num_blocks = store._rows_per_part + gathered, store._blocks_per_part + gathered
        assert num_rows * (8 + 8 * dim + 8) <= MAX_WRITE_BYTES
        assert write_bytes(BlockCodec(spec), num_rows, num_blocks, 2) <= ServerConfig.request_memory_mib << 20
    monkeypatch.setattr(resident, "_BYTES_PER_PART", 12 * 8 * SPEC.dim)  # or 6 blocks
    store = make_store(capacity=40, prefetch_steps=0, write_back_rows=20)
    step_with(store, 0, np.arange(20))
    store.flush()
    step_with(store, 1, 50 + SPEC.rows_per_block * np.arange(20))
    store.flush()
    assert [len(part) for part in watched.written] == [12, 8, 6, 6, 6, 2]


def test_rows_that_did_not_change_are_not_written(watched: WatchedClient, make_store: Any) -> None:
    store = make_store(capacity=4, prefetch_steps=0)
    step_with(store, 0, rows(1, 2, 3, 4))
    store.flush()
    store.flush()
    assert [part.tolist() for part in watched.written] == [[1, 2, 3, 4]]
    step_with(store, 1, rows(2, 3))
    store.flush()
    assert watched.written[-1].tolist() == [2, 3]


def test_a_failed_write_stops_the_next_call(client: WeightClient, watched: WatchedClient, make_store: Any) -> None:
    store = make_store(capacity=1, prefetch_steps=0)
    step_with(store, 0, rows(1))
    with WeightClient([shard.address for shard in client.describe().shards]) as other:
        other.open_session("another")
    step_with(store, 1, rows(2))  # 1 leaves
    with pytest.raises(FencedError, match="another"):
        store.flush()
    with pytest.raises(FencedError, match="another"):
        store.prefetch(rows(3), step=2)


def test_a_failed_fetch_is_made_again_by_the_next_call(
    watched: WatchedClient, make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a shard returns after the client has given up; a later step has requested a row of this one."""
    store, fetch_state = make_store(capacity=6), watched.fetch_state
    failures = iter([ShardUnavailableError("it is down"), OSError("no token")])

    def fetch(rows: Int64Array, **options: Any) -> RowState:
        for failure in failures:
            raise failure
        return fetch_state(rows, **options)

    monkeypatch.setattr(watched, "fetch_state", fetch)
    store.prefetch(rows(1, 2), step=1)
    for message in ("it is down", "no token"):
        with pytest.raises((ShardUnavailableError, OSError), match=message):
            store.weights(rows(2, 3), step=0)
    expected = watched._client.fetch(rows(2, 3), step=0)
    assert torch.equal(store.weights(rows(2, 3), step=0), torch.from_numpy(expected))


def test_unstable_learning_rates_are_refused_at_once(watched: WatchedClient) -> None:
    rows = Rows(momentum=SPEC.momentum, weight_decay=SPEC.weight_decay, learning_rate_factor=2)
    assert rows.learning_rates([189.5]) == [379]
    with pytest.raises(ValueError, match=r"rate 380 of step 1 makes rows grow without a gradient: .* than 380"):
        rows.learning_rates([190], 1)
    with pytest.raises(ValueError, match="learning rate 1000 of step 0 makes rows grow without a gradient"):
        LearningRates(SPEC, np.full(200, 1_000.0, np.float32))


def test_rows_that_correction_makes_infinite_are_never_written_back(watched: WatchedClient, make_store: Any) -> None:
    """They are corrected on the device, which does not check them; the error names them when they leave."""
    store = make_store(capacity=20)
    large = np.full((1, SPEC.dim), 3e38, np.float32)
    watched._client.write_state([3], large, -large, 0)
    step_with(store, 0, rows(1, 2))
    store.flush()
    assert len(watched.written) == 1
    step_with(store, 5, rows(1, 3))
    with pytest.raises(StepError, match="row 3 would be infinite or NaN after update 5, nothing was written"):
        store.flush()
    assert len(watched.written) == 1
