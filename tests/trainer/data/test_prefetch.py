"""Views are decoded ahead in the order of visits, at most two batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.image_tree import plain_tree
from tests.helpers.watching import wait_until
from trainer.data import cache, load_dataset
from trainer.data.augment import Augmentation, AugmentationConfig, Unchanged
from trainer.data.pixels import normalise
from trainer.data.prefetch import Visits, views_ahead
from trainer.schedule import visit_uniforms

AUGMENTATIONS = [
    Augmentation(AugmentationConfig(), 16),
    Augmentation(AugmentationConfig(), 16),
    Augmentation(AugmentationConfig(min_scale=0.05, max_scale=0.14), 8),
]


def visits(*images: int) -> Visits:
    numbered = np.add.outer(1000 * np.arange(len(AUGMENTATIONS)), np.array(images))
    return Visits(np.array(images), visit_uniforms(0, numbered, Augmentation.num_uniforms))


def test_views_are_those_of_the_visits_and_few_are_ahead(tmp_path: Path) -> None:
    images = load_dataset("folder", plain_tree(tmp_path, 30), image_size=16).train_images
    everything = list(views_ahead(images, [visits(*range(30))], AUGMENTATIONS, "cpu"))
    assert [view.shape for view in everything] == [(30, 3, 16, 16), (30, 3, 16, 16), (30, 3, 8, 8)]
    assert not torch.equal(everything[0], everything[1])
    drawn = 0

    def batches() -> Iterator[Visits]:
        nonlocal drawn
        for start in range(0, 30, 3):
            drawn += 1
            yield visits(*range(start, start + 3))

    with closing(views_ahead(images, batches(), AUGMENTATIONS, "cpu")) as views:
        for number, view in enumerate(views):
            batch, augmentation = divmod(number, 3)
            torch.testing.assert_close(view, everything[augmentation][3 * batch :][:3], rtol=0, atol=1e-6)
            assert drawn <= batch + 3
    assert drawn == batch + 1 == 10


def test_images_in_memory_need_no_thread() -> None:
    images = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8)
    batches = [visits(5, 0), visits(1)]
    views = list(views_ahead(images, batches, AUGMENTATIONS, "cpu"))
    expected = [
        augment(images[batch.images], torch.from_numpy(uniforms))
        for batch in batches
        for augment, uniforms in zip(AUGMENTATIONS, batch.uniforms, strict=True)
    ]
    assert all(map(torch.equal, views, expected))
    assert len(views) == len(expected)


def test_unchanged_images_are_centres(tmp_path: Path) -> None:
    images = load_dataset("folder", plain_tree(tmp_path, 3), image_size=14).train_images  # squares of 16
    (view,) = views_ahead(images, [Visits(np.arange(3), visits(0, 1, 2).uniforms[:1])], [Unchanged(16)], "cpu")
    assert torch.equal(view, normalise(images[:]))


def test_the_thread_ends_and_failures_are_raised_in_turn(tmp_path: Path) -> None:
    images = load_dataset("folder", plain_tree(tmp_path, 3), image_size=16).train_images
    before = threading.active_count()
    with closing(views_ahead(images, [visits(0), visits(10**6)], AUGMENTATIONS, "cpu")) as views:
        assert [len(next(views)) for _ in AUGMENTATIONS] == [1, 1, 1]
        with pytest.raises(IndexError):
            next(views)
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())
    assert threading.active_count() <= before + 2


def test_the_threads_of_a_cache_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "copy_range", lambda *_, **__: "version")
    pieces = cache.Cache(tmp_path, 1000)
    for start in range(cache._THREADS):
        pieces.fetch_ahead(cache.Piece(Path("s3://images/packed"), "version", start, start + 1))
    threads = pieces._threads
    wait_until(lambda: sum(not path.suffix for path in (tmp_path / "pieces").iterdir()) == cache._THREADS)
    del pieces
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
