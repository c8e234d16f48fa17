"""Saliency maps: values by hand, which encoders have them, and the comparison of two encoders.

As a script (under torchrun) this file is one rank: it compares two encoders, draws into a folder, prints the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from trainer.data import Dataset
from trainer.distributed import process_group
from trainer.evaluate.saliency import (
    MAPS_FILE,
    SIMILARITY_FILE,
    MappedEncoder,
    SaliencyConfig,
    SaliencyResult,
    Similarities,
    _similarities,
    saliency,
)
from trainer.evaluate.saliency_maps import maps_and_features, saliency_maps, similarity
from trainer.model import EncoderConfig, build_encoder, build_model, save_encoder
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = SaliencyConfig(num_pictures=2, k=5)
SMALL = EncoderConfig(image_size=16, width=8)


def small(config: EncoderConfig = SMALL, seed: int = 0) -> MappedEncoder:
    return MappedEncoder(name="ours", encoder=build_model(config, seed=seed).encoder.eval(), config=config)


def saved(encoder: MappedEncoder, path: Path) -> Path:
    save_encoder(encoder.encoder, encoder.config, path)
    return path


def banded(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of noise with a bright horizontal band, whose height is the class."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (count,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 4 * label : 4 * label + 4] += 150
    return images, labels


def made() -> Dataset:
    (train, train_labels), (test, test_labels) = banded(200, 1), banded(61, 2)
    return Dataset(train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return made()


def compared(
    other: MappedEncoder, dataset: Dataset, directory: Path, config: SaliencyConfig = CONFIG
) -> tuple[SaliencyResult, Similarities]:
    result = saliency(small(), dataset, replace(config, other=saved(other, directory / "other")), directory)
    assert result.similarities is not None
    (directory / "other").unlink()
    return result, result.similarities


# ---- maps


def test_a_map_is_the_norm_over_channels_divided_by_its_sum() -> None:
    activations = torch.tensor([[[[3.0, 0.0], [0.0, -5.0]], [[4.0, 0.0], [5.0, 0.0]]]])  # norms 5, 0, 5, 5
    torch.testing.assert_close(saliency_maps(activations), torch.tensor([[[1 / 3, 0], [1 / 3, 1 / 3]]]))
    assert torch.equal(saliency_maps(torch.zeros(1, 8, 2, 2)), torch.full((1, 2, 2), 0.25))


def test_similarity_is_the_sum_of_minima() -> None:
    one = torch.tensor([[[0.5, 0.25], [0.25, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    other = torch.tensor([[[0.25, 0.0], [0.25, 0.5]], [[0.0, 0.5], [0.5, 0.0]]])
    torch.testing.assert_close(similarity(one, other), torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(similarity(one, one), torch.ones(2))


def test_the_smaller_of_two_maps_is_resized() -> None:
    """Bilinearly, a row 0.25, 0.75 of two values becomes 0.25, 0.375, 0.625, 0.75, divided by their sum of 2."""
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
    def rejected(encoder: nn.Module, config: EncoderConfig, match: str) -> None:
        generated = torch.randint(0, 256, (4, config.in_channels, *[config.image_size] * 2), dtype=torch.uint8)
        dataset = replace(made(), test_images=generated)
        with pytest.raises(ValueError, match=match):
            saliency(MappedEncoder(name="it", encoder=encoder, config=config), dataset, CONFIG, tmp_path)

    vit = EncoderConfig(name="timm:test_vit", in_channels=3, image_size=160)
    rejected(build_encoder(vit), vit, "^it does not average convolutional maps: give a convolutional one, such as")
    tiny = EncoderConfig(name="resnet18", in_channels=3, image_size=32)
    rejected(build_encoder(tiny), tiny, "^it has maps of a single location for 32 px images: give larger images")


# ---- statistics and figures


def test_an_encoder_is_similar_to_itself(dataset: Dataset, tmp_path: Path) -> None:
    result, found = compared(small(), dataset, tmp_path)
    assert found.mean == pytest.approx(1)
    assert found.histogram == [0] * 19 + [61]
    assert found.accuracy is not None
    assert found.accuracy[:19] == [None] * 19
    assert found.accuracy[19] == pytest.approx(result.knn_top1)
    assert found.other_image < 1
    assert result.random < 1


def test_halves_are_of_more_and_less_similar_images() -> None:
    maps = torch.tensor([[[1.0, 0.0]]] * 5)
    others = torch.tensor([[[share, 1 - share]] for share in (0.9, 0.1, 0.5, 0.7, 0.3)])
    found = _similarities(maps, others, torch.tensor([True, False, True, False, False]), bins=2)
    assert found.more_similar_accuracy == 50
    assert found.less_similar_accuracy == pytest.approx(100 / 3)


def test_compares_maps_of_different_sizes_with_accuracy(dataset: Dataset, tmp_path: Path) -> None:
    half_the_size = small(replace(SMALL, stem_stride=2), seed=1)
    result, found = compared(half_the_size, dataset, tmp_path, replace(CONFIG, bins=100))
    assert 0.3 < found.mean < 1
    assert sum(found.histogram) == 61
    assert len(found.histogram) == 100
    mean = sum((number + 0.5) / 100 * count for number, count in enumerate(found.histogram)) / 61
    assert mean == pytest.approx(found.mean, abs=0.005)
    assert found.accuracy is not None
    assert [value is None for value in found.accuracy] == [count == 0 for count in found.histogram]
    total = sum(count * (value or 0) for count, value in zip(found.histogram, found.accuracy, strict=True))
    assert total / 61 == pytest.approx(result.knn_top1)
    assert result.knn_top1 is not None
    assert result.knn_top1 > 60, "the band's height shows even in random features"
    assert found.more_similar_accuracy is not None
    assert found.less_similar_accuracy is not None
    assert found.more_similar_accuracy * 30 + found.less_similar_accuracy * 31 == pytest.approx(61 * result.knn_top1)
    assert {path.name for path in tmp_path.iterdir()} == {MAPS_FILE, SIMILARITY_FILE}
    for path in tmp_path.iterdir():
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"


def test_a_single_encoder_without_labels_has_pictures_alone(dataset: Dataset, tmp_path: Path) -> None:
    none = torch.empty(0, dtype=torch.int64)
    unlabelled = replace(dataset, train_labels=none, test_labels=none)
    result = saliency(small(), unlabelled, replace(CONFIG, pictures=(3, 60, 3)), tmp_path)
    assert (result.similarities, result.knn_top1) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == [MAPS_FILE]
    with Image.open(tmp_path / MAPS_FILE) as image:
        assert image.height > image.width, "three rows of two columns"


def test_rejects_what_does_not_fit(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--pictures has 61, but test images have numbers 0\.\.60"):
        saliency(small(), dataset, replace(CONFIG, pictures=(0, 61)), tmp_path)
    other = saved(small(EncoderConfig()), tmp_path / "other")
    with pytest.raises(ValueError, match="other is for 1-channel 28 px images, but the data set has 1-channel 16 px"):
        saliency(small(), dataset, replace(CONFIG, other=other), tmp_path)
    other.unlink()
    with pytest.raises(ValueError, match=r"cannot read encoder file .*other"):
        saliency(small(), dataset, replace(CONFIG, other=other), tmp_path)
    with pytest.raises(ValueError, match="this data set has no test images: saliency maps are those of test images"):
        saliency(small(), replace(dataset, test_images=torch.empty(0, 1, 16, 16)), CONFIG, tmp_path)
    with pytest.raises(ValueError, match="61 images are fewer than 62 ranks: start fewer ranks"):
        saliency(small(), dataset, CONFIG, tmp_path, Ranks(world_size=62))
    with pytest.raises(ValueError, match="--bins must be at least 1, got 0"):
        SaliencyConfig(bins=0).check()
    assert not list(tmp_path.iterdir())


# ---- ranks


@pytest.mark.guard
def test_two_ranks_have_the_result_of_one(dataset: Dataset, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (one := tmp_path / "one").mkdir()
    (two := tmp_path / "two").mkdir()
    config = replace(CONFIG, other=saved(small(seed=1), tmp_path / "other"))
    expected = saliency(small(), dataset, config, one)
    done = subprocess.run(
        [*command, "-m", "tests.trainer.evaluate.test_saliency", str(two), str(config.other)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found == [found[0]] * 2
    assert found[0]["knn_top1"] == expected.knn_top1
    assert expected.similarities is not None
    similarities, wanted = found[0]["similarities"], asdict(expected.similarities)
    assert similarities["mean"] == pytest.approx(wanted["mean"])
    assert similarities["histogram"] == wanted["histogram"]
    assert {path.name for path in two.iterdir()} == {MAPS_FILE, SIMILARITY_FILE}


if __name__ == "__main__":
    with process_group(torch.device("cpu")) as ranks:
        config = replace(CONFIG, other=Path(sys.argv[2]))
        result = saliency(small(), made(), config, Path(sys.argv[1]), ranks)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")  # at once: ranks share the pipe
