"""The compiled kernel computes NumPy's bits, reads nothing outside its buffers, and is chosen in one place."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import kernel_fuzz
from tests.helpers.kernels_built import EXTENSION, NUMPY, ROOT, RefusedError, build, computing_with, load
from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.schedules import naming
from weightserver.core import kernel
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import DamagedRecordError, StepError, WeightServerError
from weightserver.core.spec import TableSpec
from weightserver.shard import writing
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

SESSION_ID = b"o" * 16
SIZES = (1e-42, 1e-3, 1.0, 1e9, 1e12, 1e37)
"""Of values: subnormal ones, usual ones, and some that overflow."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> kernel.Kernel:
    """Today's source, compiled as an installation compiles it."""
    return load(build(tmp_path_factory.mktemp("kernel")))


@st.composite
def specs(draw: Callable[..., Any]) -> TableSpec:
    return TableSpec(
        num_rows=draw(st.integers(1, 400)),
        dim=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64, 128])),
        rows_per_block=draw(st.sampled_from([1, 2, 3, 7, 8, 9, 63, 64, 500])),
        momentum=draw(st.sampled_from([0.0, 0.5, 0.9, 0.999])),
        weight_decay=draw(st.sampled_from([0.0, 1e-4, 0.03, 1.0])),
        init_std=draw(st.sampled_from([0.0, 0.01, 1.0, 1e12])),
        seed=draw(st.integers(0, 2**64 - 1)),
        correction=draw(st.sampled_from(["exact", "paper", "none"])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )


class Filled:
    """A shard in memory, some of whose rows are stored."""

    def __init__(self, spec: TableSpec, seed: int, size: float) -> None:
        self.generator = generator = np.random.default_rng(seed)
        self.spec, self.horizon = spec, int(generator.choice([1, 17, 400]))
        self.storage = MemoryStorage()
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.rates = naming(generator.uniform(0, 0.2, self.horizon))
        with self.shard.batch() as batch:
            self.shard.create_table(batch, spec, b"t" * 16)
        with self.shard.batch() as batch:
            self.shard.open_session(batch, "run", 1, SESSION_ID)
        rows = self.some_rows()
        values = self.values(2, len(rows), size=size)
        last_step = generator.integers(0, self.horizon, len(rows), endpoint=True)
        with self.shard.batch() as batch:
            weight, momentum_buffer = self.stored(rows, values, last_step)
            self.shard.write_state(batch, self.header(1), rows, weight, momentum_buffer, last_step)
        self.last_step = np.zeros(spec.num_rows, np.int64)
        self.last_step[rows] = last_step

    def header(self, sequence: int, step: int = 0) -> WriteHeader:
        return WriteHeader(1, SESSION_ID, b"w" * 16, sequence, step, self.rates)

    def some_rows(self) -> Int64Array:
        share = self.generator.choice([0.05, 0.5, 1.0])
        return np.flatnonzero(self.generator.random(self.spec.num_rows) < share)

    def values(self, *shape: int, size: float) -> Float32Array:
        values = size * self.generator.standard_normal((*shape, self.spec.dim))
        values[self.generator.random(values.shape) < 0.1] = -0.0
        return values.astype(np.float32)

    def stored(self, rows: Int64Array, values: Float32Array, steps: Int64Array) -> list[Any]:
        precision = BlockCodec(self.spec).precision
        return [precision.rounded(array, rows, steps, number) for number, array in enumerate(values)]

    def fetched(self, rows: Int64Array, step: int | None, *, state: bool) -> list[bytes] | str:
        """The messages, or the error that ended the fetch."""
        try:
            chunks = list(self.shard.fetch(rows, step=step, state=state, rates=self.rates))
        except WeightServerError as error:
            return repr(error)
        return [message for _, message in chunks]


def check_fetches(compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float) -> None:
    filled = Filled(spec, seed, size)
    for _ in range(4):
        rows = filled.some_rows()
        step = None if filled.generator.random() < 0.2 else int(filled.generator.integers(0, filled.horizon + 1))
        for state in (False, True):
            with computing_with(NUMPY):
                expected = filled.fetched(rows, step, state=state)
            with computing_with(compiled):
                assert filled.fetched(rows, step, state=state) == expected


