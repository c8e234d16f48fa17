"""A run that is resumed with more images: its old rows do not change, and it can be stopped and resumed anywhere."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.run.checkpoint
from tests.helpers import dying_run
from tests.helpers.bars import write_bars
from tests.helpers.dying_run import NUM_SHARDS
from tests.helpers.image_tree import plain_tree
from tests.helpers.recent import recent_rows
from tests.helpers.small_run import losses, small_run
from trainer.config import TrainConfig
from trainer.data import load_dataset
from trainer.data.manifest import shards_path
from trainer.data.pack import PackOptions, pack
from trainer.export.__main__ import main as export
from trainer.loop import train
from trainer.run.checkpoint import Checkpoints
from trainer.run.run_images import RunImages
from trainer.schedule import learning_rates
from weightserver import LocalCluster, RowState, WeightClient
from weightserver.client.connection import ShardConnection
from weightserver.core.initial import initial_rows
from weightserver.torch import VisitSchedule

OLD, ALL = 100, 160
NUM_STEPS, ALL_STEPS = 25, 40  # four visits for each image
EXTENDED_AT = NUM_STEPS  # the newest checkpoint of the run with the old images, at its end


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed images: `old`, and `all`, the same with more after them."""
    root = tmp_path_factory.mktemp("images")
    pack(plain_tree(root / "tree", OLD), root / "old", PackOptions())
    shutil.copytree(root / "old", root / "all")
    pack(plain_tree(root / "tree", ALL - OLD, first=OLD), root / "all", PackOptions(extend=True))
    return root


def run(output: Path, data_dir: Path, **changes: Any) -> TrainConfig:
    settings = {"dataset": "packed", "data_dir": data_dir, "num_images": None, "steps": None, "epochs": 4.0}
    return small_run(output, **settings | {"window_size": 48, "window_stride": 6, "keep_checkpoints": 9} | changes)


