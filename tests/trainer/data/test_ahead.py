"""Batches that are decoded ahead are the batches, in turn, and no more of them are made than two."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.helpers.image_tree import plain_tree
from trainer.data import load_dataset
from trainer.data.ahead import batches_ahead


def test_batches_are_those_of_the_ids_and_few_are_ahead(tmp_path: Path) -> None:
    images = load_dataset("folder", plain_tree(tmp_path, 30), image_size=16).train_images
    drawn = 0

    def ids() -> Iterator[torch.Tensor]:
        nonlocal drawn
        for start in range(0, 30, 3):
            drawn += 1
            yield torch.arange(start, start + 3)

    with closing(batches_ahead(images, ids())) as batches:
        for number, batch in enumerate(batches):
            assert torch.equal(batch, images[3 * number : 3 * number + 3])
            assert drawn <= number + 3
    assert drawn == number + 1 == 10


def test_in_memory_there_is_nothing_to_do_ahead() -> None:
    images = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2)
    ids = [torch.tensor([5, 0]), torch.tensor([1])]
    assert [batch.tolist() for batch in batches_ahead(images, ids)] == [images[one].tolist() for one in ids]


def test_the_thread_ends_and_failures_are_told_in_turn(tmp_path: Path) -> None:
    images = load_dataset("folder", plain_tree(tmp_path, 3), image_size=16).train_images
    before = threading.active_count()
    with closing(batches_ahead(images, [torch.tensor([0]), torch.tensor([10**6])])) as batches:
        assert next(batches).shape[0] == 1
        with pytest.raises(IndexError):
            next(batches)
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())
    assert threading.active_count() <= before + 2
