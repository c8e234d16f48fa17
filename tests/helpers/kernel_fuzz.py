"""Calls the compiled kernel with right and wrong arguments, as no caller passes them.

As a script, python -m tests.helpers.kernel_fuzz LIBRARY, it runs under sanitizers, with as little else as possible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.core import kernel
from weightserver.core.blocks import BlockCodec
from weightserver.core.spec import TableSpec

WRITE_ID = 2**64 - 5
REFUSALS = (ValueError, TypeError, OverflowError, BufferError)
Calls = list[tuple[Callable[..., Any], list[Any], Any]]


def sound_calls(module: kernel.Kernel, generator: np.random.Generator) -> Calls:
    """Functions, their arguments for some rows of a table, and what they return (of an answer: the length)."""
    dtype: Any = generator.choice(["float32", "bfloat16"])
    dim, rows_per_block = int(generator.choice([1, 2, 3, 5, 8, 17, 300])), int(generator.choice([1, 3, 8, 30]))
    codec = BlockCodec(TableSpec(num_rows=100, dim=dim, rows_per_block=rows_per_block, dtype=dtype))
    rows = np.flatnonzero(generator.random(100) < generator.random())
    numbers = np.unique(rows // rows_per_block)
    blocks: list[Any] = [None if generator.random() < 0.3 else sealed(codec, int(number)) for number in numbers]
    starts = np.searchsorted(rows, np.append(numbers, 100) * rows_per_block)
    starts[-1] = len(rows)
    writes, slots = np.full(len(numbers), WRITE_ID, np.uint64), rows % rows_per_block
    places = codec.compiled, blocks, numbers, writes, starts, slots
    coefficients = generator.random((len(rows), 2, 2)).astype(np.float32) if generator.random() < 0.7 else None
    heads, state = [(b"ab", None, None), (b"ab", b"c", b"")], int(generator.integers(2))
    room = np.zeros(len(numbers) * codec.num_bytes + int(generator.integers(3)), np.uint8)
    values = generator.integers(0, 0x4000, (2, len(rows), dim)).astype(np.uint16)
    weight, momentum = values if dtype == "bfloat16" else values.astype(np.float32)
    steps, size = np.zeros(len(rows), np.int64), weight.nbytes
    return [
        (module.look, [places, True, steps], -1),
        (module.answer, [places, coefficients, 7, heads[state], steps], 2 + size + state * (1 + size + steps.nbytes)),
        (module.change, [places, 7, room, (weight, coefficients, (1e-4, 0.9, 0.1), 7)], len(rows)),
        (module.change, [places, 7, room, (weight, momentum, steps)], len(rows)),
    ]


def sealed(codec: BlockCodec, number: int) -> memoryview:
    """A sealed block, not aligned."""
    buffer = codec.initial(number)
    codec.seal(number, WRITE_ID, buffer)
    return memoryview(b"x" + bytes(buffer))[1:]


def spoiled(value: Any, generator: np.random.Generator) -> Any:
    """A wrong argument in place of a sound one; in a tuple or list, of one of its items."""
    if isinstance(value, np.ndarray):
        return spoiled_array(value, generator)
    if isinstance(value, tuple | list) and value and generator.random() < 0.9:
        at = int(generator.integers(len(value)))
        return type(value)([*value[:at], spoiled(value[at], generator), *value[at + 1 :]])
    if isinstance(value, memoryview):
        return [b"", 7, value[: len(value) // 2], bytes(value) + b"x", value[::2]][generator.integers(5)]
    if isinstance(value, int) and value == kernel.checksum_address():  # which is trusted
        return 0
    return [None, b"", -1, 0, 1, 3, 2**20, 2**31 - 1, 2**62, 2**70, "x", (), []][generator.integers(13)]


def spoiled_array(value: Any, generator: np.random.Generator) -> Any:
    changed, readonly = value.copy(), value.copy()
    if len(changed) and generator.random() < 0.5 and changed.dtype == np.int64:
        number = generator.choice([-1, 2**62, -(2**63), 10_000, 1 << 16, 31])
        changed[int(generator.integers(len(changed)))] = number
        return changed
    readonly.flags.writeable = False
    options = [changed[:-1], np.append(changed, changed), np.repeat(changed, 2)[::2], readonly, value.tolist()]
    return options[generator.integers(5)]


def run(module: kernel.Kernel, seed: int, rounds: int) -> int:
    """Returns how many calls were refused."""
    generator, refused = np.random.default_rng(seed), 0
    for _ in range(rounds):
        for function, arguments, expected in sound_calls(module, generator):
            found = function(*arguments)
            assert (len(found) if isinstance(found, bytes) else found) == expected
            for _ in range(3):
                try:
                    function(*spoiled(arguments, generator))
                except REFUSALS:
                    refused += 1
    return refused


if __name__ == "__main__":
    from tests.helpers.kernels_built import load

    print(f"{run(load(Path(sys.argv[1])), 1, 2_000)} calls were refused")
