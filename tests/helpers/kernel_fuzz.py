"""Calls the compiled kernel with right and wrong arguments, as no caller passes them.

As a script, python -m tests.helpers.kernel_fuzz LIBRARY, it runs under sanitizers, with as little else as possible.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.core import kernel
from weightserver.core.blocks import BlockCodec
from weightserver.core.spec import TableSpec

WRITE_ID = 2**64 - 5
REFUSALS = (ValueError, TypeError, OverflowError, BufferError)


class Arguments:
    """Sound arguments of every function for some rows of a table, and ways to spoil them."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        dtype: Any = generator.choice(["float32", "bfloat16"])
        spec = TableSpec(
            num_rows=100,
            dim=int(generator.choice([1, 2, 3, 5, 8, 17, 300])),
            rows_per_block=int(generator.choice([1, 3, 8, 30])),
            dtype=dtype,
        )
        codec = BlockCodec(spec)
        rows = np.flatnonzero(generator.random(100) < generator.random())
        numbers = np.unique(rows // spec.rows_per_block)
        blocks: list[Any] = [None if generator.random() < 0.3 else self.block(spec, int(number)) for number in numbers]
        starts = np.searchsorted(rows, np.append(numbers, 100) * spec.rows_per_block)
        starts[-1] = len(rows)
        writes = np.full(len(numbers), WRITE_ID, np.uint64)
        slots, steps = rows % spec.rows_per_block, np.zeros(len(rows), np.int64)
        state = bool(generator.random() < 0.5)
        coefficients = generator.random((len(rows), 2, 2)).astype(np.float32) if generator.random() < 0.7 else None
        self.look: list[Any] = [codec.layout, blocks, numbers, writes, starts, slots, steps]
        self.look.append(kernel.checksum_address())
        self.answer: list[Any] = [codec.layout, blocks, starts, slots, rows, coefficients, codec.source]
        self.answer += [(codec.precision.mixed_seed, 7), (b"ab", b"c", b"") if state else (b"ab", None, None), steps]
        self.has_state = state
        changed: tuple[Any, ...] = (
            codec.layout,
            blocks,
            numbers,
            writes,
            starts,
            slots,
            codec.source,
            7,
            codec.precision.mixed_seed,
        )
        room = np.zeros(len(numbers) * codec.num_bytes + int(generator.integers(3)), np.uint8)
        changed += (kernel.checksum_address(), room)
        values = generator.integers(0, 0x4000, (2, len(rows), spec.dim)).astype(np.uint16)
        weight, momentum = values if dtype == "bfloat16" else values.astype(np.float32)
        self.push: list[Any] = [changed, coefficients, weight, (1e-4, 0.9, 0.1), 7]
        self.replace: list[Any] = [changed, weight, momentum, steps]

    def block(self, spec: TableSpec, number: int) -> memoryview:
        """A sealed block, not aligned."""
        codec = BlockCodec(spec)
        buffer = codec.initial(number)
        codec.seal(number, WRITE_ID, buffer)
        return memoryview(b"x" + bytes(buffer))[1:]

    def spoil(self, arguments: list[Any]) -> None:
        """Replaces one argument by a wrong one."""
        generator, position = self.generator, int(self.generator.integers(len(arguments)))
        value = arguments[position]
        if isinstance(value, np.ndarray):
            arguments[position] = self.spoiled_array(value)
        elif isinstance(value, tuple) and isinstance(value[0], tuple):  # what is shared by `push` and `replace`
            changed = list(value)
            self.spoil(changed)
            arguments[position] = tuple(changed)
        elif isinstance(value, tuple):
            changed = list(value)
            if isinstance(value[0], np.ndarray):
                at = int(generator.integers(len(value)))
                arguments[position] = (*value[:at], self.spoiled_array(value[at]), *value[at + 1 :])
                return
            changed[int(generator.integers(len(value)))] = int(generator.choice([-1, 0, 1, 3, 2**20, 2**31 - 1, 2**62]))
            arguments[position] = tuple(changed)
        elif isinstance(value, list) and value:
            changed, at = list(value), int(generator.integers(len(value)))
            block = changed[at] if changed[at] is not None else memoryview(bytes(40))
            changed[at] = [b"", 7, block[: len(block) // 2], bytes(block) + b"x", block[::2]][generator.integers(5)]
            arguments[position] = changed[: int(generator.integers(len(changed) + 1))] if at % 3 == 0 else changed
        else:
            is_address = isinstance(value, int) and value == kernel.checksum_address()  # which is trusted
            arguments[position] = 0 if is_address else [None, b"", -1, 2**70, "x"][generator.integers(5)]

    def spoiled_array(self, value: Any) -> Any:
        generator = self.generator
        changed = value.copy()
        if len(changed) and generator.random() < 0.5 and changed.dtype == np.int64:
            number = generator.choice([-1, 2**62, -(2**63), 10_000, 1 << 16, 31])
            changed[int(generator.integers(len(changed)))] = number
            return changed
        readonly = value.copy()
        readonly.flags.writeable = False
        options = [changed[:-1], np.append(changed, changed), np.repeat(changed, 2)[::2], readonly, value.tolist()]
        return options[generator.integers(5)]


def run(module: kernel.Kernel, seed: int, rounds: int) -> int:
    """Returns how many calls were refused."""
    generator, refused = np.random.default_rng(seed), 0
    for _ in range(rounds):
        arguments = Arguments(generator)
        bad = module.look(*arguments.look)
        assert bad == -1
        message = module.answer(*arguments.answer)
        layout, num_rows = arguments.answer[0], len(arguments.answer[4])
        size = num_rows * layout[1] * layout[2]
        assert message is not None
        assert len(message) == 2 + size + (1 + size + 8 * num_rows if arguments.has_state else 0)
        assert module.push(*arguments.push) == num_rows
        assert module.replace(*arguments.replace) == num_rows
        for function, given in (
            (module.look, arguments.look),
            (module.answer, arguments.answer),
            (module.push, arguments.push),
            (module.replace, arguments.replace),
        ):
            for _ in range(3):
                wrong = list(given)
                arguments.spoil(wrong)
                try:
                    function(*wrong)
                except REFUSALS:
                    refused += 1
    return refused


if __name__ == "__main__":
    from tests.helpers.kernels_built import load

    print(f"{run(load(Path(sys.argv[1])), 1, 2_000)} calls were refused")
