"""Prints the stored rows most similar to given rows, or to vectors from a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightserver.client.arguments import checked_k
from weightserver.client.client import WeightClient
from weightserver.client.results import Neighbours
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.similarity import SIMILARITIES
from weightserver.operations.arguments import add_cluster_arguments, connect, non_empty_name
from weightserver.protocol.codec import MAX_NEIGHBOURS


@dataclass(frozen=True)
class Match:
    """What was found for one query, most similar first."""

    query: int
    """The row that was given, or the number of the vector in the file."""
    rows: list[int]
    similarity: list[float]


def nearest_to_rows(client: WeightClient, rows: Int64Array, k: int, **state: Any) -> list[Match]:
    """The k rows most similar to each of `rows` (int64 [n]), without itself.

    Args:
        state: `step`, `checkpoint` and `metric` of `WeightClient.nearest`.
    """
    own = {name: value for name, value in state.items() if name != "metric"}
    vectors = client.fetch_state(rows, **own).weight
    found = client.nearest(vectors, min(checked_k(k) + 1, MAX_NEIGHBOURS), **state)
    return [
        Match(query, [number for number, _ in others], [similarity for _, similarity in others])
        for query, others in zip(rows.tolist(), _others(found, rows, k), strict=True)
    ]


def _others(found: Neighbours, rows: Int64Array, k: int) -> Iterator[list[tuple[int, float]]]:
    """The first k neighbours of each row that are not the row itself."""
    for row, numbers, similarity in zip(rows, found.rows, found.similarity, strict=True):
        pairs = zip(numbers.tolist(), similarity.tolist(), strict=True)
        yield [(number, value) for number, value in pairs if number != row][:k]


def nearest_to_vectors(client: WeightClient, vectors: Float32Array, k: int, **state: Any) -> list[Match]:
    """The k rows most similar to each of `vectors` (float32 [n, D]). Arguments as for `nearest_to_rows`."""
    found = client.nearest(vectors, k, **state)
    pairs = zip(found.rows.tolist(), found.similarity.tolist(), strict=True)
    return [Match(number, rows, similarity) for number, (rows, similarity) in enumerate(pairs)]


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser, required=False)
    parser.add_argument("--servers", default="", metavar="HOST:PORT,…", help="the same")
    parser.add_argument(
        "--rows",
        type=_queries,
        required=True,
        metavar="ID,ID…|FILE.npy",
        help="the rows to compare with all others, or a file of vectors, float32 [n, D]",
    )
    parser.add_argument("-k", type=int, default=10, help="number of rows to print for each (default 10)")
    parser.add_argument(
        "--checkpoint", type=non_empty_name, help="search the rows of this checkpoint (default the current rows)"
    )
    parser.add_argument("--step", type=int, help="compare rows as before this update (default as they are stored)")
    parser.add_argument(
        "--metric", choices=SIMILARITIES, default="cosine", help="measure of similarity (default cosine)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")


def run(arguments: argparse.Namespace) -> None:
    arguments.addresses = [*arguments.addresses, arguments.servers]
    queries = arguments.rows
    state = {"step": arguments.step, "checkpoint": arguments.checkpoint or "", "metric": arguments.metric}
    with connect(arguments) as client:
        if isinstance(queries, Path):
            matches = nearest_to_vectors(client, _read_vectors(queries), arguments.k, **state)
        else:
            matches = nearest_to_rows(client, queries, arguments.k, **state)
    print("\n".join(_json(matches) if arguments.json else _table(matches)))


def _json(matches: Iterable[Match]) -> Iterator[str]:
    return (json.dumps(vars(match)) for match in matches)


def _table(matches: Iterable[Match]) -> Iterator[str]:
    """A line for each row that was found."""
    yield "query\trow\tsimilarity"
    for match in matches:
        for row, similarity in zip(match.rows, match.similarity, strict=True):
            yield f"{match.query}\t{row}\t{similarity:.6f}"


def _queries(text: str) -> Int64Array | Path:
    if text.endswith(".npy"):
        return Path(text).expanduser()
    try:
        return np.array([int(number) for number in text.split(",")], np.int64)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is neither row numbers such as 3,17 nor a file.npy") from None


def _read_vectors(path: Path) -> Float32Array:
    """The vectors in a file, float32; the client checks their shape and values. Raises ValueError for other files."""
    try:
        vectors = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers ({error})") from None
    if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32:
        raise ValueError(f"{path} holds {getattr(vectors, 'dtype', 'several arrays')}, not one float32 array")
    return vectors
