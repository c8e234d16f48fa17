"""Transfer products against sequential ones in long integers; pushed gradients against dense torch.optim.SGD."""

from __future__ import annotations

import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.row_model import assert_rows_close
from weightserver.core import transfer
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.correction import Schedule, apply_push, correct, require_finite, single_rate_products
from weightserver.core.errors import StepError

Run = tuple[float, float, str, float, int]
"""momentum, weight decay, kind of schedule, highest learning rate, seed"""
STABLE = 0.999
"""The largest learning rate of these tests, as a share of the limit of stability."""


# ---- schedules


def rates_of(kind: str, peak: float, num_steps: int, seed: int = 0) -> Float32Array:
    """Learning rates ≤ peak: float32 [num_steps]."""
    step = np.arange(num_steps)
    cosine = (1 + np.cos(np.pi * step / (num_steps + 1))) / 2
    share = {
        "constant": np.ones(num_steps),
        "cosine": np.minimum(1, (step + 1) / (num_steps / 20 + 1)) * cosine,
        "every other thousand": step // 1_000 % 2,
        "random": np.random.default_rng(seed).uniform(0, 1, num_steps),
    }[kind]
    return (peak * share).astype(np.float32)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A stable run: momentum, weight decay, kind of schedule, highest learning rate, seed."""
    momentum = draw(st.floats(0, 0.99) | st.sampled_from([0.0, 1e-9, 0.5, 0.9, 0.99]))
    weight_decay = draw(st.floats(0, 0.1) | st.sampled_from([0.0, 1e-6, 1e-4, 0.1]))
    limit = 2 * (1 + momentum) / weight_decay if weight_decay > 1e-30 else 1e30
    share = draw(st.floats(0, STABLE) | st.sampled_from([1e-6, 1e-3, 0.25, 0.5, STABLE]))
    usual = draw(st.sampled_from([0.03, 0.1, 1.0]))
    peak = min(usual, STABLE * limit) if draw(st.booleans()) else share * limit
    kind = draw(st.sampled_from(["constant", "cosine", "random"]))
    return momentum, weight_decay, kind, peak, draw(st.integers(0, 2**32 - 1))


def exact_products(
    momentum: float, weight_decay: float, learning_rates: Float32Array, stops: list[int]
) -> dict[int, list[Fraction]]:
    """M_{stop−1} ··· M_0 for each stop, row by row, in integers with 250 binary places of the largest entry."""
    places = 250

    def fixed(value: float) -> int:
        numerator, denominator = value.as_integer_ratio()
        return (numerator << places) // denominator

    one, m, decay = 1 << places, fixed(momentum), fixed(weight_decay)
    rates = [fixed(rate) for rate in learning_rates.tolist()]
    a, b, c, d, shift = 1 << places, 0, 0, 1 << places, places  # [[a, b], [c, d]] / 2^shift
    answers = {}
    for step in range(max(stops) + 1):
        if step in stops:
            scale = 1 << shift if shift >= 0 else Fraction(1, 1 << -shift)
            answers[step] = [Fraction(entry) / scale for entry in (a, b, c, d)]
        if step == max(stops):
            break
        p, q = one - (rates[step] * decay >> places), -rates[step] * m >> places
        a, b, c, d = p * a + q * c, p * b + q * d, decay * a + m * c, decay * b + m * d
        spare = max(a.bit_length(), b.bit_length(), c.bit_length(), d.bit_length()) - places
        if spare > 0:
            a, b, c, d = a >> spare, b >> spare, c >> spare, d >> spare
        else:
            a, b, c, d = a << -spare, b << -spare, c << -spare, d << -spare
        shift += places - spare
    return answers


def check_accuracy(run: Run, offset: int, gaps: list[int]) -> None:
    """The bound that `transfer` states."""
    momentum, weight_decay, kind, peak, seed = run
    rates = rates_of(kind, peak, offset + max(gaps), seed)
    schedule = Schedule(momentum=momentum, weight_decay=weight_decay, learning_rates=rates)
    unit = Fraction((peak * (1 + momentum) / weight_decay) ** 0.5 if peak > 1 and weight_decay > 1e-30 else 1.0)
    units = (Fraction(1), 1 / unit, unit, Fraction(1))
    is_usual = peak * weight_decay <= 0.1 * 2 * (1 + momentum)
    for gap, expected in exact_products(momentum, weight_decay, rates[offset:], gaps).items():
        size = max(abs(entry) * factor for entry, factor in zip(expected, units, strict=True))
        if max(map(abs, expected)) > 1e300:  # random learning rates, each stable, may still make a row grow for ever
            continue
        product = schedule.transfer(np.array([offset]), offset + gap)[0]
        errors = [abs(Fraction(float(got)) - entry) for got, entry in zip(product.flat, expected, strict=True)]
        error = max(error * factor for error, factor in zip(errors, units, strict=True))
        bound = (gap + 8) * 2.0**-52 + (0 if is_usual else 2.0**-22)
        assert error <= max(size, Fraction(1e-200)) * Fraction(bound), (run, offset, gap, float(error / size))


several_gaps = st.lists(st.integers(0, 20_000) | st.integers(0, 300), min_size=1, max_size=8).map(
    lambda gaps: [*gaps, 0, 1, 15, 16, 17]
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), offset=st.integers(0, 300), gaps=several_gaps)
def test_transfer_is_the_sequential_product(run: Run, offset: int, gaps: list[int]) -> None:
    check_accuracy(run, offset, gaps)


SCHEDULES: list[Run] = [
    (0.9, 1e-4, "constant", 0.06, 0),
    (0.9, 1e-4, "cosine", 0.3, 0),
    (0.9, 1e-4, "every other thousand", 0.1, 0),
    (0.99, 1e-6, "random", 1.0, 0),
    (0.0, 1e-4, "constant", 0.1, 0),
    (0.9, 0.0, "constant", 0.1, 0),
    (0.9, 1e-4, "constant", STABLE * 3.8e4, 0),
]


@pytest.mark.parametrize(
    ("run", "num_steps"),
    [
        (SCHEDULES[0], 20_000),
        pytest.param(SCHEDULES[0], 200_000, marks=pytest.mark.guard),
        *(pytest.param(run, 200_000, marks=pytest.mark.slow) for run in SCHEDULES[1:]),
    ],
)
def test_coefficients_are_the_products_rounded_once(run: Run, num_steps: int) -> None:
    """99.99 % of them over gaps of up to 200,000 steps (near the limit of stability 99.9 %), and the others are
    neighbours in float32."""
    momentum, weight_decay, kind, peak, _ = run
    rates, gaps = rates_of(kind, peak, num_steps), np.unique(np.geomspace(1, num_steps, 2_000).astype(np.int64))
    schedule = Schedule(momentum=momentum, weight_decay=weight_decay, learning_rates=rates)
    exact = exact_products(momentum, weight_decay, rates, gaps.tolist())
    expected = np.array([[float(entry) for entry in exact[gap]] for gap in gaps.tolist()]).astype(np.float32)
    found = np.array([schedule.coefficients(np.zeros(1, np.int64), gap).reshape(4) for gap in gaps.tolist()])
    differ = found != expected
    assert differ.mean() <= (1e-3 if peak > 1 else 1e-4)
    assert (found == np.nextafter(expected, found))[differ].all()


# ---- structure


def realistic(num_steps: int, **changes: Any) -> Schedule:
    rates = rates_of("cosine", 0.06, num_steps)
    return Schedule(**{"momentum": 0.9, "weight_decay": 1e-4, **changes}, learning_rates=rates)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("most_gaps", [1 << 16, 1_000])
def test_chunks_of_a_fetch_have_the_bits_of_a_single_row(
    monkeypatch: pytest.MonkeyPatch, most_gaps: int, ordered: bool
) -> None:
    """Computed by Python or NumPy, alone, with its neighbours or for an earlier chunk."""
    monkeypatch.setattr(transfer, "_MOST_GAPS", most_gaps)
    stop, starts = 9_011, np.random.default_rng(0).integers(0, 9_012, 4_000)
    if ordered:
        starts.sort()
    schedule, alone = realistic(10_000), realistic(10_000)
    assert schedule.transfer(starts[:0], stop).shape == schedule.coefficients(starts[:0], stop).shape == (0, 2, 2)
    for chunk in [*np.split(starts, [1, 5, 20, 600, 3_000]), starts[-30:], starts[:3].repeat(9)]:
        found = schedule.coefficients(chunk, stop)
        assert found.shape == (len(chunk), 2, 2)
        assert found.flags.c_contiguous
        for number in range(0, len(chunk), 40):
            one = chunk[number : number + 1]
            assert alone.coefficients(one, stop).tobytes() == found[number].tobytes()
            assert alone.transfer(one, stop).astype(np.float32).tobytes() == found[number].tobytes()


def test_schedules_that_follow_one_share_its_products() -> None:
    """Whatever follows another one has the bits of one that was built at once, and none changes when a further one is
    made."""
    rates, seen = rates_of("random", 0.06, 3_000), [realistic(0)]
    for length in (1, 16, 17, 700, 2_000):
        seen.append(seen[-1].followed_by(rates[seen[-1].horizon : length]))
    size = seen[-1].table_bytes
    seen += [seen[-1].followed_by(rates[2_000 : 2_000 + more]) for more in (1, 5, 3, 0, 500)]
    assert len({id(schedule._tree) for schedule in seen}) == 1
    assert size <= seen[-1].table_bytes < 3 * size
    seen += [seen[5].followed_by(rates[:700]), seen[4].followed_by(rates[:9])]
    assert len({id(schedule._tree) for schedule in seen}) == 3
    expected = [rates[: schedule.horizon] for schedule in seen[:-2]]
    expected += [np.concatenate([rates[:2_000], rates[:700]]), np.concatenate([rates[:700], rates[:9]])]
    for schedule, learning_rates in zip(seen, expected, strict=True):
        assert np.array_equal(schedule.learning_rates, learning_rates)
        again = Schedule(momentum=0.9, weight_decay=1e-4, learning_rates=learning_rates)
        for stop in (len(learning_rates), len(learning_rates) // 2):
            starts = np.arange(stop + 1)
            assert schedule.transfer(starts, stop).tobytes() == again.transfer(starts, stop).tobytes()


def test_readers_run_while_others_follow() -> None:
    rates, starts = rates_of("cosine", 0.06, 4_000), [np.arange(100), np.zeros(1, np.int64)]
    schedule = Schedule(momentum=0.9, weight_decay=1e-4, learning_rates=rates[:100])
    expected = [schedule.coefficients(some, 100).tobytes() for some in starts]
    grown, wrong = threading.Event(), list[int]()

    def read() -> None:
        while not grown.is_set():
            for some, right in zip(starts, expected, strict=True):
                if schedule.coefficients(some, 100).tobytes() != right:
                    wrong.append(len(some))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    longer = schedule
    for start in range(100, len(rates), 7):
        longer = longer.followed_by(rates[start : start + 7])
        schedule.followed_by(rates[start : start + 3][::-1])
    grown.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_tables_stay_small() -> None:
    """40 bytes a step, and what is remembered does not grow with the number of steps that were asked for."""
    schedule = realistic(1_000_000)
    assert schedule.table_bytes <= 40_000_000
    many = np.random.default_rng(0).integers(900_000, 999_000, 2_000)
    for stop in range(999_000, 999_040):
        schedule.coefficients(many[many > stop - 60_000], stop)
    known = schedule._tree._known.values()
    assert len(known) <= 4
    assert sum(one.coefficients.nbytes for one in known) <= 4 << 20


def test_refuses_invalid_learning_rates() -> None:
    schedule = Schedule(momentum=0.9, weight_decay=1e-4, learning_rates=[0.1, 0.2])
    for bad in (-0.1, np.nan, np.inf, 1e39):
        with pytest.raises(ValueError, match=r"of step 3 must be a finite number ≥ 0, got "):
            schedule.followed_by([0.1, bad])
    with pytest.raises(ValueError, match=r"rate 38000 of step 3 makes rows grow .* must be less than 38000"):
        schedule.followed_by([37_999, 38_000])
    with pytest.raises(ValueError, match=r"shape \[n\]"):
        schedule.followed_by(np.full((1, 1), 0.1))
    with pytest.raises(ValueError, match="read-only"):
        schedule.learning_rates[:] = 1


# ---- the paper's correction


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "learning_rate"),
    [(0.9, 1e-4, 0.06), (0.0, 1e-3, 0.3), (0.99, 0.1, 0.5), (0.9, 0.0, 1.0)],
)
def test_single_rate_products_are_powers(momentum: float, weight_decay: float, learning_rate: float) -> None:
    """Of the appendix's two matrices; against rational numbers: float32's rounding, and float64's of each step."""
    rate = np.float32(learning_rate)
    step, decay = np.array([[1, -rate], [0, 1]], float), np.array([[1, 0], [weight_decay, momentum]])
    assert np.allclose(single_rate_products(momentum, weight_decay, float(rate), np.array([1]))[0], step @ decay, 1e-15)
    gaps = np.array([0, 1, 2, 3, 7, 16, 100, 999, 1_000, 18_000, 3, 0])
    got = single_rate_products(momentum, weight_decay, float(rate), gaps).astype(np.float32)
    expected = exact_products(momentum, weight_decay, np.full(18_000, rate), sorted(set(gaps.tolist())))
    for gap, matrix in zip(gaps.tolist(), got, strict=True):
        entries = np.array([float(entry) for entry in expected[gap]]).reshape(2, 2)
        allowed = 2.0**-24 * np.abs(entries) + 8 * gap * 2.0**-53 * np.abs(entries).max() + 2.0**-149
        assert (np.abs(matrix - entries) <= allowed).all(), gap
        alone = single_rate_products(momentum, weight_decay, float(rate), np.array([gap])).astype(np.float32)
        assert alone[0].tobytes() == matrix.tobytes(), "a power depends on its gap alone"


