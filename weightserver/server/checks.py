"""Checks of requests that do not depend on the shard's state."""

from __future__ import annotations

import numpy as np

from weightserver.core.errors import InvalidRequestError
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import MAX_NAME_CHARACTERS

ID_BYTES = 16


def require(good: bool | np.bool_, message: str) -> None:
    if not good:
        raise InvalidRequestError(message)


def require_id(value: bytes, name: str, *, optional: bool = False) -> None:
    require(len(value) == ID_BYTES or (optional and not value), f"{name} must be {ID_BYTES} bytes")


def check_header(header: pb.WriteHeader) -> None:
    require_id(header.writer, "writer")
    require(header.sequence > 0, "sequence must be positive")


def check_name(name: str) -> None:
    require(0 < len(name) <= MAX_NAME_CHARACTERS, f"name must have 1 to {MAX_NAME_CHARACTERS} characters")
