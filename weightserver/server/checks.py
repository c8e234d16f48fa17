"""Checks of requests that do not depend on the shard's state."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightserver.core.errors import InvalidRequestError
from weightserver.core.lineage import split_mark
from weightserver.core.sharding import Sharding
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_NAME_CHARACTERS, float32_from_bytes
from weightserver.shard.rates import GivenRates
from weightserver.shard.transaction import WriteHeader

ID_BYTES = 16


def require(good: bool | np.bool_, message: str) -> None:
    if not good:
        raise InvalidRequestError(message)


def require_id(value: bytes, name: str, *, optional: bool = False) -> None:
    require(len(value) == ID_BYTES or (optional and not value), f"{name} must be {ID_BYTES} bytes")


def check_name(name: str) -> None:
    require(0 < len(name) <= MAX_NAME_CHARACTERS, f"name must have 1 to {MAX_NAME_CHARACTERS} characters")


def check_mark(mark: str) -> None:
    try:
        split_mark(mark)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def given_rates(rates: pb.Rates) -> GivenRates:
    """The learning rates that a request names."""
    require(rates.start >= 0, f"start must not be negative, got {rates.start}")
    if not rates.learning_rates:
        return GivenRates(rates.start, rates.digest)
    learning_rates = float32_from_bytes(rates.learning_rates, "learning_rates") + np.float32(0)  # no −0
    require((learning_rates >= 0).all(), "learning rates must be finite and not negative")
    return GivenRates(rates.start, rates.digest, learning_rates)


def needed_blocks(request: pb.ReadBlocksRequest, rows_per_block: int) -> Callable[[int], bool]:
    """Which blocks of a table with `rows_per_block` rows in each the request asks for, by their numbers."""
    if not request.HasField("part"):
        return lambda block: True
    part = request.part
    require(part.rows_per_block > 0, f"rows_per_block must be positive, got {part.rows_per_block}")
    require(0 <= part.shard < part.num_shards, f"there is no shard {part.shard} of {part.num_shards}")
    sharding = Sharding(part.rows_per_block, part.num_shards)
    return lambda block: sharding.needs_block(part.shard, block, rows_per_block)


def write_header(header: pb.WriteHeader) -> WriteHeader:
    """The header of a write, checked."""
    require_id(header.writer, "writer")
    require(header.sequence > 0, "sequence must be positive")
    return WriteHeader(
        epoch=header.epoch,
        session_id=header.session_id,
        writer=header.writer,
        sequence=header.sequence,
        step=header.step,
        rates=given_rates(header.rates),
    )