def test_a_fetch_has_the_same_bits(compiled: kernel.Kernel) -> None:
    for dtype in ("float32", "bfloat16"):
        for rows_per_block in (3, 64):
            spec = TableSpec(num_rows=300, dim=9, rows_per_block=rows_per_block, weight_decay=1e-3, dtype=dtype)
            check_fetches(compiled, spec, rows_per_block, 1.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fetched_row_beyond_float32_is_refused_alike(compiled: kernel.Kernel, dtype: Any) -> None:
    """Weights or momentum buffers: a fetch without the latter may still answer the row."""
    filled = Filled(TableSpec(num_rows=300, dim=2, rows_per_block=8, dtype=dtype), 5, 1.0)
    rows, values = np.arange(300), filled.generator.choice(np.array([-3e38, 3e38], np.float32), (2, 300, 2))
    last_step = filled.generator.integers(0, filled.horizon, 300, endpoint=True)
    with filled.shard.batch() as batch:
        weight, momentum_buffer = filled.stored(rows, values, last_step)
        last_step = np.maximum(last_step, filled.last_step)
        filled.shard.write_state(batch, filled.header(2), rows, weight, momentum_buffer, last_step)
    refused = {False: 0, True: 0}
    for row in rows.tolist():
        for state in refused:
            with computing_with(NUMPY):
                expected = filled.fetched(np.array([row]), filled.horizon, state=state)
            with computing_with(compiled):
                assert filled.fetched(np.array([row]), filled.horizon, state=state) == expected
            if isinstance(expected, str):
                assert f"row {row} would be infinite or NaN after update {filled.horizon - 1}," in expected
                refused[state] += 1
    assert 0 < refused[False] <= refused[True] < 300


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=specs(), seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_fetches_of_any_table_have_the_same_bits(
    compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float
) -> None:
    check_fetches(compiled, spec, seed, size)


class Written(Filled):
    """The same, and what writes do to it."""

    def outcomes(self, size: float) -> list[Any]:
        """What several pushes and raw writes answer, some of them at damaged blocks, and after each what is stored and
        what a fetch answers."""
        found = list[Any]()
        for sequence in range(2, 10):
            write = self.push if self.generator.random() < 0.7 else self.write_state
            if self.generator.random() < 0.1:
                self.damage()
            if self.generator.random() < 0.1:
                self.checkpoint(100 + sequence)
            try:
                found.append(write(sequence, size * self.generator.choice([1e-6, 1.0, 1.0, 1e9])))
            except WeightServerError as error:
                found.append(repr(error))
            found += [self.shard.state.rows_stored, self.storage.contents["blocks"].copy()]
            found.append(self.fetched(self.some_rows(), None, state=True))
        return found

    def push(self, sequence: int, size: float) -> bool:
        rows, step = self.some_rows(), int(self.generator.integers(0, self.horizon))
        if self.generator.random() < 0.7:  # a single late row leaves all to NumPy
            rows = rows[self.last_step[rows] <= step]
        values = self.values(1, len(rows), size=size)
        if self.generator.random() < 0.1 and values.size:
            values[0, -1, -1] = self.generator.choice([np.inf, -np.inf, np.nan, 3.4e38])
        with self.shard.batch() as batch, np.errstate(invalid="ignore"):
            (gradients,) = self.stored(rows, values, np.full(len(rows), step))
            pushed = self.shard.push_gradients(batch, self.header(sequence, step), rows, gradients)
        self.last_step[rows] = np.maximum(self.last_step[rows], step + 1)
        return pushed

    def write_state(self, sequence: int, size: float) -> bool:
        rows = self.some_rows()
        values, horizon = self.values(2, len(rows), size=size), self.horizon
        steps = self.generator.integers(max(0, horizon - 3), horizon, len(rows), endpoint=True)
        with self.shard.batch() as batch:
            weight, momentum_buffer = self.stored(rows, values, steps)
            written = self.shard.write_state(batch, self.header(sequence), rows, weight, momentum_buffer, steps)
        self.last_step[rows] = steps
        return written

    def checkpoint(self, sequence: int) -> None:
        with self.shard.batch() as batch:
            self.shard.checkpoint(batch, self.header(sequence), f"{sequence}")

    def damage(self) -> None:
        blocks = self.storage.contents["blocks"]
        if blocks:
            key = list(blocks)[int(self.generator.integers(len(blocks)))]
            damaged = bytearray(blocks[key])
            damaged[int(self.generator.integers(len(damaged)))] ^= int(self.generator.integers(1, 256))
            blocks[key] = bytes(damaged)

    def contents(self) -> dict[str, Any]:
        """What is stored, without the record that names this process."""
        return {name: values for name, values in self.storage.contents.items() if name != "meta"}


def check_writes(compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float) -> None:
    found = []
    for module in (NUMPY, compiled):
        with computing_with(module), pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "new_write_id", partial(next, itertools.count(1)))
            written = Written(spec, seed, size)
            found.append((written.outcomes(size), written.contents()))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e8])
