"""Chooses how the inner passes over rows are computed: by the compiled kernel, or by NumPy.

`_kernel.c` computes the bits of NumPy's code, which stays their definition, in one pass and without the GIL. It is
built when the package is installed, if there is a C compiler. Code that has a compiled pass asks `compiled()` for it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import Protocol, cast

import numpy as np
import xxhash

from weightserver.core.arrays import Float32Array, Int64Array, StoredArray, UInt64Array

Table = tuple[int | float | Float32Array, ...]
"""Rows of a block, their length and the bytes of a value; mixed seeds of initial weights and of rounding; the address
of the checksum's function; standard deviation and quantiles of initial weights (float32 [65536])."""
Places = tuple[Table, list[memoryview | None], Int64Array, UInt64Array, Int64Array, Int64Array]
"""Rows, and the blocks that they lie in: the table, the stored blocks (None for those that were never written), their
numbers and write ids, starts and slots. Block j has rows number starts[j] to starts[j + 1] of all."""
Gradients = tuple[StoredArray, Float32Array | None, tuple[float, float, float], int]
"""Gradients ([n, D] of the table's dtype); the coefficients that bring the rows to their step (float32 [n, 2, 2]), None
if they are there; weight decay, momentum and learning rate; the step."""
RawRows = tuple[StoredArray, StoredArray, Int64Array]
"""Weights, momentum buffers ([n, D] of the table's dtype) and last steps (int64 [n])."""

VARIABLE = "WEIGHTSERVER_KERNEL"
"""Set to "numpy", the compiled kernel is left alone; to "compiled", a process without it does not start."""
_INTERFACE = 8
"""What this version expects of the kernel; a build of other sources may lie beside it."""
_CHECKSUMS = ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed")
"""Functions of the xxhash package's library, the fastest first."""


class Kernel(Protocol):
    """The compiled passes over n rows. Arrays are contiguous.

    Raises:
        ValueError: a length or a place is not what the other arguments say; nothing outside an array is read.
    """

    INTERFACE: int

    def look(self, places: Places, verify: bool, last_step: Int64Array, /) -> int:
        """Fills last_step (int64 [n]); returns the position of the first block that has another length or, if `verify`,
        where these rows are damaged, or -1."""

    def answer(
        self,
        places: Places,
        coefficients: Float32Array | None,
        step: int,
        heads: tuple[bytes, bytes | None, bytes | None],
        last_step: Int64Array,
        /,
    ) -> bytes | None:
        """A message of weights, momentum buffers and last steps, each after its head; those without one are left out.

        The rows are corrected by coefficients (float32 [n, 2, 2]) and rounded for `step`, or, without coefficients, as
        they are stored. Returns None if a corrected value is infinite or NaN.
        """

    def change(self, places: Places, write_id: int, room: memoryview, update: Gradients | RawRows, /) -> int:
        """Writes the blocks, one after the other, their rows updated or replaced, and sealed for that write; returns
        how many of the rows were never written before.

        A block is copied, checked, changed and sealed in one pass. Returns -1, with the room in no particular state, if
        a block is damaged or a row becomes infinite or NaN.
        """


@functools.cache
def _found() -> Kernel | None:
    """The kernel that is installed and that this version understands, if it can compute checksums."""
    try:
        found = cast("Kernel", importlib.import_module("weightserver.core._kernel"))
    except ImportError:
        return None
    return found if found.INTERFACE == _INTERFACE and checksum_address() else None


@functools.cache
def compiled() -> Kernel | None:
    """The compiled kernel; None if NumPy computes.

    Raises:
        ValueError: the environment variable WEIGHTSERVER_KERNEL is neither "numpy" nor "compiled", or it is "compiled"
            and there is no kernel.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "numpy", "compiled"):
        raise ValueError(f"{VARIABLE} is {wanted!r}: set it to 'numpy' or 'compiled', or unset it")
    found = None if wanted == "numpy" else _found()
    if wanted == "compiled" and found is None:
        raise ValueError(
            f"{VARIABLE} is 'compiled', but this installation has no compiled kernel: install a C compiler, and "
            "pic-weightserver again"
        )
    return found


def name() -> str:
    """Which of the two computes, "compiled" or "numpy", for logs and metrics."""
    return "numpy" if compiled() is None else "compiled"


@functools.cache
def checksum_address() -> int:
    """The address of XXH3-64 with a seed in the library of the xxhash package; 0 if it does not export it."""
    try:
        library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return 0
    data = np.arange(1_000, dtype=np.uint16).tobytes()
    for function in (getattr(library, name, None) for name in _CHECKSUMS):
        if function is not None:
            function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64)
            if function(data, len(data), 7) == xxhash.xxh3_64_intdigest(data, seed=7):
                return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
