"""kNN and linear probe on features with known results, and compared with plain references."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.evaluate.features import (
    FeatureSet,
    calibrate_batch_norm,
    encoder_features,
    pixel_features,
    untrained_encoder,
)
from trainer.evaluate.knn import knn_top1, leave_one_out_knn_top1
from trainer.evaluate.linear_cached import STRENGTHS, linear_top1
from trainer.evaluate.protocol import ProbeResult, split_folds, split_held_out, split_tests, splits_held_out
from trainer.evaluate.settings import K_CHOICES, VOTE_TEMPERATURE
from trainer.evaluate.table import evaluate_features
from trainer.model import EncoderConfig

CONFIG = EncoderConfig(width=8, blocks=(1, 1), stem_stride=2)


def clusters(num_train: int, num_test: int, noise: float, num_classes: int = 5) -> FeatureSet:
    """Classes around as many directions, with noise."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(num_classes, 16, generator=generator)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, num_classes, (count,), generator=generator)
        return centres[labels] + noise * torch.randn(count, 16, generator=generator), labels

    (train, train_labels), (test, test_labels) = draw(num_train), draw(num_test)
    return FeatureSet(train=train, train_labels=train_labels, test=test, test_labels=test_labels)


def random_images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 128, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 10, (count,), generator=generator)


@pytest.fixture
def dataset() -> Dataset:
    (train, train_labels), (test, test_labels) = random_images(1200), random_images(300)
    return Dataset(train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)


def test_training_images_that_stand_for_tests_are_of_all_classes() -> None:
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate((700, 200, 60, 40))])
    labels = labels[torch.randperm(1_000, generator=torch.Generator().manual_seed(1))]
    fitted, tests = split_tests(labels)
    assert torch.bincount(labels[tests]).tolist() == [70, 20, 6, 4]
    assert torch.equal(torch.cat([fitted, tests]).sort().values, torch.arange(1_000))
    assert torch.equal(split_tests(labels)[1], tests)


def test_held_out_images_are_a_fixed_tenth_at_most_5000() -> None:
    fitted, held_out = split_held_out(60_000)
    assert len(held_out) == 5_000
    assert torch.equal(torch.cat([fitted, held_out]).sort().values, torch.arange(60_000))
    assert torch.equal(held_out, split_held_out(60_000)[1])
    assert len(split_held_out(1_200)[1]) == 120
    with pytest.raises(ValueError, match="give 10 or more"):
        split_held_out(9)
    assert sorted(held_out.item() for _, held_out in splits_held_out(9)) == list(range(9))
    assert all(torch.equal(one, other) for one, other in zip(splits_held_out(10)[0], split_held_out(10), strict=True))


@pytest.mark.parametrize("protocol", [knn_top1, linear_top1])
def test_eight_labelled_images_are_enough_beside_test_images(protocol: Callable[[FeatureSet], ProbeResult]) -> None:
    result = protocol(clusters(8, 40, noise=0.1, num_classes=2))
    assert result.top1 == result.held_out_top1 == 100


def test_a_probe_that_cannot_be_made_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    features = clusters(2, 8, noise=0.1)
    features = dataclasses.replace(features, train_labels=torch.tensor([0, 1]))
    assert evaluate_features(features, "encoder").keys() == {"knn"}
    assert "no linear probe of the encoder: all training images but those held out" in capsys.readouterr().err


@pytest.mark.parametrize(("protocol", "choices"), [(knn_top1, K_CHOICES), (linear_top1, STRENGTHS)])
def test_test_images_choose_nothing(protocol, choices) -> None:  # type: ignore[no-untyped-def]
    features = clusters(2_000, 500, noise=2.0)
    result = protocol(features)
    assert result.setting in choices
    other = protocol(dataclasses.replace(features, test=features.test.flip(0), test_labels=features.test_labels * 0))
    assert (other.setting, other.held_out_top1) == (result.setting, result.held_out_top1)