def test_a_write_stores_the_same_bytes(compiled: kernel.Kernel, dtype: Any, size: float) -> None:
    for seed, (rows_per_block, dim) in enumerate(((1, 9), (3, 9), (8, 9), (64, 9), (8, 300), (64, 90), (64, 91))):
        spec = TableSpec(num_rows=200, dim=dim, rows_per_block=rows_per_block, weight_decay=1e-3, dtype=dtype)
        check_writes(compiled, spec, seed, size)


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=specs(), seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_writes_to_any_table_store_the_same_bytes(
    compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float
) -> None:
    check_writes(compiled, spec, seed, size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_usual_writes_are_left_to_the_kernel(
    compiled: kernel.Kernel, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were and were not written, at one step and at several, corrected or not."""
    monkeypatch.delattr(writing, "_changed_by_numpy")
    for correction in ("exact", "paper", "none"):
        spec = TableSpec(num_rows=100, dim=5, rows_per_block=7, correction=correction, dtype=dtype)
        with computing_with(compiled):
            written = Written(spec, 1, 1.0)
            assert written.horizon > 6
            for name in ("versions", "blocks"):
                written.storage.contents[name].clear()
            for sequence, (rows, step) in enumerate([(np.arange(30, 60), 0), (np.arange(90), 5), (np.arange(90), 6)]):
                (gradients,) = written.stored(rows, written.values(1, len(rows), size=1.0), np.full(len(rows), step))
                with written.shard.batch() as batch:
                    assert written.shard.push_gradients(batch, written.header(2 + sequence, step), rows, gradients)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38])
def test_a_push_that_makes_a_row_infinite_is_refused(compiled: kernel.Kernel, value: float) -> None:
    """Its last block alone, and nothing is stored."""
    spec = TableSpec(num_rows=20, dim=5, rows_per_block=7)
    rows, gradients = np.arange(20), np.ones((20, 5), np.float32)
    gradients[-1, -1] = value
    for module in (NUMPY, compiled):
        with computing_with(module), np.errstate(all="ignore"):
            written = Written(spec, 1, 1.0)
            for name in ("versions", "blocks"):
                written.storage.contents[name].clear()
            for sequence, step in ((2, 0), (3, 1)):  # the second time 3.4e38 is too large
                before = written.storage.contents["blocks"].copy()
                try:
                    with written.shard.batch() as batch:
                        written.shard.push_gradients(batch, written.header(sequence, step), rows, gradients)
                except StepError:
                    break
            else:
                pytest.fail("it was stored")
            assert written.storage.contents["blocks"] == before


@pytest.mark.parametrize("built", [False, True])
def test_a_write_can_be_cancelled_before_each_part(
    compiled: kernel.Kernel, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is undone as a whole, and may be sent again under its number."""
    monkeypatch.setattr(writing, "_BLOCKS_AT_A_TIME", 3)
    spec = TableSpec(num_rows=60, dim=5, rows_per_block=7)
    rows, gradients = np.arange(60), np.ones((60, 5), np.float32)
    with computing_with(compiled if built else NUMPY):
        written, asked = Written(spec, 0, 1.0), 0
        before, step = dict(written.contents()["blocks"]), written.horizon - 1
        for most in itertools.count():
            calls = itertools.count()
            try:
                with written.shard.batch() as batch:
                    batch.is_cancelled = lambda calls=calls, most=most: next(calls) >= most
                    assert written.shard.push_gradients(batch, written.header(2, step), rows, gradients)
            except CancelledError:
                asked = most
                assert written.contents()["blocks"] == before
            else:
                break
        assert asked == 2
        assert written.contents()["blocks"] != before


def test_a_damaged_block_is_refused_alike(compiled: kernel.Kernel) -> None:
    spec = TableSpec(num_rows=60, dim=5, rows_per_block=7)
    for at, value in ((0, 9), (2, 8), (4, 6), (8, 1), (20, 3), (200, 7), (-1, 9)):
        filled = Filled(spec, 0, 1.0)
        blocks = filled.storage.contents["blocks"]
        key, block = list(blocks.items())[2]
        damaged = bytearray(block)
        damaged[at] ^= value
        blocks[key] = bytes(damaged)
        errors = set()
        for module in (NUMPY, compiled):
            with computing_with(module):
                found = filled.fetched(np.arange(60), None, state=False)
                assert isinstance(found, str), (at, module)
                assert DamagedRecordError.__name__ in found
                errors.add(found)
        assert len(errors) == 1
        blocks[key] = block[:-8]
        for module in (NUMPY, compiled):
            with computing_with(module):
                assert "bytes, not" in str(filled.fetched(np.arange(60), None, state=False))


# ---- options of the compiler that change bits

COMPARE = """
import sys
from pathlib import Path
import numpy as np
from tests.helpers.kernels_built import load
from tests.weightserver.test_kernel import TableSpec, check_fetches, check_writes
compiled = load(Path(sys.argv[1]))
assert np.float32(1e-40) / 2 > 0, "subnormal numbers are flushed to zero in the whole process"
spec = TableSpec(num_rows=200, dim=9, rows_per_block=8, weight_decay=1e-3)
check_fetches(compiled, spec, 1, 1.0)
check_writes(compiled, spec, 1, 1.0)
"""
"""In a process of its own, whose arithmetic a library may change."""


@pytest.mark.parametrize(
    ("cflags", "ldflags"),
    [
        ("-ffast-math", ""),
        ("-funsafe-math-optimizations", ""),
        ("-fassociative-math -fno-signed-zeros -fno-trapping-math", ""),
        ("-freciprocal-math", ""),
        ("-fno-signed-zeros", ""),
        ("-ffinite-math-only", ""),
        pytest.param("-Ofast", "", marks=pytest.mark.guard),
        pytest.param("-march=native -ffp-contract=fast", "", marks=pytest.mark.guard),
        pytest.param("", "-ffast-math", marks=pytest.mark.guard),
    ],
)
def test_options_change_no_bits(cflags: str, ldflags: str, tmp_path: Path) -> None:
    """Those that a distributor may set: each file refuses them, or they have no effect."""
    try:
        library = build(tmp_path, cflags=cflags.split(), ldflags=ldflags.split())
    except RefusedError as refused:
        messages = refused.args
    else:
        messages = ()
    if messages:
        assert len(messages) == len(EXTENSION["sources"])
        assert all("change the bits of rows" in message for message in messages), messages
        return
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", COMPARE, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]


# ---- arguments that are wrong


def test_wrong_arguments_are_refused(compiled: kernel.Kernel) -> None:
    """Nothing outside a buffer is read or written: see also the run with sanitizers."""
    refused = kernel_fuzz.run(compiled, seed=0, rounds=300)
    assert refused > 100


@pytest.mark.guard
@pytest.mark.timeout(600)
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The same, with checks of every access and of undefined arithmetic."""
    library = build(tmp_path, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover")
    found = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(os.path.isabs(path) for path in found):
        pytest.skip("the compiler has no sanitizers")
    environment = os.environ | {
        "LD_PRELOAD": ":".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.helpers.kernel_fuzz", str(library)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert "refused" in done.stdout


# ---- the choice


def chosen(value: str | None, code: str = "print(kernel.name())") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != kernel.VARIABLE}
    if value is not None:
        environment[kernel.VARIABLE] = value
    code = f"from weightserver.core import kernel; {code}"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.guard  # five processes
def test_the_environment_chooses() -> None:
    assert chosen("numpy").stdout == "numpy\n"
    last = chosen("fast").stderr.strip().splitlines()[-1]
    assert last == "ValueError: WEIGHTSERVER_KERNEL is 'fast': set it to 'numpy' or 'compiled', or unset it"
    without = "kernel._found = lambda: None; print(kernel.name())"
    assert chosen(None, without).stdout == "numpy\n"
    assert "this installation has no compiled kernel" in chosen("compiled", without).stderr


def test_a_kernel_that_would_not_do_is_not_taken(monkeypatch: pytest.MonkeyPatch, compiled: kernel.Kernel) -> None:
    """One of another build, or any if the library of xxhash does not export its function."""
    monkeypatch.setitem(sys.modules, "weightserver.core._kernel", compiled)
    interface, found = kernel._INTERFACE, []
    for expected, address in ((interface, 1), (interface + 1, 1), (interface, 0)):
        monkeypatch.setattr(kernel, "_INTERFACE", expected)
        monkeypatch.setattr(kernel, "checksum_address", lambda address=address: address)
        kernel._found.cache_clear()
        found.append(kernel._found())
    kernel._found.cache_clear()
    assert found == [compiled, None, None]
