"""Class maps made by clustering: nested in the labels, balanced, and near the clusters that are there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.evaluations import NUM_CLASSES, SeesRows, evaluate, made_dataset, made_evaluation
from trainer.evaluate import stored_features
from trainer.evaluate.paper.partition import divided, partition, proportional_parts
from trainer.evaluate.paper.settings import PartitionConfig
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
    """Of features in several files; partitions are the trainer's class maps."""
    monkeypatch.setattr(stored_features, "BLOCK_ROWS", 64)
    dataset = made_dataset()
    labels = dataset.train_labels.numpy()
    config = PartitionConfig(classes=(NUM_CLASSES, 13, 320))
    outcome = partition(made_evaluation(SeesRows().eval(), tmp_path / "state", dataset), config)
    lines = outcome.details["by_setting"]
    assert [line["classes"] for line in lines] == [NUM_CLASSES, 13, 320]
    for line in lines:
        found = read_labels(Path(line["labels"]))
        order = ClassOrder(found, 0, num_images=len(labels))
        assert order.num_classes == line["classes"]
        assert len({*zip(found.tolist(), labels.tolist(), strict=True)}) == line["classes"], "a class has two labels"
        assert [line["smallest"], line["largest"]] == [np.bincount(found).min(), np.bincount(found).max()]
    assert np.array_equal(read_labels(Path(lines[0]["labels"])), labels)


@pytest.mark.parametrize("classes", [3, 321])
def test_numbers_of_classes_out_of_range_are_refused(classes: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"--classes {classes} must lie in 4\.\.320"):
        partition(made_evaluation(SeesRows().eval(), tmp_path / "state"), PartitionConfig(classes=(classes,)))


def test_the_command_writes_class_maps_beside_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.evaluate.run.load_dataset", lambda *_, **__: made_dataset(60))
    arguments = ["partition", "--pixels", "--dataset", "idx", "--output", str(tmp_path), "--device", "cpu"]
    assert evaluate([*arguments, "--classes", "8,16"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [line["labels"] for line in result["by_setting"]] == [
        str(tmp_path / f"partition-{number}.npy") for number in (8, 16)
    ]
    assert json.loads((tmp_path / "partition.json").read_text())["by_setting"] == result["by_setting"]
    assert evaluate(arguments) == 2
    assert "--classes is (): give one or more numbers of classes" in capsys.readouterr().err
