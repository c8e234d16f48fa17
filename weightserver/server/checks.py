"""Checks of requests that do not depend on the shard's state."""

from __future__ import annotations

import numpy as np

from weightserver.core.errors import InvalidRequestError
from weightserver.core.spec import MAX_ROWS, TableSpec
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import (
    MAX_FOUND,
    MAX_NAME_CHARACTERS,
    MAX_NEIGHBOURS,
    MAX_QUERIES,
    SIMILARITY_NAMES,
    float32_from_bytes,
)
from weightserver.shard.search import Query

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


def check_search(request: pb.SearchRequest, spec: TableSpec) -> Query:
    """The query of a search of a table. Raises InvalidRequestError if it is invalid."""
    vectors = float32_from_bytes(request.queries, "queries")
    require(
        len(vectors) > 0 and len(vectors) % spec.dim == 0,
        f"queries has {len(vectors)} values, not a positive multiple of {spec.dim}",
    )
    num_queries = len(vectors) // spec.dim
    require(num_queries <= MAX_QUERIES, f"{num_queries} queries in one search, at most {MAX_QUERIES}: split it")
    require(1 <= request.k <= MAX_NEIGHBOURS, f"k must lie in 1..{MAX_NEIGHBOURS}, got {request.k}")
    require(
        num_queries * request.k <= MAX_FOUND,
        f"{num_queries} queries for {request.k} rows each in one search, at most {MAX_FOUND} rows: split it",
    )
    require(request.similarity in SIMILARITY_NAMES, f"similarity {request.similarity} is unknown")
    require(request.first_block <= MAX_ROWS, f"there is no block {request.first_block}")
    return Query(vectors.reshape(num_queries, spec.dim), request.k, SIMILARITY_NAMES[request.similarity])