def test_the_papers_correction_takes_the_rate_of_the_last_finished_update() -> None:
    exact_one = realistic(1_000, weight_decay=0.01)
    paper = Schedule(
        momentum=0.9, weight_decay=0.01, learning_rates=exact_one.learning_rates, single_rate=True
    )  # Section 2.3 has one η
    starts = np.array([0, 100, 250, 299, 300])
    expected = single_rate_products(0.9, 0.01, float(paper.learning_rates[299]), 300 - starts).astype(np.float32)
    assert np.array_equal(paper.coefficients(starts, 300), expected)
    one_step, whole = exact_one.coefficients(starts[3:], 300), exact_one.coefficients(starts[:3], 300)
    assert np.allclose(expected[3:], one_step, rtol=2**-23, atol=0), "a gap of one step is corrected exactly"
    assert np.abs(expected[:3] / whole - 1).max() > 1e-3
    assert np.array_equal(paper.coefficients(np.array([0, 0]), 0), np.repeat(np.eye(2)[None], 2, axis=0))
    assert paper.coefficients(np.array([999]), 1_000).shape == (1, 2, 2), "at the horizon"


# ---- rows


def test_a_result_beyond_float32_is_refused_with_its_row() -> None:
    weight, momentum_buffer = np.full((2, 3, 4), 3e38, np.float32)
    correct(weight[1:2], momentum_buffer[1:2], np.full((1, 2, 2), 2.0, np.float32))
    require_finite(np.arange(2), 19, weight[::2], momentum_buffer[::2])
    for values in ([weight], [weight, momentum_buffer], [momentum_buffer]):
        with pytest.raises(
            StepError, match="row 12 would be infinite or NaN after update 19, nothing was writ"
        ) as found:
            require_finite(np.array([11, 12, 13]), 19, *values)
        assert (found.value.row, found.value.step) == (12, 19)