@pytest.fixture(scope="module")
def before(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the old images."""
    output = tmp_path_factory.mktemp("before") / "run"
    train(run(output, images / "old"))
    assert len(losses(output)) == NUM_STEPS
    return output


@pytest.fixture(scope="module")
def extended(before: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, resumed with all images and not stopped again."""
    output = shutil.copytree(before, tmp_path_factory.mktemp("extended") / "run")
    train(run(output, images / "all", resume=True, extend=True))
    return output


@pytest.fixture
def output(before: Path, tmp_path: Path) -> Path:
    """A copy of the run with the old images."""
    return shutil.copytree(before, tmp_path / "run")


def rates(num_images: int) -> np.ndarray:
    num_steps = num_images * 4 // 16
    return learning_rates(num_steps=num_steps, base=0.2, warmup_steps=round(0.1 * num_steps))


@pytest.mark.guard
def test_old_rows_are_the_oracles_and_new_ones_are_trained(
    before: Path, extended: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with SGD without a gradient for all inactive rows, with the learning rates of each part."""
    assert len(losses(extended)) == ALL_STEPS
    assert losses(extended)[:EXTENDED_AT] == losses(before)[:EXTENDED_AT]
    known = np.concatenate([rates(OLD)[:EXTENDED_AT], rates(ALL)[EXTENDED_AT:]])
    schedule = VisitSchedule(num_rows=ALL, window_size=48, window_stride=6, seed=0)
    steps = range(EXTENDED_AT, ALL_STEPS)
    active = np.unique([recent_rows(schedule, step, num_active=64, batch_size=16).rows for step in steps])
    idle = np.setdiff1d(np.arange(OLD), active)
    with LocalCluster(NUM_SHARDS, extended / "servers") as cluster, WeightClient(cluster.addresses) as client:
        spec = client.describe().spec
        assert spec.num_rows == ALL
        kept = client.fetch_state(idle, step=EXTENDED_AT, checkpoint=f"step-{EXTENDED_AT:012d}")
        assert_drifted(client.fetch_state(idle, step=ALL_STEPS), kept.weight, kept.momentum_buffer, known[EXTENDED_AT:])
        new = np.arange(OLD, ALL)
        assert 15 < np.isin(new, active).sum() < 60
        start, end = initial_rows(spec, new), client.fetch_state(new, step=ALL_STEPS)
        untouched = new[~np.isin(new, active)]
        assert_drifted(client.fetch_state(untouched, step=ALL_STEPS), initial_rows(spec, untouched), None, known)
        moved = np.linalg.norm(end.weight - start, axis=1) > 0.1 * np.linalg.norm(start, axis=1)
        assert np.array_equal(moved, np.isin(new, active))
    moved = shutil.copytree(extended, tmp_path / "moved")
    settings = (moved / "config.json").read_text()
    assert str(images / "all") in settings, "the run notes where its images are now"
    (moved / "config.json").write_text(settings.replace(str(images / "all"), str(images / "old")))
    with pytest.raises(SystemExit) as stopped:
        export(["rows", str(moved), "--output", str(tmp_path / "rows"), "--format", "npz"])
    assert stopped.value.code == 1
    assert "has 160 images" in capsys.readouterr().err


def assert_drifted(state: RowState, weight: np.ndarray, momentum_buffer: np.ndarray | None, rates: np.ndarray) -> None:
    """Asserts that rows moved from `weight` (float32 [n, D]) by updates without a gradient."""
    weight = weight.astype(np.float64)
    momentum = np.zeros_like(weight) if momentum_buffer is None else momentum_buffer.astype(np.float64)
    assert len(weight) > 3
    for rate in rates.astype(np.float64):
        momentum = 0.9 * momentum + 1e-4 * weight
        weight = weight - rate * momentum
    np.testing.assert_allclose(state.weight, weight, rtol=0, atol=1e-5 * np.abs(weight).max())
    np.testing.assert_allclose(state.momentum_buffer, momentum, rtol=0, atol=1e-5 * np.abs(weight).max())


@pytest.mark.guard
def test_the_same_with_remote_rows(output: Path, extended: Path, images: Path) -> None:
    train(run(output, images / "all", resume=True, extend=True, rows="remote"))
    assert losses(output) == losses(extended)


POINTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before the rows are rolled back": (WeightClient, "rollback", dying_run.before(1)),
    "between two shards of the table": (ShardConnection, "call", dying_run.between_shards("ExtendTable", 1)),
    "before its checkpoint has all images": (Checkpoints, "_write", dying_run.before(1)),
    "in the file": (trainer.run.checkpoint, "save_file", dying_run.after(1)),
    "after its checkpoint has all images": (Checkpoints, "save", dying_run.after(1)),
    "after a checkpoint": (Checkpoints, "save", dying_run.after(2)),
}
QUICK = ("between two shards of the table", "after a checkpoint")


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in QUICK else pytest.mark.slow) for point in POINTS]
)
@pytest.mark.guard
def test_a_run_that_fails_while_it_is_extended_can_be_resumed(
    point: str, output: Path, extended: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain --resume suffices once its newest checkpoint has all images."""

    def fail() -> None:
        raise OSError("the power went out")

    monkeypatch.setattr(dying_run, "die", fail)
    owner, name, patch = POINTS[point]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, patch(getattr(owner, name)))
        with pytest.raises(OSError, match="power"):
            train(run(output, images / "all", resume=True, extend=True))
    train(run(output, images / "all", resume=True, extend=not point.startswith("after")))
    assert losses(output) == losses(extended)


@pytest.mark.slow
def test_a_run_is_resumed_from_before_its_extension(before: Path, extended: Path, images: Path, tmp_path: Path) -> None:
    """Its checkpoint has the old images, the table stays large; it is extended again, or continues without."""
    output = shutil.copytree(extended, tmp_path / "run")
    again = shutil.copytree(output, tmp_path / "again")
    train(run(output, images / "all", resume=True, resume_step=0, extend=True))
    fresh = tmp_path / "fresh"
    train(run(fresh, images / "all"))
    assert losses(output) == losses(fresh), "from step 0 on it has all images"
    train(run(again, images / "all", resume=True, resume_step=0))
    assert losses(again) == losses(before)


@pytest.mark.guard
def test_more_images_wait_for_extend(
    before: Path, extended: Path, images: Path, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is resumed without it keeps its earlier images, even while others are being added."""
    shutil.copytree(images / "all", growing := output.parent / "growing")
    shards_path(growing, OLD).unlink()  # which is written last
    for data_dir, message in (("growing", "without 60 images"), (images / "all", "continuing with 100 of 160 images")):
        shutil.copytree(output, again := output.parent / Path(data_dir).name / "run")
        caplog.clear()
        result = train(run(again, output.parent / data_dir, resume=True))
        assert len(result.dataset.train_images) == len(result.dataset.train_labels) == OLD
        assert losses(again) == losses(before)
        assert message in caplog.text
    train(run(again, images / "all", resume=True, extend=True, decode_threads=1))
    assert losses(again) == losses(extended)
    with pytest.raises(ValueError, match="--extend adds images to a run that is resumed: give --resume too"):
        train(run(output.parent / "new", images / "all", extend=True))


@pytest.mark.parametrize("extend", [False, True])
def test_other_images_are_refused(extend: bool) -> None:
    fewer = "the run has 100 images, the data set only 70: give all images of the run"
    other = "the run has 100 images, the data set 160, and the images of the run may have other rows in it: add"
    for range_sizes, message in (([70], fewer), ([40, 30], fewer), ([160], other), ([90, 70], other)):
        with pytest.raises(ValueError, match=message):
            RunImages(OLD, OLD).resumed(range_sizes, [], "", extend=extend)


@pytest.mark.guard
def test_as_many_other_images_are_refused(output: Path, images: Path, tmp_path: Path) -> None:
    """With and without --extend; nothing is written."""
    others = tmp_path / "others"
    pack(plain_tree(tmp_path / "tree", OLD, first=ALL), others, PackOptions())
    files = {path: path.read_bytes() for path in output.glob("*.json")}
    with pytest.raises(ValueError, match=r"are not those of the run, .* give --data-dir with the run's images, packed"):
        train(run(output, others, resume=True))
    pack(plain_tree(tmp_path / "tree", ALL - OLD, first=0), others, PackOptions(extend=True))
    with pytest.raises(ValueError, match="images are not those of the run"):
        train(run(output, others, resume=True, extend=True))
    assert {path: path.read_bytes() for path in output.glob("*.json")} == files


def test_images_are_known_by_the_ranges_that_the_run_had() -> None:
    images = RunImages(OLD, OLD, ("a",))
    assert images.resumed([OLD, 60], ["a", "b"], "", extend=True) == RunImages(160, OLD, ("a", "b"))
    assert images.resumed([OLD], ["a"], "", extend=False) == images
    assert RunImages.from_json(images.to_json()) == images
    for digests in (["b"], ["b", "a"], []):
        with pytest.raises(ValueError, match="images are not those of the run"):
            images.resumed([OLD, 60][: len(digests) or 1], digests, "", extend=True)


def test_images_are_the_same_wherever_they_lie(images: Path, tmp_path: Path) -> None:
    old, extended = (load_dataset("packed", images / name).digests for name in ("old", "all"))
    assert (len(old), len(extended)) == (1, 2)
    assert extended[:1] == old
    assert load_dataset("packed", shutil.copytree(images / "old", tmp_path / "packed")).digests == old
    tree = plain_tree(tmp_path / "tree", 9)
    digests = load_dataset("folder", tree).digests
    assert load_dataset("folder", tree.rename(tmp_path / "moved")).digests == digests
    (tmp_path / "moved" / "a" / "0000.jpg").rename(tmp_path / "moved" / "a" / "0009.jpg")
    assert load_dataset("folder", tmp_path / "moved").digests != digests
    (tmp_path / "idx").mkdir()
    bars = load_dataset("idx", write_bars(tmp_path / "idx", num_train=9)).digests
    file = shutil.copytree(tmp_path / "idx", tmp_path / "bars") / "train-images-idx3-ubyte.gz"
    assert load_dataset("idx", file.parent).digests == bars
    file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes())[:-1] + b"x"))
    assert load_dataset("idx", file.parent).digests != bars


def test_an_extension_does_not_bring_the_warm_up_back() -> None:
    """It keeps its number of steps, and the run gets longer."""
    config = run(Path("unused"), Path("unused"), warmup_epochs=1.0).optimization
    for num_images in (OLD, ALL, 400):
        rates = RunImages(num_images, OLD).learning_rates(config)
        assert np.array_equal(rates, learning_rates(num_steps=num_images * 4 // 16, base=0.2, warmup_steps=6))
