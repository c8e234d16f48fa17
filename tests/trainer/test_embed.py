"""Encoders that leave the project: features of one's own images in files, and exports that other libraries load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.helpers.image_tree import BROKEN, odd_tree, plain_tree
from tests.helpers.small_run import small_run
from trainer import embedding
from trainer.data import load_dataset
from trainer.data.index import INDEX
from trainer.data.pack import PackOptions, pack
from trainer.data.packed import PackedImages
from trainer.data.parts import Part
from trainer.data.pixels import IMAGENET
from trainer.embed import main
from trainer.evaluate.features import encode
from trainer.feature_files import Batch, write_features
from trainer.model import EncoderConfig, build_model, load_encoder, save_encoder
from trainer.pic import main as pic_main
from weightserver.common.installing import install_advice

CONFIG = EncoderConfig(
    in_channels=3, image_size=28, width=8, stem_stride=2, blocks=(1,), pixel_mean=IMAGENET.mean, pixel_std=IMAGENET.std
)


def run_with(config: EncoderConfig, directory: Path, images: Path, **changes: Any) -> Path:
    """The directory of a run on the images of a folder, as it is after its end."""
    directory.mkdir()
    save_encoder(build_model(config, seed=3).encoder, config, directory / "encoder.safetensors")
    settings = small_run(directory, encoder=config, dataset="folder", num_images=None, data_dir=images, **changes)
    (directory / "config.json").write_text(settings.to_json())
    return directory


def loaded(path: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(path) as file:
        return dict(file)


def embed(*arguments: object) -> object:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in (*arguments, "--device", "cpu")])
    return ended.value.code


def test_features_are_those_of_an_evaluation_with_the_paths_of_their_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = odd_tree(tmp_path / "tree", 140)  # more than a batch
    run = run_with(CONFIG, tmp_path / "run", tree)
    assert embed(run, tree, "--output", tmp_path / "features.npz", "--broken-list", tmp_path / "list.txt") == 0
    printed = capsys.readouterr()
    listed = [line.partition("\t")[0] for line in (tmp_path / "list.txt").read_text().splitlines()]
    assert sorted(listed) == [str(tree / name) for name in sorted(BROKEN)]
    file = loaded(tmp_path / "features.npz")
    number = len(file["path"])
    assert printed.out == f"wrote {number} vectors of 8 numbers to {tmp_path / 'features.npz'}, 4 could not be read\n"
    assert all(f"left out: {tree / name} (" in printed.err for name in BROKEN)
    intact = sorted(path for path in tree.rglob("[!.]*.*") if path.suffix != ".txt")
    intact = [path for path in intact if str(path.relative_to(tree)) not in BROKEN]
    assert file["path"].tolist() == list(map(str, intact))
    for path in map(tree.joinpath, BROKEN):
        path.unlink()
    dataset = load_dataset("folder", tree, image_size=28)
    expected = encode(load_encoder(run / "encoder.safetensors")[0], dataset.train_images, 28, CONFIG.pixels)
    np.testing.assert_allclose(file["vector"], expected.numpy(), rtol=1e-4, atol=1e-5)

    assert embed(run / "encoder.safetensors", tree, "--output", tmp_path / "again.npz") == 0
    again = loaded(tmp_path / "again.npz")
    assert again["path"].tolist() == file["path"].tolist()
    np.testing.assert_array_equal(again["vector"], file["vector"])


def test_packed_images_have_the_paths_from_which_they_were_packed(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "tree", 9)
    (tree / "b/broken.jpg").write_bytes(b"x")
    pack(tree, tmp_path / "packed", PackOptions(order_seed=3))
    plain_tree(tree, 4, first=9)
    pack(tree, tmp_path / "packed", PackOptions(extend=True))
    run = run_with(CONFIG, tmp_path / "run", tree)
    for source in ("tree", "packed"):
        assert embed(run, tmp_path / source, "--output", tmp_path / f"{source}.npz") == 0
    plain, packed = (loaded(tmp_path / f"{source}.npz") for source in ("tree", "packed"))
    assert sorted(packed["path"]) == sorted(plain["path"])
    assert len(packed["path"]) == 13, "the broken image is left out, not doubled"
    order = np.argsort(packed["path"]), np.argsort(plain["path"])
    np.testing.assert_allclose(packed["vector"][order[0]], plain["vector"][order[1]], rtol=1e-5, atol=1e-6)


def test_all_splits_are_written_with_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, number in (("train", 6), ("test", 3), ("val", 3)):
        plain_tree(tmp_path / "set" / split, number)
    run = run_with(CONFIG, tmp_path / "run", tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed", PackOptions())
    for source, splits in (
        ("set", ["train"] * 6 + ["test"] * 3 + ["val"] * 3),
        ("packed", ["train"] * 6 + ["test"] * 3),
    ):
        assert embed(run, tmp_path / source, "--output", tmp_path / f"{source}.npz") == 0
        assert loaded(tmp_path / f"{source}.npz")["split"].tolist() == splits
    assert "of the splits train, test, val" in capsys.readouterr().out
    assert embed(run, tmp_path / "set", "--split", "test", "--output", tmp_path / "test.npz") == 0
    assert loaded(tmp_path / "test.npz").keys() == {"path", "vector"}
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"split": "val:test"}))
    assert embed(run, tmp_path / "set", "--output", tmp_path / "own.npz") == 0, "as the run reads its images"
    assert loaded(tmp_path / "own.npz")["split"].tolist() == ["val"] * 3 + ["test"] * 3


def test_names_and_labels_that_are_not_utf_8_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they are printed to a stdout that is strict, in the page of a report, and in Parquet."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tree = plain_tree(tmp_path / "tree", 66)
    os.rename(tree / "a", os.fsencode(tree / "caf") + b"\xe9")
    lines = [b"path,label", *(os.fsencode(path) + b",th\xe9" for path in tree.rglob("*.jpg"))]
    (tmp_path / "latin-1.csv").write_bytes(b"\n".join([*lines, b""]))
    run = run_with(CONFIG, tmp_path / "run", tree)
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    for arguments, said in (
        (["inspect", tree], "caf\\udce9 22"),
        (["inspect", tmp_path / "latin-1.csv"], "th\\udce9 66"),
        (["report", run], "report.html"),
        (["embed", run, tree, "--output", tmp_path / "f.parquet", "--device", "cpu"], "66 vectors"),
    ):
        with pytest.raises(SystemExit) as ended:
            pic_main(list(map(str, arguments)))
        printed = capsys.readouterr()
        assert (ended.value.code, said in printed.out) == (0, True), printed
        assert "caf\udce9" not in printed.out
    assert "label caf\\udce9" in (run / "report.html").read_text("utf-8")
    paths = parquet.read_table(tmp_path / "f.parquet")["path"].to_pylist()
    assert sum(path.startswith(f"{tree}/caf\\udce9/") for path in paths) == 22


def test_parts_are_files_of_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of images with splits in their order; of a pack each part has the images of neighbouring rows."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tree = plain_tree(tmp_path / "tree/train", 20).parent
    plain_tree(tree / "test", 5)
    (tree / "train/b/broken.jpg").write_bytes(b"x")
    run = run_with(CONFIG, tmp_path / "run", tree)
    pack(tree, tmp_path / "packed", PackOptions())
    for source in ("tree", "packed"):
        assert embed(run, tmp_path / source, "--output", tmp_path / f"{source}.parquet") == 0
        whole, folder = parquet.read_table(tmp_path / f"{source}.parquet"), tmp_path / f"{source} parts"
        assert str(whole.schema.field("vector").type) == "fixed_size_list<element: float>[8]"
        for part in (2, 0, 1):
            assert embed(run, tmp_path / source, "--output", folder, "--part", f"{part}/3") == 0
        files = sorted(folder.iterdir())
        assert [path.name for path in files] == [f"part-0000{part}-of-00003.parquet" for part in range(3)]
        written = [path.read_bytes() for path in files]
        assert embed(run, tmp_path / source, "--output", folder, "--part", "1/3") == 0
        assert f"{files[1]} is written already" in capsys.readouterr().out
        if source == "tree":
            number = sorted((tree / "train").rglob("*.jpg")).index(tree / "train/b/broken.jpg")
            assert embed(run, tree, "--output", tmp_path / "single", "--part", f"{number}/26") == 1
            message = f"none of the images of part-{number:05d}-of-00026 can be read: repair them, or give fewer parts"
            assert message in capsys.readouterr().err
        assert [path.read_bytes() for path in files] == written
        read = parquet.read_table(folder)
        assert read.column_names == whole.column_names == ["path", "split", "vector"]
        if source == "tree":
            assert embed(run, tree, "--output", tmp_path / "same.npz") == 0
            np.testing.assert_array_equal(np.stack(whole["vector"].to_numpy()), loaded(tmp_path / "same.npz")["vector"])
            assert read["path"].to_pylist() == whole["path"].to_pylist()
            assert parquet.read_table(files[2])["split"].to_pylist() == ["train"] * 4 + ["test"] * 5
        read, whole = read.sort_by("path"), whole.sort_by("path")
        assert read["path"].to_pylist() == whole["path"].to_pylist()
        np.testing.assert_allclose(
            np.stack(read["vector"].to_numpy()), np.stack(whole["vector"].to_numpy()), rtol=1e-5, atol=1e-6
        )
    images = PackedImages(tmp_path / "packed")
    rows = images.order.images(np.arange(8))  # 26 images in three parts
    expected = {images.path(image) for image in rows.tolist()} - {str(tree / "train/b/broken.jpg")}
    assert set(parquet.read_table(files[0])["path"].to_pylist()) == expected


def test_a_part_of_a_pack_reads_the_records_of_its_own_images_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the parts together read the index once."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    tree = plain_tree(tmp_path / "tree", 40)
    run = run_with(CONFIG, tmp_path / "run", tree)
    pack(tree, tmp_path / "packed", PackOptions())

    own, path = range(10, 15), tmp_path / "packed/index-000000000000.bin"
    index = np.fromfile(path, np.uint8).reshape(40, INDEX.itemsize)
    for damaged, status in ((np.delete(np.arange(40), own), 0), ([own[2]], 1)):
        content = index.copy()
        content[damaged] = 0xFF
        path.write_bytes(content.tobytes())
        output = tmp_path / f"status {status}"
        assert embed(run, tmp_path / "packed", "--output", output, "--part", "2/8") == status
    assert f"the index of {tmp_path / 'packed'} is damaged, in the records from row 1" in capsys.readouterr().err


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tree, other = plain_tree(tmp_path / "tree", 6), plain_tree(tmp_path / "other", 6)
    run, folder = run_with(CONFIG, tmp_path / "run", tree), tmp_path / "parts"
    again = run_with(CONFIG, tmp_path / "again", tree)
    save_encoder(build_model(CONFIG, seed=4).encoder, CONFIG, again / "encoder.safetensors")
    assert embed(run, tree, "--output", folder, "--part", "0/2") == 0
    mixed = "is none of these 2 parts, or of another encoder or other images: give another --output"
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("")
    for encoder, images, output, part, message in (
        (again, tree, folder, "1/2", mixed),
        (run, other, folder, "1/2", mixed),
        (run, tree, folder, "0/3", mixed.replace("2", "3")),
        (run, tree, tmp_path / "used", "1/2", mixed),
        (run, tree, tmp_path / "a.npz", "1/2", "a.npz is no folder, into which parts are written"),
        (run, tree, tmp_path / "many", "0/7", "part 0/7 has no images: give at most as many parts as there are images"),
    ):
        capsys.readouterr()
        before = sorted(folder.iterdir())
        assert embed(encoder, images, "--output", output, "--part", part) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert message in line
        assert sorted(folder.iterdir()) == before
    assert embed(run, tree, "--output", folder, "--part", "2/2") == 2
    (tree / "a/0000.jpg").rename(tree / "c/9999.jpg")  # as many images, in another order
    assert embed(run, tree, "--output", folder, "--part", "1/2") == 1
    assert mixed in capsys.readouterr().err
    assert embed(run, tree, "--output", folder, "--address", "host:1") == 1
    assert "--address is that of a Ray cluster: give --engine ray" in capsys.readouterr().err


def test_workers_read_the_images_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In another folder, from which they do not find the images of a run by the path that the run was given."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    plain_tree(tmp_path / "tree/train", 6)
    plain_tree(tmp_path / "tree/test", 3)
    monkeypatch.chdir(tmp_path)
    run = run_with(CONFIG, Path("run"), Path("tree"), split="train")

    def on_ray(task: Callable[[Part], object], of: int, advance: Callable[[], object], **_: object) -> None:
        with contextlib.chdir("/"):
            for number in range(of):
                task(Part(number, of))

    monkeypatch.setattr(embedding, "on_ray", on_ray)
    for _ in range(2):  # repeated, it finds what is done
        assert embed(run, "tree", "--output", "features", "--engine", "ray") == 0
        assert capsys.readouterr().out == "wrote 1 parts of 6 images to features\n"


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    """As a part whose worker was given up, and goes on: both would write to one unfinished file."""
    output, features = tmp_path / "a.npz", np.ones((1, 2), np.float32)

    def batches() -> Iterator[Batch]:
        with pytest.raises(OSError, match="is being written by another process"):
            write_features(output, [Batch(["second"], features, "")])
        yield Batch(["first"], features, "")

    assert write_features(output, batches()) == (1, 2)
    assert loaded(output)["path"].tolist() == ["first"]
    assert list(tmp_path.iterdir()) == [output]


def test_bad_input_is_one_line_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = plain_tree(tmp_path / "tree", 3)
    run = run_with(CONFIG, tmp_path / "run", tree)
    (tmp_path / "there.npz").write_text("")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    cases = {
        "features.pt": "has no known suffix: give a file of .parquet, .npz",
        "there.npz": "exists: give another --output",
        "features.parquet": f"{install_advice('parquet')}, or give --output NAME.npz",
    }
    for name, message in cases.items():
        assert embed(run, tree, "--output", tmp_path / name) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("trainer.embed: ")
        assert message in line
    for threads in (0, -1):
        assert embed(run, tree, "--output", tmp_path / "a.npz", "--decode-threads", threads) == 1
        assert f"--decode-threads must be at least 1, got {threads}" in capsys.readouterr().err
    assert embed(tmp_path / "absent", tree, "--output", tmp_path / "a.npz") == 1
    assert embed(run, tmp_path / "absent", "--output", tmp_path / "a.npz") == 1
    grey = run_with(EncoderConfig(image_size=28, width=8, blocks=(1,)), tmp_path / "grey", tree)
    assert embed(grey, tree, "--output", tmp_path / "a.npz") == 1
    assert "takes grey images" in capsys.readouterr().err
    assert not (tmp_path / "a.npz").exists()


def test_the_documented_lines_load_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = plain_tree(tmp_path / "pictures", 3)
    run_with(CONFIG, tmp_path / "runs-a", tree)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs-a").rename(tmp_path / "runs/a")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs/images.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "load_encoder" in block]
    names: dict[str, object] = {}
    exec(code, names)
    features = names["features"]
    assert isinstance(features, torch.Tensor)
    assert features.shape == (3, 8)