def test_correct_rounds_product_product_sum() -> None:
    random = np.random.default_rng(0)
    weight, momentum = random.normal(size=(2, 50, 9)).astype(np.float32)
    c = random.normal(size=(50, 2, 2, 1)).astype(np.float32)
    expected = [c[:, i, 0] * weight + c[:, i, 1] * momentum for i in range(2)]
    out, weight_alone = np.stack([weight, momentum]), weight.copy()
    correct(out[0], out[1], c[..., 0])
    correct(weight_alone, momentum, c[..., 0], weight_only=True)
    assert (out == expected).all()
    assert (weight_alone == out[0]).all()


class Rows:
    """Raw rows in memory, moved by the functions under test."""

    def __init__(self, schedule: Schedule, weight: Float32Array, *, correction: bool = True) -> None:
        self.schedule = schedule
        self.correction = correction
        self.weight = weight.copy()
        self.momentum = np.zeros_like(weight)
        self.last_step = np.zeros(len(weight), np.int64)

    def push(self, step: int, rows: Int64Array, gradient: Float32Array) -> None:
        seen, weight, momentum = self.last_step[rows], self.weight[rows], self.momentum[rows]
        apply_push(self.schedule, self.correction, step, seen, weight, momentum, gradient, rows=rows)
        self.last_step[rows], self.weight[rows], self.momentum[rows] = seen, weight, momentum

    def at(self, step: int) -> tuple[Float32Array, Float32Array]:
        weight, momentum = self.weight.copy(), self.momentum.copy()
        correct(weight, momentum, self.schedule.coefficients(self.last_step, step))
        return weight, momentum


