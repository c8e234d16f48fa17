"""Exported rows name the images that they belong to."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tests.helpers.image_tree import plain_tree
from tests.helpers.secure_shards import served
from tests.helpers.small_run import EVERY, NUM_IMAGES, ONLY_ROWS, small_run
from trainer.data.pack import PackOptions, pack
from trainer.export.__main__ import main
from trainer.loop import train
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.operations.certificates import write_certificates
from weightserver.torch.windows import RowOrder

pytestmark = pytest.mark.usefixtures("one_thread")


def export(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["rows", *map(str, arguments)])
    return stopped.value.code


def test_rows_are_exported_over_tls_with_the_options_of_the_run_or_others(tmp_path: Path) -> None:
    run, certificates = tmp_path / "run", tmp_path / "certificates"
    write_certificates(certificates, ["127.0.0.1"])
    options = ["--tls-cert", f"{certificates}/server.pem", "--tls-key", f"{certificates}/server-key.pem"]
    options += ["--token-file", f"{certificates}/token"]
    with served({"secure": options}) as shards:
        own: dict[str, Any] = {"tls_ca": certificates / "ca.pem", "token_file": certificates / "token"}
        train(small_run(run, steps=2, servers=shards["secure"].address, encoder=ONLY_ROWS, **own))
        assert export(run, "--output", tmp_path / "as the run") == 0
        others = ["--tls-ca", certificates / "ca.pem", "--token-file", certificates / "token"]
        assert export(run, "--output", tmp_path / "its own", *others) == 0


def test_export_rejects_bad_input(
    client: WeightClient, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(message: str, *arguments: object) -> None:
        assert export(*arguments, "--output", tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()

    run, servers = tmp_path / "run", ["--servers", ",".join(cluster.addresses)]
    fails("holds no run", run)
    run.mkdir()
    (run / "config.json").write_text('{"format": 5}')
    fails("is not a run's config.json", run)
    (run / "config.json").write_text(json.dumps({"format": 5, "order_seed": 1, "seed": 0, "dim": 16}))
    fails("has no local weight servers", run)
    fails("holds no table", run, *servers)
    client.create_table(TableSpec(num_rows=10, dim=8))
    fails("hold another table", run, *servers)


@pytest.mark.guard  # seconds
def test_rows_of_another_run_on_the_same_servers_are_refused(
    cluster: LocalCluster, client: WeightClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints of all runs have the same names."""
    for name in ("first", "second"):
        train(small_run(tmp_path / name, servers=",".join(cluster.addresses), steps=EVERY, encoder=ONLY_ROWS))
        if name == "first":
            client.drop_table()
    options = ["--output", tmp_path / "out", "--checkpoint", f"step-{EVERY:012d}"]
    assert export(tmp_path / "first", *options) == 1
    assert f"hold another table than that of {tmp_path / 'first'}" in capsys.readouterr().err
    assert export(tmp_path / "second", *options) == 0


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_exported_rows_name_their_images_files(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree, run = plain_tree(tmp_path / "tree", 40), tmp_path / "run"
    directory = tree
    if kind == "packed":
        directory = tmp_path / "packed"
        pack(tree, directory, PackOptions(order_seed=11))
    small = {"window_size": 40, "window_stride": 10, "num_negatives": 40, "num_images": None}
    settings: dict[str, Any] = {"dataset": kind, "data_dir": directory, "encoder": ONLY_ROWS, "order_seed": 11}
    train(small_run(run, steps=EVERY + 2, **small, **settings))
    assert export(run, "--output", tmp_path / "out", "--format", "npz", "--rows", "3:33") == 0
    assert f"and 30 paths to {tmp_path / 'out/images.csv'}" in capsys.readouterr().out
    with np.load(next((tmp_path / "out").glob("*.npz"))) as opened:
        file = dict(opened)
    with (tmp_path / "out/images.csv").open(newline="") as text:
        found = list(csv.DictReader(text))
    assert [int(line["row"]) for line in found] == file["row"].tolist()
    assert [int(line["image"]) for line in found] == file["image"].tolist()
    assert np.array_equal(file["image"], RowOrder(40, 11).images(file["row"]))
    paths = sorted(tree.rglob("*.jpg"))  # in the order of the images' ids
    assert [line["path"] for line in found] == [str(paths[image]) for image in file["image"]]
    if kind == "folder":
        plain_tree(tree, 1, first=90)  # now other ids belong to the files
        assert export(run, "--output", tmp_path / "later") == 0
        assert "without images.csv, as the images' paths are unknown" in capsys.readouterr().out
        assert not (tmp_path / "later/images.csv").exists()


@pytest.mark.guard
def test_rows_of_a_checkpoint_are_exported_beside_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their images; rows that have none yet change nothing."""
    run, name = tmp_path / "run", f"step-{EVERY:012d}"
    train(small_run(run, steps=EVERY + 2, order_seed=11, encoder=ONLY_ROWS))
    with LocalCluster(2, run / "servers") as cluster, WeightClient(cluster.addresses) as client:
        client.extend_table(NUM_IMAGES + 100)
        servers = ["--servers", ",".join(cluster.addresses)]
        assert export(run, "--output", tmp_path / "no", "--rows", "7:301", *servers) == 1
        assert "rows 7:301 have no images" in capsys.readouterr().err
        assert export(run, "--output", tmp_path / "all", *servers) == 0
        assert export(run, "--output", tmp_path / "kept", "--checkpoint", name, "--rows", "7:19", *servers) == 0
        for output, rows, state in (
            ("all", np.arange(NUM_IMAGES), {"step": EVERY + 2}),
            ("kept", np.arange(7, 19), {"step": EVERY, "checkpoint": name}),
        ):
            with safe_open(next((tmp_path / output).iterdir()), "np") as file:
                assert np.array_equal(file.get_tensor("row"), rows)
                assert np.array_equal(file.get_tensor("image"), RowOrder(NUM_IMAGES, 11).images(rows))
                assert np.array_equal(file.get_tensor("weight"), client.fetch(rows, **state))
        assert export(run, "--output", tmp_path / "no") == 1
        assert "is served by another process" in capsys.readouterr().err


def test_the_documented_lines_find_images_that_are_nearly_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 3 and 40, of two files, have nearly one direction; 5 and 6 only seem to."""
    weight = np.random.default_rng(0).standard_normal((60, 16), np.float32)
    weight[40] = 3 * weight[3] + 0.1
    weight[6] = weight[5] + weight[7]
    (tmp_path / "rows").mkdir()
    for first in (0, 30):
        rows = slice(first, first + 30)
        np.savez(tmp_path / "rows" / f"{first:02d}.npz", weight=weight[rows], image=100 + np.arange(60)[rows])
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page.partition("## Near-duplicates")[2], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = dict[str, Any]()
    exec(code, names)
    assert names["pairs"].tolist() == [[103, 140]]
