"""What a shard has of the learning rates that requests name: compared with plain lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.memory_storage import MemoryStorage
from weightserver.core import rates as core_rates
from weightserver.core.correction import Schedule
from weightserver.core.errors import MissingRatesError, TableMismatchError
from weightserver.core.rates import HashedRates, first_difference
from weightserver.core.spec import TableSpec
from weightserver.shard.rates import GivenRates, ScheduledRates
from weightserver.storage import records
from weightserver.storage.records import State, append_schedule, read_schedule, truncate_schedule, write_state

SPEC = TableSpec(num_rows=10, dim=1)
RATES = st.lists(st.sampled_from([0.0, 0.25, 0.5]), max_size=40)


def floats(rates: list[float]) -> np.ndarray:
    return np.array(rates, np.float32)


def named_by(mine: list[float], start: int) -> GivenRates:
    """A request of a client that knows `mine`, and believes that the shard has the first `start` of them."""
    start = min(start, len(mine))
    return GivenRates(start, HashedRates(floats(mine)).digest(start), floats(mine[start:]))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 12), RATES, st.none() | RATES, RATES, st.integers(0, 40))
@example(3, [0.5] * 6, [0.5] * 9, [0.5] * 12, 7)
@example(0, [0.5] * 4, [0.25] * 6, [0.25] * 6, 3)
def test_a_shard_uses_what_a_request_names(
    common: int, used: list[float], ahead: list[float] | None, mine: list[float], start: int
) -> None:
    """Whoever gave them, and however much of them the shard had: never others, and never against those it has used."""
    used = used[: len(used) // 2]
    ahead = None if ahead is None else used[:common] + ahead
    mine = used[:common] + mine
    shard = ScheduledRates.of(SPEC, floats(used))
    in_memory = None if ahead is None else ScheduledRates.of(SPEC, floats(ahead))
    given, start = named_by(mine, start), min(start, len(mine))
    shorter = min(len(used), len(mine))
    if start > len(used) and not (ahead and ahead[: len(used)] == used and ahead[:start] == mine[:start]):
        with pytest.raises(MissingRatesError) as raised:
            shard.named(given, in_memory)
        assert raised.value.num_used == len(used)
        return
    if used[:shorter] != mine[:shorter]:
        with pytest.raises(TableMismatchError):
            shard.named(given, in_memory)
        return
    found = shard.named(given, in_memory)
    assert found.hashed.values[: len(mine)].tolist() == mine
    assert found.hashed.values[: len(used)].tolist() == used
    last_step = np.arange(len(mine) + 1)
    expected = Schedule.of_table(SPEC, floats(mine)).coefficients(last_step, len(mine))
    assert np.array_equal(found.schedule.coefficients(last_step, len(mine)), expected)
    assert shard.hashed.values.tolist() == used, "the shard's own changed"


@pytest.mark.parametrize("other", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"correction": "paper"}])
def test_learning_rates_in_memory_of_another_table_are_not_used(other: dict[str, Any]) -> None:
    """A fetch of a table that was dropped brought the same learning rates; rows now move by the new table's SGD."""
    rates, last_step = floats([0.5, 0.25, 0.5, 0.125]), np.arange(5)
    dropped = ScheduledRates.of(replace(SPEC, **other), rates)
    given = named_by(rates.tolist(), 0)
    for named in (given, GivenRates(4, HashedRates(rates).digest(4))):
        shard = ScheduledRates.of(SPEC, floats([]))
        if named.start:
            with pytest.raises(MissingRatesError):
                shard.named(named, dropped)
            continue
        found = shard.named(named, dropped).schedule.coefficients(last_step, 4)
        assert np.array_equal(found, Schedule.of_table(SPEC, rates).coefficients(last_step, 4))


@settings(max_examples=100, deadline=None)
@given(RATES, RATES, st.lists(st.integers(0, 40), max_size=5))
def test_digests_are_equal_for_equal_beginnings_only(one: list[float], other: list[float], lengths: list[int]) -> None:
    """In however many parts the learning rates came, and wherever the state of the hash is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_rates, "_EVERY", 7)
        hashed = HashedRates(floats([]))
        for length in sorted(lengths):
            hashed = HashedRates(floats(one[:length]), hashed)
        hashed, second = HashedRates(floats(one), hashed), HashedRates(floats(other))
        for length in range(min(len(one), len(other)) + 1):
            assert hashed.begins_with(second, length) is (one[:length] == other[:length])
            assert (hashed.digest(length) == 0) is (length == 0)
    differs = first_difference(floats(one), floats(other))
    assert differs == next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


@pytest.mark.parametrize("seed", range(3))
def test_stored_learning_rates_are_appended_and_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_SCHEDULE_CHUNK", 4)
    generator, storage, expected = np.random.default_rng(seed), MemoryStorage(), floats([])
    for _ in range(60):
        with storage.write() as txn:
            if generator.random() < 0.2:
                expected = expected[: generator.integers(len(expected) + 1)]
                truncate_schedule(txn, expected)
            else:
                more = generator.random(generator.integers(1, 10)).astype(np.float32)
                append_schedule(txn, len(expected), more)
                expected = np.append(expected, more)
            write_state(txn, State(clock=len(expected)))
        with storage.read() as txn:
            assert np.array_equal(read_schedule(txn), expected)
