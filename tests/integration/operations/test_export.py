"""Rows exported to files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.helpers.operations import ROWS, SPEC, Weightserver, assert_one_line, dies, make_table
from weightserver import LocalCluster, WeightClient
from weightserver.common.atomic_files import directory_lock
from weightserver.operations import export as exports


@pytest.mark.guard
def test_an_export_of_several_files_is_complete_or_absent(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An export is killed, and runs while another export writes to the directory."""
    make_table(client)
    state, new = client.fetch_state(ROWS, step=4), tmp_path / "out/new"
    command = ["export", *cluster.addresses, "--output", new]
    dies("weightserver.operations.export:atomic_write", 3, *command)
    assert not list(new.glob("*rows*"))
    monkeypatch.setattr(exports, "_BYTES_PER_FILE", 20_000)
    original = exports.atomic_write  # type: ignore[attr-defined]
    others: list[Any] = []

    def beside_another(path: Path, write: Callable[[Path], object]) -> None:
        others.append(weightserver(*command))
        original(path, write)

    monkeypatch.setattr(exports, "atomic_write", beside_another)
    assert weightserver(*command)[1].endswith(f"wrote {len(others)} files to {new}\n")
    assert len(others) > 5
    for other in others:
        assert_one_line(other, "is being written by another process")
    assert [path.name for path in new.parent.iterdir()] == ["new"]
    files = [load_file(path) for path in sorted(new.iterdir())]
    assert len(files) == len(others)
    assert np.array_equal(np.concatenate([file["row"] for file in files]), ROWS)
    assert np.array_equal(np.concatenate([file["weight"] for file in files]), state.weight)
    assert_one_line(weightserver(*command), "is not empty: give another directory")


def test_export_rejects_invalid_options(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    for option, message in (
        ("--step=101", "this needs the learning rates of 101 steps, but this client and the shards know those of 4"),
        ("--step=1", "has seen 4 updates, its state before update 1 is gone"),
        ("--rows=990:1001", "rows 990:1001 do not exist: the table has rows 0:1000"),
        ("--checkpoint=three", "there is no checkpoint 'three' on all shards, only ['one', 'two']"),
    ):
        assert_one_line(weightserver("export", *cluster.addresses, "--output", tmp_path / "a/b", option), message)
    assert not (tmp_path / "a").exists()


def test_an_export_into_the_target_of_a_link(
    weightserver: Weightserver, cluster: LocalCluster, client: WeightClient, tmp_path: Path
) -> None:
    make_table(client)
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("disk")
    command = ["export", *cluster.addresses, "--output"]
    written = (0, f"wrote 1 files to {tmp_path}/link\n", "")
    assert weightserver(*command, tmp_path / "link", "--rows", "3:8") == written
    (path,) = (tmp_path / "disk").iterdir()
    with safe_open(path, "np") as file:
        assert file.metadata()["step"] == "4"
        assert np.array_equal(file.get_tensor("weight"), client.fetch(ROWS[3:8], step=4))
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert_one_line(weightserver(*command, "/proc"), "is a mounted disk or the current")
    (tmp_path / "away").symlink_to("unmounted/rows")
    assert_one_line(weightserver(*command, tmp_path / "away"), "is a link to unmounted/rows, which is missing: is its")
    assert not (tmp_path / "unmounted").exists()


def test_an_index_of_faiss_finds_each_row_by_its_cosine(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faiss = pytest.importorskip("faiss")
    make_table(client)
    monkeypatch.setattr(exports, "_BYTES_PER_PART", 2_000)
    file, rows = tmp_path / "rows.faiss", ROWS[5:905]
    command = ["export", *cluster.addresses, "--checkpoint=two", "--rows=5:905", "--faiss", file]
    assert weightserver(*command) == (0, f"wrote 900 rows to {file}\n", "")
    weight = client.fetch(rows, step=3, checkpoint="two").astype(np.float64)
    unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines, found = faiss.read_index(str(file)).search(unit.astype(np.float32), 2)
    assert np.array_equal(found[:, 0], rows)
    expected = np.sort(unit @ unit.T, axis=1)[:, :-3:-1]
    np.testing.assert_allclose(cosines, expected, rtol=0, atol=SPEC.dim * 2**-22)
    assert_one_line(weightserver(*command), f"{file} exists: give another file")
    file.unlink()
    with directory_lock(tmp_path / ".rows.faiss.lock"):  # which the same command has
        assert_one_line(weightserver(*command), "is being written by another process")


def test_an_index_that_cannot_be_made_is_refused_before_rows_are_written(
    weightserver: Weightserver,
    cluster: LocalCluster,
    client: WeightClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_table(client)
    output, there, missing = tmp_path / "rows", tmp_path / "there", tmp_path / "missing"
    there.touch()
    command = ["export", *cluster.addresses, "--output", output, "--faiss"]
    monkeypatch.setitem(sys.modules, "faiss", ModuleType("faiss"))
    assert_one_line(weightserver(*command, there), f"{there} exists: give another file")
    assert_one_line(weightserver(*command, missing / "rows.faiss"), f"{missing} is no directory: make it first")
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert_one_line(weightserver(*command, tmp_path / "rows.faiss"), "--faiss needs faiss: pip install")
    assert not output.exists()