def test_knn_classifies_as_scikit_learn() -> None:
    features, classes = clusters(1_100, 60, noise=2.0, num_classes=8), np.arange(8)
    result = knn_top1(features)
    library = KNeighborsClassifier(
        int(result.setting), metric="cosine", weights=lambda distance: np.exp((1 - distance) / VOTE_TEMPERATURE)
    ).fit(features.train.numpy(), features.train_labels.numpy())
    scores, wanted = library.predict_proba(features.test.numpy()), features.test_labels.numpy()
    for k, found in ((1, result.top1), (5, result.top5)):
        assert found == pytest.approx(100 * top_k_accuracy_score(wanted, scores, k=k, labels=classes))


@pytest.mark.parametrize("k", [1, 10])
def test_knn_during_training_leaves_each_image_out_of_its_neighbours(k: int) -> None:
    features = clusters(300, 10, noise=2.0)
    images, labels = features.train, features.train_labels
    similarity = F.normalize(images) @ F.normalize(images).T
    similarity.fill_diagonal_(-2)
    values, index = similarity.topk(k)
    votes = torch.zeros(300, 5).scatter_add_(1, labels[index], torch.exp(values / VOTE_TEMPERATURE))
    expected = 100 * (votes.argmax(1) == labels).double().mean().item()
    assert leave_one_out_knn_top1(images, labels, k=k) == pytest.approx(expected)
    assert 20 < expected < 100


