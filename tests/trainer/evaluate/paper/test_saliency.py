"""Saliency maps: values by hand, which encoders have them, and the comparison of two encoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.helpers.evaluations import made_dataset, made_evaluation
from trainer.data import Dataset
from trainer.evaluate.evaluation import Outcome
from trainer.evaluate.paper.saliency import MAPS_FILE, SIMILARITY_FILE, by_similarity, saliency
from trainer.evaluate.paper.saliency_maps import maps_and_features, saliency_maps, similarity, to_sum_one
from trainer.evaluate.paper.settings import SaliencyConfig
from trainer.model import EncoderConfig, build_encoder, build_model, save_encoder
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = SaliencyConfig(num_pictures=2, k=5)
SMALL = EncoderConfig(image_size=16, width=8)


def small(config: EncoderConfig = SMALL, seed: int = 0) -> nn.Module:
    return build_model(config, seed=seed).encoder.eval()


def saved(path: Path, config: EncoderConfig = SMALL, seed: int = 0) -> Path:
    save_encoder(small(config, seed), config, path)
    return path


def mapped(
    directory: Path,
    config: SaliencyConfig = CONFIG,
    dataset: Dataset | None = None,
    encoder: tuple[nn.Module, EncoderConfig] | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Figures are written into `directory`."""
    network, encoder_config = encoder or (small(), SMALL)
    return saliency(made_evaluation(network, directory / "state", dataset, ranks, config=encoder_config), config)


# ---- maps


def test_a_map_is_the_norm_over_channels_divided_by_its_sum() -> None:
    activations = torch.tensor([[[[3.0, 0.0], [0.0, -5.0]], [[4.0, 0.0], [5.0, 0.0]]]])  # norms 5, 0, 5, 5
    torch.testing.assert_close(saliency_maps(activations), torch.tensor([[[1 / 3, 0], [1 / 3, 1 / 3]]]))
    assert torch.equal(saliency_maps(torch.zeros(1, 8, 2, 2)), torch.full((1, 2, 2), 0.25))


def test_similarity_is_the_sum_of_minima_at_the_larger_size() -> None:
    """Bilinearly, a row 0.25, 0.75 of two values becomes 0.25, 0.375, 0.625, 0.75, divided by their sum of 2."""
    equal = to_sum_one(torch.rand(2, 3, 5))
    torch.testing.assert_close(similarity(equal, equal), torch.ones(2))
    one = torch.tensor([[[0.25, 0.75]]])
    other = torch.tensor([[[0.5, 0.0, 0.0, 0.5]]])
    torch.testing.assert_close(similarity(one, other), torch.tensor([0.125 + 0.375]))
    torch.testing.assert_close(similarity(other, one), torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("name", "layer", "channels"),
    [
        ("resnet18", "classifier.layer4", 512),
        ("timm:resnet26", "layer4", 2048),
        ("timm:convnext_atto", "stages", 320),
        ("small", "stages", 128),
    ],
)
def test_maps_are_the_last_before_pooling(name: str, layer: str, channels: int) -> None:
    encoder = build_encoder(EncoderConfig(name=name, in_channels=3, image_size=64)).eval()
    seen = list[Tensor]()
    encoder.get_submodule(layer).register_forward_hook(lambda module, inputs, output: seen.append(output))
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        maps, features = maps_and_features(encoder, images)
        assert torch.equal(features, encoder(images))
    assert maps.shape[:2] == (2, channels)
    assert torch.equal(maps, seen[0])
    assert not [module for module in encoder.modules() if module._forward_pre_hooks], "no hook is left"


def test_rejects_encoders_without_maps(tmp_path: Path) -> None:
    vit = EncoderConfig(name="timm:test_vit", in_channels=3, image_size=160)
    tiny = EncoderConfig(name="resnet18", in_channels=3, image_size=32)
    for config, message in (
        (vit, "^made does not average convolutional maps: give a convolutional one, such as"),
        (tiny, "^made has maps of a single location for 32 px images: give larger images"),
    ):
        images = torch.randint(0, 256, (4, config.in_channels, *[config.image_size] * 2), dtype=torch.uint8)
        dataset = replace(made_dataset(), test_images=images)
        with pytest.raises(ValueError, match=message):
            mapped(tmp_path, CONFIG, dataset, (build_encoder(config).eval(), config))


# ---- statistics and figures


def test_compares_maps_of_different_sizes_with_accuracy(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", replace(SMALL, stem_stride=2), seed=1)
    found = mapped(tmp_path, replace(CONFIG, bins=100, other=other))
    assert 0.3 < found.results["similarity"] < 1
    histogram, accuracy = found.details["histogram"], found.details["accuracy"]
    assert (sum(histogram), len(histogram)) == (61, 100)
    mean = sum((number + 0.5) / 100 * count for number, count in enumerate(histogram)) / 61
    assert mean == pytest.approx(found.results["similarity"], abs=0.005)
    assert [value is None for value in accuracy] == [count == 0 for count in histogram]
    total = sum(count * (value or 0) for count, value in zip(histogram, accuracy, strict=True))
    assert total / 61 == pytest.approx(found.results["knn_top1"])
    assert found.results["knn_top1"] > 60, "the band's height shows even in random features"
    assert {path.name for path in tmp_path.iterdir()} == {MAPS_FILE, SIMILARITY_FILE, "other", "state"}
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"


def test_without_labels_there_is_no_accuracy() -> None:
    assert by_similarity(torch.tensor([0.1, 0.9, 1.0]), None, 2) == {"histogram": [1, 2], "accuracy": None}


def test_a_single_encoder_without_labels_has_pictures_alone(tmp_path: Path) -> None:
    none = torch.empty(0, dtype=torch.int64)
    unlabelled = replace(made_dataset(), train_labels=none, test_labels=none)
    result = mapped(tmp_path, replace(CONFIG, pictures=(3, 60, 3)), unlabelled)
    assert (result.results, [*result.details]) == ({}, ["random"])
    assert [path.name for path in tmp_path.glob("*.png")] == [MAPS_FILE]
    with Image.open(tmp_path / MAPS_FILE) as image:
        assert image.height > image.width, "three rows of two columns"


def test_rejects_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--pictures has 61, but test images have numbers 0\.\.60"):
        mapped(tmp_path, replace(CONFIG, pictures=(0, 61)))
    other = saved(tmp_path / "other", EncoderConfig())
    with pytest.raises(ValueError, match="other is for 1-channel 28 px images, but the data set has 1-channel 16 px"):
        mapped(tmp_path, replace(CONFIG, other=other))
    other.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*other"):
        mapped(tmp_path, replace(CONFIG, other=other))
    with pytest.raises(ValueError, match="this data set has no test images: saliency maps are those of test images"):
        mapped(tmp_path, dataset=replace(made_dataset(), test_images=torch.empty(0, 1, 16, 16)))
    with pytest.raises(ValueError, match="61 images are fewer than 62 ranks: start fewer ranks"):
        mapped(tmp_path, ranks=Ranks(world_size=62))
    with pytest.raises(ValueError, match="--bins must be at least 1, got 0"):
        SaliencyConfig(bins=0).check()
    assert not list(tmp_path.glob("*.png"))
