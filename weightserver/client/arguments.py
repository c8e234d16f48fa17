"""Checks of the arguments of a client's calls. Invalid arguments raise before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
import numpy as np
import numpy.typing as npt

from weightserver.common.addresses import is_loopback, parse_addresses
from weightserver.common.security import MAX_TOKEN_CHARACTERS
from weightserver.core.arrays import Float32Array, Int64Array, all_finite, checked_integer, checked_number
from weightserver.core.errors import RowError
from weightserver.protocol.codec import MAX_NAME_CHARACTERS

_MAX_SECONDS = 86_400


def checked_addresses(addresses: Sequence[str], *, credentials: object, token: object, insecure: bool) -> list[str]:
    """The address of each shard. Raises ValueError unless all may be called with these credentials."""
    is_list = not isinstance(addresses, str) and all(isinstance(text, str) for text in addresses)
    parsed = parse_addresses(*addresses) if is_list else []
    if not parsed:
        raise ValueError(f"addresses must be a list of host:port, one for each shard, got {addresses!r}")
    if not callable(token):
        checked_token(token)
    if not (credentials is None or callable(credentials) or isinstance(credentials, grpc.ChannelCredentials)):
        raise TypeError(f"credentials must be of gRPC's for a channel, or what makes them, got {credentials!r}")
    for address in parsed:
        if not is_loopback(address) and credentials is None and not insecure:
            raise ValueError(
                f"{address} is not on this machine: give credentials (--tls-ca), or insecure=True (--insecure) on a "
                "network you trust"
            )
    return parsed


def checked_token(token: object) -> str | None:
    """Raises TypeError for what is no text, ValueError for one that gRPC does not send. Never tells the token."""
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"token must be a text, or what returns one, got {type(token).__name__}")
    if not (token.isascii() and token.isprintable() and len(token) <= MAX_TOKEN_CHARACTERS):
        raise ValueError(f"token must be printable ASCII of at most {MAX_TOKEN_CHARACTERS} characters")
    return token


def checked_seconds(*, timeout_seconds: float, retry_seconds: float, connect_seconds: float) -> dict[str, float]:
    """The arguments as floats. Raises TypeError for what is no number, ValueError for numbers out of range."""
    timeout = checked_number(timeout_seconds, "timeout_seconds")
    retry = checked_number(retry_seconds, "retry_seconds")
    connect = checked_number(connect_seconds, "connect_seconds")
    if not 0 < timeout <= _MAX_SECONDS or not 0 <= retry < math.inf or not 0 < connect < math.inf:
        raise ValueError(
            f"timeout_seconds must be positive and at most {_MAX_SECONDS}, retry_seconds not negative, connect_seconds "
            f"positive: got {timeout_seconds}, {retry_seconds}, {connect_seconds}"
        )
    return {"timeout_seconds": timeout, "retry_seconds": retry, "connect_seconds": connect}


def checked_name(name: str) -> str:
    if not isinstance(name, str) or not name or not name.encode(errors="ignore").decode() == name:
        raise ValueError(f"name must be a non-empty text that UTF-8 can hold, got {name!r}")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"name has {len(name)} characters: give one of at most {MAX_NAME_CHARACTERS}")
    return name


def checked_step(value: int, name: str) -> int:
    return checked_integer(value, name, 0, 2**63 - 1)


# ---- rows and their values


def row_numbers(rows: npt.ArrayLike) -> Int64Array:
    """The rows as int64 [n]; `check_rows_exist` checks their range."""
    array = _int64(rows, "rows")
    if array.ndim != 1:
        raise ValueError(f"rows must have shape [n], got {list(array.shape)}")
    return array


def check_rows_exist(rows: Int64Array, num_rows: int) -> None:
    if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
        bad = rows[(rows < 0) | (rows >= num_rows)][0]
        raise ValueError(f"row {bad} does not exist: the table has rows 0..{num_rows - 1}")


def checked_values(values: npt.ArrayLike, shape: tuple[int, int], name: str) -> Float32Array:
    """Finite values of the given shape, float32 [n, D]. An array or tensor must be float32 already."""
    try:
        array = np.asarray(values) if hasattr(values, "dtype") else np.asarray(values, np.float32)
    except RuntimeError as error:  # a torch tensor with a gradient, or on another device
        raise TypeError(f"{name} cannot be read as a NumPy array: {error}") from None
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {array.dtype}: convert it first")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
    if not all_finite(array):
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(f"{name} must be finite, got {array[row, column]} at [{row}, {column}]: nothing was sent")
    return array


def checked_last_step(last_step: int | npt.ArrayLike, num_rows: int) -> Int64Array:
    """Each row's last step, int64 [n], contiguous."""
    steps = _int64(last_step, "last_step")
    if steps.ndim and steps.shape != (num_rows,):
        raise ValueError(f"last_step must be an integer or have shape [{num_rows}], got {list(steps.shape)}")
    steps = np.ascontiguousarray(np.broadcast_to(steps, num_rows))
    if (steps < 0).any():
        raise ValueError(f"last_step must not be negative, got {steps.min()}")
    return steps


def output_array(out: Float32Array | None, shape: tuple[int, int]) -> Float32Array:
    """`out` if it can hold a fetch of that shape, a new array if it is None."""
    if out is None:
        return np.empty(shape, np.float32)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}: of a CPU tensor, give tensor.numpy()")
    flags = out.flags
    if out.shape != shape or out.dtype != np.float32 or not flags.c_contiguous or not flags.writeable:
        given = f"{out.dtype} of shape {list(out.shape)}" + ("" if flags.c_contiguous else ", not contiguous")
        given += "" if flags.writeable else ", read-only"
        raise ValueError(
            f"out must be a writable, contiguous float32 array of shape {list(shape)}, got {given}: or omit it"
        )
    return out


def is_strictly_increasing(rows: Int64Array) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


def sum_repeats(rows: Int64Array, gradients: Float32Array) -> tuple[Int64Array, Float32Array]:
    """Sorted distinct rows, and the sum of each one's gradients in the order given."""
    order = np.argsort(rows, kind="stable")
    distinct, starts = np.unique(rows[order], return_index=True)
    with np.errstate(over="ignore"):
        summed = np.add.reduceat(gradients[order], starts, axis=0)
    if not all_finite(summed):
        row = int(distinct[~np.isfinite(summed).all(axis=1)][0])
        raise RowError(f"the gradients of row {row} add up beyond float32: nothing was sent, scale them down", row=row)
    return distinct, summed


def distinct_order(rows: Int64Array) -> Int64Array:
    """The order that sorts the rows, int64 [n], each of which is given once."""
    order = np.argsort(rows)
    repeated = rows[order][1:][np.diff(rows[order]) == 0]
    if len(repeated):
        raise RowError(f"row {repeated[0]} is given twice: write_state takes each row once", row=int(repeated[0]))
    return order


def _int64(value: npt.ArrayLike, name: str) -> Int64Array:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() >= 2**63:
        raise ValueError(f"{name} must be less than 2⁶³, got {array.max()}")
    return array.astype(np.int64, copy=False)