def test_equal_images_are_neighbours_of_each_other() -> None:
    """However many there are: an image's own place among them does not matter."""
    images = torch.ones(30, 4)
    assert leave_one_out_knn_top1(images, torch.zeros(30, dtype=torch.int64), k=3) == 100
    pairs = torch.eye(6).repeat_interleave(2, dim=0)
    assert leave_one_out_knn_top1(pairs, torch.arange(12) // 2, k=1) == 100
    assert leave_one_out_knn_top1(pairs, torch.arange(12), k=1) == 0
    assert leave_one_out_knn_top1(pairs[:2], torch.zeros(2, dtype=torch.int64)) == 100, "fewer than k others"


def test_folds_hold_every_image_out_once() -> None:
    folds = split_folds(1_203, 5)
    assert torch.equal(torch.cat([held_out for _, held_out in folds]).sort().values, torch.arange(1_203))
    for fitted, held_out in folds:
        assert torch.equal(torch.cat([fitted, held_out]).sort().values, torch.arange(1_203))
    with pytest.raises(ValueError, match="4 training images are too few for 5 folds"):
        split_folds(4, 5)


def test_cross_validation_chooses_as_scikit_learn() -> None:
    """Of features of any scale and shift, and a constant one."""
    features, folds = clusters(400, 2_000, noise=2.0), 5

    def distort(values: Tensor) -> Tensor:
        return torch.cat([values * torch.logspace(-2, 2, 16) + 3, torch.full((len(values), 1), 7.0)], dim=1)

    features = dataclasses.replace(features, train=distort(features.train), test=distort(features.test))
    result = linear_top1(features, folds)
    scaled = StandardScaler().fit(features.train.numpy())
    train, test = (scaled.transform(each.numpy()) for each in (features.train, features.test))
    search = GridSearchCV(
        LogisticRegression(max_iter=1_000, tol=1e-6),
        {"C": [1 / (strength * len(train) * (folds - 1) / folds) for strength in STRENGTHS]},
        cv=[(fitted.numpy(), held_out.numpy()) for fitted, held_out in split_folds(len(train), folds)],
        refit=False,
    ).fit(train, features.train_labels.numpy())
    assert result.setting == STRENGTHS[search.best_index_]
    assert result.held_out_top1 == pytest.approx(100 * search.best_score_, abs=0.3), "one image of 400"
    best = LogisticRegression(C=1 / (result.setting * len(train)), max_iter=1_000, tol=1e-6)
    expected = 100 * best.fit(train, features.train_labels.numpy()).score(test, features.test_labels.numpy())
    assert result.top1 == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("protocol", [knn_top1, linear_top1])
@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_the_scale_of_features_changes_no_result(protocol: Callable[[FeatureSet], ProbeResult], scale: float) -> None:
    features = clusters(400, 200, noise=1.0)
    scaled = dataclasses.replace(features, train=features.train * scale, test=features.test * scale)
    assert protocol(scaled) == protocol(features)


@pytest.mark.parametrize("folds", [None, 5])
def test_a_class_may_have_only_held_out_images(folds: int | None) -> None:
    features = clusters(200, 50, noise=0.1)
    labels = features.train_labels.clone()
    labels[split_held_out(200)[1][0]] = 5
    assert linear_top1(dataclasses.replace(features, train_labels=labels), folds).top1 >= 90


@pytest.mark.parametrize("folds", [None, 5])
def test_images_of_one_class_but_for_those_held_out_are_refused(folds: int | None) -> None:
    features = clusters(200, 50, noise=0.1)
    labels = torch.full((200,), 3)
    labels[split_held_out(200)[1][0]] = 5
    with pytest.raises(ValueError, match="all training images but those held out are of one class: add images"):
        linear_top1(dataclasses.replace(features, train_labels=labels), folds)


def test_features_are_those_of_eval_mode_and_the_mode_is_kept(dataset: Dataset) -> None:
    encoder = untrained_encoder(CONFIG, dataset, seed=0).train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    features = encoder_features(encoder, dataset)
    assert encoder.training
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    alone = encoder_features(encoder, dataclasses.replace(dataset, test_images=dataset.test_images[7:8]))
    torch.testing.assert_close(alone.test[0], features.test[7], rtol=1e-4, atol=1e-5)
    assert pixel_features(dataset).train.shape == (1200, 784)


@pytest.mark.parametrize("side", [None, 20])
def test_calibrated_statistics_are_those_of_the_images(dataset: Dataset, side: int | None) -> None:
    images = dataset.train_images[:]
    if side is not None:  # of a bright frame, which evaluation does not see
        inner = images[..., 4:24, 4:24]
        dataset = dataclasses.replace(dataset, train_images=F.pad(inner, (4, 4, 4, 4), value=255), evaluated_side=side)
        images = inner
    encoder = untrained_encoder(CONFIG, dataset, seed=0)
    norm = next(module for module in encoder.modules() if isinstance(module, nn.BatchNorm2d))
    convolution = next(module for module in encoder.modules() if isinstance(module, nn.Conv2d))
    maps = convolution(images[:1000].float() / 127.5 - 1)
    assert norm.running_mean is not None
    torch.testing.assert_close(
        norm.running_mean, calibrated_mean := maps.detach().mean(dim=(0, 2, 3)), rtol=0.02, atol=0.02
    )
    assert calibrated_mean.abs().max() > 0.01
    again = calibrate_batch_norm(encoder, dataset.train_images, side)
    assert all(torch.allclose(a, b) for a, b in zip(again.buffers(), encoder.buffers(), strict=True))


@pytest.mark.parametrize("is_sorted", [False, True])
def test_calibration_counts_all_images_alike(is_sorted: bool) -> None:
    """BatchNorm fails at a single image whose map is one pixel, and averages the statistics of batches of any size."""
    encoder = nn.Sequential(nn.AvgPool2d(28), nn.BatchNorm2d(1))
    if is_sorted:
        images = (torch.arange(6_000) // 600 * 28).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    else:
        images = random_images(501)[0]
        images[-1] = 255
    norm = calibrate_batch_norm(encoder, images).get_submodule("1")
    means = images.float().mean(dim=(2, 3)) / 127.5 - 1
    torch.testing.assert_close(norm.running_mean, means.mean(dim=0), rtol=0, atol=1e-4)
    torch.testing.assert_close(norm.running_var, means.var(dim=0), rtol=0.02, atol=0)
