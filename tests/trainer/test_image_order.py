"""Runs whose images stand in the order of a file, and the order of similar features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.image_order import main, similar_order
from tests.helpers.small_run import NUM_IMAGES, PowerLoss, losses, power_loss_at, small_run
from trainer.build import _sampler
from trainer.classes import classes_of
from trainer.config import TrainConfig
from trainer.export.__main__ import main as export_main
from trainer.loop import train
from trainer.run.opening import head_of
from trainer.run_dataset import dataset_of
from weightserver.core.arrays import Int64Array
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def order(tmp_path: Path) -> Path:
    np.save(tmp_path / "order.npy", np.random.default_rng(0).permutation(NUM_IMAGES))
    return tmp_path / "order.npy"


def visited(config: TrainConfig, steps: int) -> tuple[list[int], Int64Array]:
    """The images of the first steps, and the rows of their classes."""
    classes = classes_of(config.sampling, dataset_of(config))
    sampler = _sampler(config, classes, head_of(config, classes, Ranks()))
    images = [image for step in range(steps) for image in sampler.images(step, 0).tolist()]
    ids = np.concatenate([sampler.classes_of_step(step) for step in range(steps)])
    return images, classes.rows.rows(ids)


def test_the_window_slides_over_the_order(order: Path, tmp_path: Path) -> None:
    """A row is an image's place in it, so the rows of a window are neighbours; the seed of the order has no effect on
    which images are visited."""
    config = small_run(tmp_path, image_order=order)
    images, rows = visited(config, steps=12)
    assert np.array_equal(np.load(order)[rows], images)
    assert set(images[:96]) == set(np.load(order)[:96].tolist())
    assert set(images[96:192]) == set(np.load(order)[24:120].tolist())
    again, same_rows = visited(small_run(tmp_path, image_order=order, order_seed=5), steps=12)
    assert again == images
    assert np.array_equal(same_rows, rows)


@pytest.mark.guard  # seconds
def test_a_run_resumes_bit_for_bit_in_its_order_only(order: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"image_order": order, "steps": 18}
    train(small_run(tmp_path / "whole", **changes))
    train(small_run(tmp_path / "dense", **changes, rows="dense"))
    found = np.array(losses(tmp_path / "whole"))
    assert np.abs(found / losses(tmp_path / "dense") - 1).max() <= 1e-4
    train(small_run(tmp_path / "seed", steps=18, rows="dense"))
    assert np.abs(found - losses(tmp_path / "seed")).max() > 0.01
    with pytest.raises(PowerLoss):
        train(small_run(tmp_path / "run", **changes), on_step=power_loss_at(15))
    np.save(tmp_path / "other.npy", np.load(order)[::-1])
    for other, message in ((None, "the run has a class map or an order of its own"), ("other.npy", "is not that of")):
        changed = changes | {"image_order": other and tmp_path / other}
        with pytest.raises(ValueError, match=message):
            train(small_run(tmp_path / "run", **changed, resume=True))
    moved = order.rename(tmp_path / "moved.npy")
    train(small_run(tmp_path / "run", **changes | {"image_order": moved}, resume=True))
    assert losses(tmp_path / "run") == found.tolist()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.arange(299), ": it is no order of 300 images: give each number of"),
        (np.zeros(300, int), ": it is no order of 300 images"),
        (np.arange(1, 301), ": it is no order of 300 images"),
        (np.zeros(300), r" holds values of type float64 .* give one integer"),
    ],
    ids=str,
)
def test_what_is_no_order_is_refused(images: Int64Array, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "order.npy", images)
    config = small_run(tmp_path / "run", image_order=tmp_path / "order.npy")
    with pytest.raises(ValueError, match=rf"--image-order .*order.npy{message}"):
        classes_of(config.sampling, dataset_of(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": "classes"}, "--labels makes the images of a class neighbours: omit it, or --image-order"),
        ({"extend": True, "resume": True}, "--extend adds images, but --image-order has no places for them"),
    ],
)
def test_settings_that_contradict_an_order_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, image_order=Path("order.npy"), **changes).check()


def test_neighbours_are_similar() -> None:
    """Of points in a cube, windows of a tenth have less than half of the variance."""
    points = np.random.default_rng(0).random((1_000, 3))
    found = similar_order(points)
    assert np.array_equal(np.sort(found), np.arange(1_000))
    variances = [points[found[start : start + 100]].var(axis=0).sum() for start in range(0, 1_000, 100)]
    assert np.mean(variances) < points.var(axis=0).sum() / 2
    assert similar_order(np.zeros((100, 4))).tolist() == list(range(100))


@pytest.mark.guard  # seconds
def test_a_runs_features_make_an_order_to_train_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(small_run(tmp_path / "run", steps=2))
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "made/order.npy")]) == 0
    assert f"{NUM_IMAGES} images in" in capsys.readouterr().out
    train(small_run(tmp_path / "next", steps=2, image_order=tmp_path / "made/order.npy"))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none"), "--output", str(tmp_path / "other.npy")])


@pytest.mark.guard  # seconds
def test_rows_are_those_of_the_images_in_the_file(
    order: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = tmp_path / "run", np.load(order)
    train(small_run(run, image_order=order, steps=2))

    def export(output: str) -> int | str | None:
        with pytest.raises(SystemExit) as stopped:
            export_main(["rows", str(run), "--output", str(tmp_path / output), "--format", "npz"])
        return stopped.value.code

    assert export("rows") == 0
    (file,) = (tmp_path / "rows").glob("*.npz")
    exported = np.load(file)
    assert np.array_equal(exported["image"], images[exported["row"]])
    np.save(order, images[::-1])
    assert export("others") == 1
    assert f"order.npy is not the order of {run}'s images any more: restore it" in capsys.readouterr().err
    order.unlink()
    assert export("none") == 1
    assert f"{run} has its images in the order of {order}, which must be there: cannot read" in capsys.readouterr().err
