"""Class maps made by clustering: nested in the labels, balanced, and near the clusters that are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.partition import divided, main, proportional_parts, write_partitions
from tests.helpers.evaluations import NUM_CLASSES, SIDE, SeesRows, made_dataset
from trainer.data.pixels import MINUS_ONE_TO_ONE
from trainer.evaluate.features import encode
from trainer.model import EncoderConfig, build_model, save_encoder
from weightserver.torch import ClassOrder, read_labels


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any), st.data())
def test_parts_are_proportional(images: list[int], data: st.DataObject) -> None:
    images_of_class = np.array(images)
    labelled = int(np.count_nonzero(images_of_class))
    num_classes = data.draw(st.integers(labelled, int(images_of_class.sum())))
    parts = proportional_parts(images_of_class, num_classes)
    assert parts.sum() == num_classes
    assert ((parts >= 1) == (images_of_class > 0)).all()
    assert (parts <= images_of_class).all()
    share = (num_classes - labelled) / max(1, images_of_class.sum() - labelled)
    assert (np.abs(parts - 1 - share * (images_of_class - 1))[images_of_class > 0] <= 1).all()


@given(st.integers(1, 40), st.data(), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_clusters_are_of_one_size(num_vectors: int, data: st.DataObject, seed: int) -> None:
    num_clusters = data.draw(st.integers(1, num_vectors))
    values = np.random.default_rng(seed).standard_normal((num_vectors, 3)).astype(np.float32)
    sizes = np.bincount(divided(values, num_clusters, 0), minlength=num_clusters)
    assert len(sizes) == num_clusters
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1


def test_clusters_that_are_there_are_found() -> None:
    wanted = np.random.default_rng(0).permutation(np.arange(200) % 4)
    values = (10 * np.eye(4)[wanted] + 0.1 * np.random.default_rng(1).standard_normal((200, 4))).astype(np.float32)
    clusters = divided(values, 4, 0)
    assert len(set(zip(wanted.tolist(), clusters.tolist(), strict=True))) == 4


def test_partitions_refine_the_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes them as class maps of the trainer."""
    dataset = made_dataset()
    labels = dataset.train_labels.numpy()
    config = EncoderConfig(width=4, blocks=(1, 1), image_size=SIDE)
    save_encoder(build_model(config, seed=0).encoder, config, tmp_path / "encoder.safetensors")
    monkeypatch.setattr("experiments.partition.load_dataset", lambda *_, **__: dataset)
    arguments = [str(tmp_path / "encoder.safetensors"), "--output", str(tmp_path / "maps"), "--classes"]
    assert main([*arguments, str(NUM_CLASSES), "13", "320"]) == 0
    sizes = json.loads((tmp_path / "maps/partition.json").read_text())["smallest and largest"]
    for number in (NUM_CLASSES, 13, 320):
        found = read_labels(tmp_path / f"maps/partition-{number}.npy")
        assert ClassOrder(found, 0, num_images=len(labels)).num_classes == number
        assert len({*zip(found.tolist(), labels.tolist(), strict=True)}) == number, "a class has two labels"
        assert sizes[f"{number} classes"] == [np.bincount(found).min(), np.bincount(found).max()]
    assert np.array_equal(read_labels(tmp_path / f"maps/partition-{NUM_CLASSES}.npy"), labels)


def test_features_of_few_images_are_in_single_precision_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of ImageNet's would take 31 GB, not 5.3. The maps are the same."""
    dataset, sizes = made_dataset(), list[int]()

    def counted(*given: Any, **options: Any) -> Tensor:
        sizes.append(len(encode(*given, **options)))
        return encode(*given, **options)

    monkeypatch.setattr("experiments.partition.encode", counted)
    found = []
    for block in (1_000, 100):
        monkeypatch.setattr("experiments.partition._BLOCK", block)
        write_partitions(SeesRows().eval(), MINUS_ONE_TO_ONE, dataset, [13], tmp_path)
        found.append(read_labels(tmp_path / "partition-13.npy"))
    assert sizes == [320, 100, 100, 100, 20]
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("classes", [3, 321])
def test_numbers_of_classes_out_of_range_are_refused(classes: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--classes {classes} must lie in 4\.\.320"):
        write_partitions(SeesRows().eval(), MINUS_ONE_TO_ONE, made_dataset(), [classes], tmp_path)
