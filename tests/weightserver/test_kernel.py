"""The compiled kernel computes NumPy's bits, reads nothing outside its buffers, and is chosen in one place."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import kernel_fuzz
from tests.helpers.kernels_built import EXTENSION, NUMPY, ROOT, RefusedError, build, computing_with
from tests.helpers.memory_storage import MemoryStorage
from tests.helpers.schedules import naming
from weightserver.core import kernel
from weightserver.core.arrays import Int64Array
from weightserver.core.blocks import BlockCodec
from weightserver.core.errors import WeightServerError
from weightserver.core.spec import TableSpec
from weightserver.shard import writing
from weightserver.shard.reading import SnapshotRows
from weightserver.shard.shard import Shard
from weightserver.shard.transaction import WriteHeader

SESSION_ID = b"o" * 16
SIZES = (1e-42, 1e-3, 1.0, 1e9, 1e12, 1e37)
"""Of values: subnormal ones, usual ones, and some that overflow."""


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


class History:
    """A shard in memory and what happens to it, by random numbers of its own."""

    def __init__(self, spec: TableSpec, seed: int, size: float) -> None:
        self.generator = generator = np.random.default_rng(seed)
        self.spec, self.size, self.horizon = spec, size, int(generator.choice([1, 17, 400]))
        self.storage, self.sequence = MemoryStorage(), 0
        self.shard = Shard(self.storage, shard=0, num_shards=1)
        self.rates = naming(generator.uniform(0, 0.2, self.horizon))
        self.last_step = np.zeros(spec.num_rows, np.int64)
        with self.shard.batch() as batch:
            batch.create_table(spec, b"t" * 16)
        with self.shard.batch() as batch:
            batch.open_session("run", 1, SESSION_ID)

    def outcomes(self) -> list[Any]:
        """What writes answer, some of them at damaged blocks, and after each what is stored and what fetches answer."""
        found = list[Any]()
        for _ in range(9):
            chance = self.generator.random()
            if chance < 0.1:
                self.damage()
            elif chance < 0.2:
                with self.shard.batch() as batch:
                    header = self.header(self.shard.state.clock)
                    batch.checkpoint(header, f"{header.sequence}")
            write = self.push if self.generator.random() < 0.7 else self.write_state
            size = self.size * self.generator.choice([1e-6, 1.0, 1.0, 1e9])
            try:
                found.append(write(self.some_rows(), size))
            except WeightServerError as error:
                found.append(repr(error))
            found += [self.shard.state.rows_stored, self.storage.contents["blocks"].copy()]
            step = None if self.generator.random() < 0.3 else int(self.generator.integers(0, self.horizon + 1))
            found += [self.fetched(self.some_rows(), step, state=state) for state in (False, True)]
        return [*found, {name: values for name, values in self.storage.contents.items() if name != "meta"}]

    def header(self, step: int = 0) -> WriteHeader:
        self.sequence += 1
        return WriteHeader(1, SESSION_ID, b"w" * 16, self.sequence, step, self.rates)

    def some_rows(self) -> Int64Array:
        share = self.generator.choice([0.05, 0.5, 1.0])
        return np.flatnonzero(self.generator.random(self.spec.num_rows) < share)

    def values(self, number: int, rows: Int64Array, steps: Int64Array, size: float) -> list[Any]:
        """Random values of rows, float32 [n, D] or as the table stores them."""
        values = size * self.generator.standard_normal((number, len(rows), self.spec.dim))
        values[self.generator.random(values.shape) < 0.1] = -0.0
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        if self.generator.random() < 0.1 and values.size:
            values[0, -1, -1] = self.generator.choice([np.inf, -np.inf, np.nan, 3.4e38])
        precision = BlockCodec(self.spec).precision
        with np.errstate(invalid="ignore"):
            return [precision.rounded(array, rows, steps, place) for place, array in enumerate(values)]

    def push(self, rows: Int64Array, size: float) -> bool:
        step = int(self.generator.integers(0, self.horizon))
        if self.generator.random() < 0.7:  # a single late row leaves all to NumPy
            rows = rows[self.last_step[rows] <= step]
        (gradients,) = self.values(1, rows, np.full(len(rows), step), size)
        with self.shard.batch() as batch:
            pushed = batch.push_gradients(self.header(step), rows, gradients)
        self.last_step[rows] = np.maximum(self.last_step[rows], step + 1)
        return pushed

    def write_state(self, rows: Int64Array, size: float) -> bool:
        steps = self.generator.integers(max(0, self.horizon - 3), self.horizon, len(rows), endpoint=True)
        weight, momentum_buffer = self.values(2, rows, steps, size)
        with self.shard.batch() as batch:
            written = batch.write_state(self.header(), rows, weight, momentum_buffer, steps)
        self.last_step[rows] = steps
        return written

    def damage(self) -> None:
        blocks = self.storage.contents["blocks"]
        if blocks:
            key = list(blocks)[int(self.generator.integers(len(blocks)))]
            damaged = bytearray(blocks[key])
            damaged[int(self.generator.integers(len(damaged)))] ^= int(self.generator.integers(1, 256))
            blocks[key] = bytes(damaged)

    def fetched(self, rows: Int64Array, step: int | None, *, state: bool) -> list[bytes] | str:
        """The messages, or the error that ended the fetch."""
        try:
            chunks = list(self.shard.fetch(rows, step=step, state=state, rates=self.rates))
        except WeightServerError as error:
            return repr(error)
        return [message for _, message in chunks]


def check_history(compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float) -> None:
    found = []
    for module in (NUMPY, compiled):
        with computing_with(module), pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "new_write_id", partial(next, itertools.count(1)))
            found.append(History(spec, seed, size).outcomes())
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e8, 1e38])
def test_a_history_has_the_same_bits(compiled: kernel.Kernel, dtype: Any, size: float) -> None:
    """Answers, errors and stored bytes: of damaged blocks and rows beyond float32 too."""
    shapes = (1, 9), (3, 9), (8, 9), (64, 9), (8, 300), (64, 90), (64, 91)  # rows of a block, and their length
    for seed, (rows_per_block, dim) in enumerate(shapes):
        spec = TableSpec(num_rows=200, dim=dim, rows_per_block=rows_per_block, weight_decay=1e-3, dtype=dtype)
        check_history(compiled, spec, seed, size)


@pytest.mark.guard
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=specs(), seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_histories_of_any_table_have_the_same_bits(
    compiled: kernel.Kernel, spec: TableSpec, seed: int, size: float
) -> None:
    check_history(compiled, spec, seed, size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_usual_calls_are_left_to_the_kernel(
    compiled: kernel.Kernel, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were and were not written, at one step and at several, corrected or not."""
    monkeypatch.delattr(writing, "_changed_by_numpy")
    monkeypatch.delattr(SnapshotRows, "_by_numpy")
    for correction in ("exact", "paper", "none"):
        spec = TableSpec(num_rows=100, dim=5, rows_per_block=7, correction=correction, dtype=dtype)
        with computing_with(compiled):
            history = History(spec, 1, 1.0)
            assert history.horizon > 6
            for rows, step in [(np.arange(30, 60), 0), (np.arange(90), 5), (np.arange(90), 6)]:
                (gradients,) = history.values(1, rows, np.full(len(rows), step), 1.0)
                with history.shard.batch() as batch:
                    assert batch.push_gradients(history.header(step), rows, gradients)
                assert isinstance(history.fetched(np.arange(100), step + 1, state=True), list)


# ---- options of the compiler that change bits

COMPARE = """
import sys
from pathlib import Path
import numpy as np
from tests.helpers.kernels_built import load
from tests.weightserver.test_kernel import TableSpec, check_history
compiled = load(Path(sys.argv[1]))
assert np.float32(1e-40) / 2 > 0, "subnormal numbers are flushed to zero in the whole process"
spec = TableSpec(num_rows=200, dim=9, rows_per_block=8, weight_decay=1e-3)
check_history(compiled, spec, 1, 1.0)
check_history(compiled, spec, 2, 1.0)
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
