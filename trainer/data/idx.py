"""Reads and checks the idx files in which the MNIST family of data sets is distributed.

An idx file is a big-endian header (two zero bytes, a type code, the number of axes, each axis's length as uint32)
followed by the values in row-major order. Source: http://yann.lecun.com/exdb/mnist/.
"""

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_UINT8 = 0x08


def find_idx(directory: Path, name: str) -> Path | None:
    """Returns the file `name` or `name`.gz in `directory`, or None if neither exists."""
    return next((path for path in (directory / f"{name}.gz", directory / name) if path.is_file()), None)


def read_idx(path: Path, num_axes: int, md5: str | None = None) -> NDArray[np.uint8]:
    """Returns the uint8 array [n, ...] of an idx file, plain or gzipped, with `num_axes` axes.

    `md5`, if given, is that of the decompressed file, so that it is independent of the compression.

    Raises:
        ValueError: the file is truncated, damaged or another one.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path} ({error}): delete it and fetch it again") from error
    header = 4 + 4 * num_axes
    if len(content) < header or content[:4] != bytes((0, 0, _UINT8, num_axes)):
        raise ValueError(f"{path} is not an idx file of uint8 with {num_axes} axes: give the original file")
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", count=num_axes, offset=4))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise ValueError(f"{path} has {len(content)} bytes, {expected} expected: delete it and fetch it again")
    if md5 is not None and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise ValueError(f"{path} has checksum {found}, {md5} expected: delete it and fetch it again")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