Pushes = list[tuple[int, Int64Array, Float32Array]]


def random_pushes(num_rows: int, dim: int, num_steps: int, seed: int) -> Pushes:
    """Gradients of random rows in every step, some rows from several writers."""
    random = np.random.default_rng(seed)
    pushes: Pushes = []
    for step in range(num_steps):
        for _ in range(random.integers(1, 4)):
            rows = np.sort(random.choice(num_rows, random.integers(1, num_rows // 2), replace=False))
            pushes.append((step, rows, random.normal(size=(len(rows), dim)).astype(np.float32)))
    return pushes


def sgd(rows: Rows, pushes: Pushes, num_steps: int) -> tuple[Float32Array, Float32Array]:
    """Weights and momentum buffers after torch.optim.SGD over all rows; without correction, each step moves those that
    have a gradient."""
    schedule, parameters = rows.schedule, [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in rows.weight]
    optimizer = torch.optim.SGD(parameters, momentum=schedule.momentum, weight_decay=schedule.weight_decay)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = float(schedule.learning_rates[step])
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if rows.correction else None
        for _, some, gradients in (push for push in pushes if push[0] == step):
            for row, gradient in zip(some.tolist(), torch.from_numpy(gradients), strict=True):
                before = parameters[row].grad
                parameters[row].grad = gradient if before is None else before + gradient
        optimizer.step()
    buffers = [optimizer.state[each].get("momentum_buffer", torch.zeros_like(each)) for each in parameters]
    return torch.stack([*parameters]).detach().numpy(), torch.stack(buffers).detach().numpy()


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "correction", "delay"),
    [
        (0.9, 1e-4, True, 0),
        (0.9, 1e-4, True, 40),
        (0.9, 1e-4, False, 0),
        *(
            pytest.param(*case, marks=pytest.mark.guard)
            for case in [(0.9, 1e-4, True, 300), (0.9, 0.05, True, 300), (0.0, 1e-3, True, 40), (0.9, 0.05, False, 0)]
        ),
    ],
)
def test_pushes_in_any_order_are_sgd(momentum: float, weight_decay: float, correction: bool, delay: int) -> None:
    """Pushes that arrive up to `delay` steps late."""
    num_rows, dim, num_steps = 40, 8, 300
    schedule = realistic(num_steps, momentum=momentum, weight_decay=weight_decay)
    weight = np.random.default_rng(1).normal(size=(num_rows, dim)).astype(np.float32)
    pushes = random_pushes(num_rows, dim, num_steps, seed=2)
    rows = Rows(schedule, weight, correction=correction)
    expected_weight, expected_momentum = sgd(rows, pushes, num_steps)
    random = np.random.default_rng(3)
    for push in sorted(pushes, key=lambda push: push[0] + (random.uniform(0, delay) if delay else 0)):
        rows.push(*push)
    got_weight, got_momentum = rows.at(num_steps) if correction else (rows.weight, rows.momentum)
    assert_rows_close(got_weight, expected_weight.astype(np.float64))
    if momentum:  # torch keeps no buffers without
        assert_rows_close(got_momentum, expected_momentum.astype(np.float64))
    assert np.abs(expected_weight - weight).max() > 0.1


@pytest.mark.parametrize("single_rate", [False, True])
def test_without_exact_correction_a_gradient_after_a_later_update_is_refused(single_rate: bool) -> None:
    schedule = Schedule(momentum=0.9, weight_decay=0.1, learning_rates=np.linspace(0.1, 1, 10), single_rate=single_rate)
    rows = Rows(schedule, np.ones((3, 2), np.float32), correction=single_rate)
    rows.push(5, np.array([1]), np.ones((1, 2), np.float32))
    rows.push(5, np.array([1]), np.ones((1, 2), np.float32))  # another writer of the same step
    before = rows.weight.tobytes(), rows.momentum.tobytes(), rows.last_step.tolist()
    with pytest.raises(StepError, match=r"row 1 has already seen update 5: .* update 4 comes too late"):
        rows.push(4, np.arange(3), np.ones((3, 2), np.float32))
    assert (rows.weight.tobytes(), rows.momentum.tobytes(), rows.last_step.tolist()) == before
