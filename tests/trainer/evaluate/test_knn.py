"""The kNN protocol: features in files, chosen and given settings, resumption."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.evaluations import SeesNothing, SeesRows, made_dataset, made_evaluation
from trainer.evaluate import knn as knn_module
from trainer.evaluate.features import Frozen, encoder_features
from trainer.evaluate.knn import knn, knn_top1, stored_features
from trainer.evaluate.settings import KnnConfig
from weightserver.torch import Ranks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_module, "BLOCK_ROWS", 64)
    monkeypatch.setattr(knn_module, "SEARCHED_ROWS", 16)


def stored(tmp_path: Path, encoder: nn.Module, num_images: int = 150) -> Tensor:
    evaluation = made_evaluation(encoder, tmp_path, made_dataset(num_images))
    frozen = Frozen(encoder, evaluation.encoder.pixels, torch.device("cpu"))
    images = evaluation.labelled().train_images
    return stored_features(frozen, images, None, tmp_path / "train", Ranks(), lambda *_, **__: None)


def test_stored_features_are_those_of_the_encoder(tmp_path: Path) -> None:
    dataset, encoder = made_dataset(150), SeesRows()
    features = stored(tmp_path, encoder)
    expected = nn.functional.normalize(encoder_features(encoder.eval(), dataset).train)
    assert features.dtype == torch.float16
    torch.testing.assert_close(features.float(), expected, rtol=2**-10, atol=2**-24)
    features[:] = 0
    assert not stored(tmp_path, encoder).any(), "computed once"
    (tmp_path / "train/1.done").unlink()
    again = stored(tmp_path, encoder)
    torch.testing.assert_close(again[64:128].float(), expected[64:128], rtol=2**-10, atol=2**-24)
    assert again.any(dim=1).sum() == 64


def test_features_that_no_disk_takes_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written through a map, they would kill the process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    open_file = Path.open

    def small_disk(path: Path, mode: str = "r", *arguments: Any) -> Any:
        if mode == "r+b":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        return open_file(path, mode, *arguments)

    monkeypatch.setattr(Path, "open", small_disk)
    try:
        with pytest.raises(OSError, match="File too large"):
            stored(tmp_path, SeesRows())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.done"))


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    encoder = SeesRows()
    encoder.norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="features are not all finite: are its weights damaged"):
        stored(tmp_path, encoder)


def test_equals_the_one_in_memory(tmp_path: Path) -> None:
    dataset = made_dataset()
    found = knn(made_evaluation(SeesRows(), tmp_path, dataset), KnnConfig())
    features = encoder_features(SeesRows().eval(), dataset)
    assert found.results["top1"] == knn_top1(features).top1 > 90
    assert found.results["top5"] == 100, "there are four classes"
    assert found.chosen["k"] == knn_top1(features).setting
    assert found.chosen["held_out_top1"] == knn_top1(features).held_out_top1
    assert knn(made_evaluation(SeesNothing(), tmp_path / "bad", dataset), KnnConfig()).results["top1"] < 45


def test_of_fewer_than_ten_images_each_is_held_out_in_turn(tmp_path: Path) -> None:
    dataset = made_dataset(8)
    found, expected = (
        knn(made_evaluation(SeesRows(), tmp_path, dataset), KnnConfig()),
        knn_top1(encoder_features(SeesRows().eval(), dataset)),
    )
    assert found.results["top1"] == expected.top1
    assert found.chosen == {
        "k": expected.setting,
        "held_out_top1": expected.held_out_top1,
        "on": "8 training images, not used as neighbours for it",
    }


def test_each_given_setting_has_a_result(tmp_path: Path) -> None:
    found = knn(made_evaluation(SeesRows(), tmp_path), KnnConfig(k=(10, 400)))
    assert found.chosen == {}
    assert [each["k"] for each in found.details["by_setting"]] == [10, 320], "there are only 320"
    assert found.results["top1"] == found.details["by_setting"][0]["top1"]


def test_five_classes_without_a_vote_are_not_right(tmp_path: Path) -> None:
    result = knn(made_evaluation(SeesNothing(), tmp_path / "bad"), KnnConfig(k=(1,))).results
    assert result["top1"] == result["top5"] < 45, "one neighbour, one class"


def test_labels_are_needed(tmp_path: Path) -> None:
    dataset = replace(made_dataset(), train_labels=torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="have no labels"):
        knn(made_evaluation(SeesRows(), tmp_path, dataset), KnnConfig())
    for wrong in ((), (0,), (5, -1)):
        with pytest.raises(ValueError, match=r"--k is .* at least 1"):
            KnnConfig(k=wrong).check()
