"""How a client searches all rows: it walks every shard's blocks in short calls, and merges what they found."""

from __future__ import annotations

import numpy as np

from weightserver.client.connection import ShardConnection
from weightserver.client.fan_out import Shards
from weightserver.client.results import Neighbours
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.errors import ClusterError
from weightserver.core.similarity import most_similar
from weightserver.protocol._generated import weight_server_pb2 as pb
from weightserver.protocol.codec import CHUNK_BYTES, MAX_FOUND, MAX_QUERIES, to_bytes

Found = tuple[Int64Array, Float32Array]
"""rows and similarity, [q, n] each."""


def search_rows(shards: Shards, request: pb.SearchRequest, vectors: Float32Array) -> Neighbours:
    """The `request.k` rows most similar to each of the vectors (float32 [q, D]); `request` has all but the queries."""
    at_a_time = max(1, min(MAX_QUERIES, MAX_FOUND // request.k, CHUNK_BYTES // (4 * vectors.shape[1])))
    parts = []
    for start in range(0, len(vectors), at_a_time):
        request.queries = to_bytes(vectors[start : start + at_a_time])
        num_queries = min(at_a_time, len(vectors) - start)
        walks = [(connection, request, num_queries) for connection in shards.connections()]
        parts.append(_merged(shards.in_parallel(_search_shard, walks), request.k))
    width = min((rows.shape[1] for rows, _ in parts), default=0)  # rows may be written between two parts
    rows = [np.zeros((0, width), np.int64), *(rows[:, :width] for rows, _ in parts)]
    similarity = [np.zeros((0, width), np.float32), *(similarity[:, :width] for _, similarity in parts)]
    return Neighbours(np.concatenate(rows), np.concatenate(similarity))


def _search_shard(connection: ShardConnection, like: pb.SearchRequest, num_queries: int) -> Found:
    """The rows of one shard that are most similar. Each call searches some blocks, and is retried for itself."""
    request = pb.SearchRequest()
    request.CopyFrom(like)
    best: list[Found] = []
    while True:
        answer = connection.call("Search", request)
        rows, similarity = np.frombuffer(answer.rows, "<i8"), np.frombuffer(answer.similarity, "<f4")
        if len(rows) != len(similarity) or len(rows) != num_queries * min(request.k, answer.num_rows):
            raise ClusterError(f"{connection.name} answered {len(rows)} rows: is it of the same version?")
        best = [_merged([*best, (rows.reshape(num_queries, -1), similarity.reshape(num_queries, -1))], request.k)]
        if not answer.next_block:
            return best[0]
        request.first_block = answer.next_block


def _merged(found: list[Found], k: int) -> Found:
    rows, similarity = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return most_similar(rows, similarity, k)
