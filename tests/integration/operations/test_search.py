"""The rows most similar to others: printed, and as an index of faiss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.dense_search import dense_nearest
from tests.helpers.operations import ROWS, SPEC, Weightserver, assert_one_line, make_table
from weightserver import LocalCluster, WeightClient


@pytest.fixture
def servers(cluster: LocalCluster) -> str:
    return ",".join(cluster.addresses)


def test_the_rows_most_similar_to_rows(
    weightserver: Weightserver, servers: str, cluster: LocalCluster, client: WeightClient
) -> None:
    kept = make_table(client)
    stored = np.flatnonzero(kept.last_step > 0)
    status, output, _ = weightserver(
        "search", "--servers", servers, "--rows", "0,3,30", "-k", 4, "--checkpoint", "one", "--json"
    )
    assert status == 0
    rows, similarity = dense_nearest(kept.weight[[0, 3, 30]], kept.weight[stored], 5, "cosine")
    for number, line in enumerate(output.splitlines()):
        match = json.loads(line)
        assert match["query"] == (0, 3, 30)[number]
        assert match["rows"] == stored[rows[number, 1:]].tolist()  # without the row itself
        assert match["similarity"] == similarity[number, 1:].tolist()
    status, output, _ = weightserver("search", *cluster.addresses, "--rows", "0", "-k", 2, "--step", 50)
    lines = [line.split("\t") for line in output.splitlines()]
    assert lines[0] == ["query", "row", "similarity"]
    assert [line[0] for line in lines[1:]] == ["0", "0"]
    assert float(lines[1][2]) >= float(lines[2][2])


def test_the_rows_most_similar_to_vectors(
    weightserver: Weightserver, servers: str, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    vectors, file = client.fetch_state([3, 12]).weight, tmp_path / "vectors.npy"
    np.save(file, vectors)
    command = ("search", "--servers", servers, "--rows", file, "--metric", "inner_product", "--json")
    found = [json.loads(line) for line in weightserver(*command)[1].splitlines()]
    expected = client.nearest(vectors, 10, metric="inner_product")
    assert [match["rows"] for match in found] == expected.rows.tolist()
    assert [match["query"] for match in found] == [0, 1]


def test_search_rejects_bad_input(
    weightserver: Weightserver, servers: str, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    file = tmp_path / "vectors.npy"

    def refused(message: str, *arguments: object) -> None:
        assert_one_line(weightserver("search", "--servers", servers, *arguments), message)

    refused("row 1000 does not exist: the table has rows 0..999", "--rows", "1000")
    refused("k must lie in 1..4096, got 0", "--rows", "1", "-k", 0)
    refused("k must lie in 1..4096, got 4097", "--rows", "1", "-k", 4097)
    refused("no checkpoint 'x'", "--rows", "1", "--checkpoint", "x")
    refused("No such file", "--rows", file)
    file.write_bytes(b"no numbers")
    refused("is no .npy file of numbers", "--rows", file)
    np.save(file, np.ones((2, SPEC.dim)))
    refused("vectors.npy holds float64, not one float32 array", "--rows", file)
    np.save(file, np.ones((2, SPEC.dim + 1), np.float32))
    refused("vectors must have shape [q, 16], got [2, 17]", "--rows", file)
    assert_one_line(weightserver("search", "--rows", "1"), "no address is given")
    assert weightserver("search", "--servers", servers, "--rows", "one")[0] == 2


def test_an_index_of_faiss(
    weightserver: Weightserver, servers: str, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    faiss = pytest.importorskip("faiss")
    kept, file = make_table(client), tmp_path / "rows.faiss"
    command = ["export", *cluster.addresses, "--checkpoint", "one", "--step", 2, "--faiss", file]
    assert weightserver(*command) == (0, f"wrote 1000 rows to {file}\n", "")
    index = faiss.read_index(str(file))
    assert (type(index), index.ntotal) == (faiss.IndexIDMap2, 1_000)
    weight = client.fetch(ROWS, step=2, checkpoint="one")
    similarity, rows = index.search(weight[:9] / np.linalg.norm(weight[:9], axis=1, keepdims=True), 3)
    assert rows[:, 0].tolist() == list(range(9))
    assert similarity[:, 0] == pytest.approx(1)
    assert kept.weight.shape == weight.shape
    assert_one_line(weightserver(*command), "rows.faiss exists: give another file")


def test_an_index_needs_faiss(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_table(client)
    monkeypatch.setitem(sys.modules, "faiss", None)
    file = tmp_path / "rows.faiss"
    assert_one_line(
        weightserver("export", *cluster.addresses, "--faiss", file),
        "--faiss needs faiss: pip install 'pic-weightserver[faiss]'",
    )
    assert not list(tmp_path.iterdir())
    assert_one_line(weightserver("export", *cluster.addresses), "nothing to write: give --output")
