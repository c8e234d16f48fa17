"""Parts of the segmentation protocol: random crops, upsampled logits, and intersection over union."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.helpers.made_cityscapes import COLOURS, file_names, make_cityscapes
from trainer.data.pixels import IMAGENET
from trainer.evaluate.progress import no_progress
from trainer.evaluate.resnet import resnet_stages
from trainer.evaluate.segment import _Segmenter
from trainer.evaluate.segmentation.cityscapes import IGNORED, class_names, list_split, read_labels
from trainer.evaluate.segmentation.crops import CropBatches, RandomCrops
from trainer.evaluate.segmentation.network import FCN, predict, upsample
from trainer.model import EncoderConfig, build_encoder
from trainer.torchvision_schemas import import_module
from weightserver.core.arrays import Float32Array
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CLASS_OF_ID = {7: 0, 23: 10, 26: 13, 0: IGNORED}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cityscapes(tmp_path_factory.mktemp("cityscapes"))


def crops(side: int = 40, scales: tuple[float, float] = (0.5, 2.0)) -> RandomCrops:
    return RandomCrops(side=side, scales=scales, fill=(1, 2, 3))


def uniforms(*numbers: float) -> Float32Array:
    return np.array(numbers, np.float32)


# ---- labels and crops


def test_labels_are_the_19_evaluated_classes(directory: Path) -> None:
    assert len(class_names()) == 19
    assert {(name, class_names().index(name)) for name in ("road", "sky", "car", "bicycle")} == {
        ("road", 0),
        ("sky", 10),
        ("car", 13),
        ("bicycle", 18),
    }
    pair = list_split(directory, "val")[1]
    assert pair == file_names(directory, "val", 1)
    ids, labels = np.array(Image.open(pair.label)), read_labels(pair.label)
    assert {(int(i), int(label)) for i, label in zip(ids.flat, labels.flat, strict=True)} == set(CLASS_OF_ID.items())


def test_a_crop_at_scale_1_is_a_part_of_the_image(directory: Path) -> None:
    pair = list_split(directory, "train")[0]
    pixels, labels = np.array(Image.open(pair.image)), read_labels(pair.label)
    crop = crops(scales=(1.0, 1.0)).crop(pair, uniforms(0.3, 0.5, 0.999, 0.5))
    np.testing.assert_array_equal(crop.pixels.transpose(1, 2, 0), pixels[12:52, 56:96])
    np.testing.assert_array_equal(crop.labels, labels[12:52, 56:96])
    flipped = crops(scales=(1.0, 1.0)).crop(pair, uniforms(0.3, 0.5, 0.999, 0.49))
    np.testing.assert_array_equal(flipped.pixels, crop.pixels[:, :, ::-1])
    np.testing.assert_array_equal(flipped.labels, crop.labels[:, ::-1])


def test_a_smaller_scaled_image_is_padded(directory: Path) -> None:
    pair = list_split(directory, "train")[0]
    crop = crops(side=64).crop(pair, uniforms(0, 0.9, 0.9, 0.9))  # scaled to 48 × 32
    assert (crop.labels[32:] == IGNORED).all()
    assert (crop.labels[:, 48:] == IGNORED).all()
    assert (crop.pixels[:, 32:].reshape(3, -1) == [[1], [2], [3]]).all()
    assert (crop.labels[1:32, :48] != IGNORED).all()


def test_labels_stay_on_their_pixels_at_every_scale(directory: Path) -> None:
    generator, colours = np.random.default_rng(0), np.zeros((256, 3), np.int64)
    for label, colour in COLOURS.items():
        colours[CLASS_OF_ID[label]] = colour
    for pair in list_split(directory, "train"):
        crop = crops().crop(pair, generator.random(4, dtype=np.float32))
        inside = crop.pixels.max(axis=0) > 3  # not padding
        nearest = np.abs(crop.pixels.transpose(1, 2, 0) - colours[crop.labels] - 20).max(axis=2)
        assert (nearest < 60)[inside].mean() > 0.93, "all but the borders of regions"


def test_batches_depend_on_seed_and_step_alone(directory: Path) -> None:
    def batches(steps: range, share: slice, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        images = list_split(directory, "train")
        return list(CropBatches(images=images, crops=crops(), batch_size=4, share=share, seed=seed).ahead(steps))

    whole = batches(range(5), slice(0, 4))
    assert [pixels.shape for pixels, _ in whole] == [(4, 3, 40, 40)] * 5
    for (pixels, labels), (resumed_pixels, resumed_labels) in zip(
        whole[3:], batches(range(3, 5), slice(1, 4)), strict=True
    ):
        assert torch.equal(pixels[1:], resumed_pixels)
        assert torch.equal(labels[1:], resumed_labels)
    assert not torch.equal(whole[0][0], batches(range(1), slice(0, 4), seed=1)[0][0])


# ---- network


@pytest.fixture(scope="module")
def network() -> FCN:
    config = EncoderConfig(name="resnet18", in_channels=3, image_size=64)
    return FCN(resnet_stages(build_encoder(config), config), 19).eval()


def test_logits_are_at_every_16th_pixel(network: FCN) -> None:
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 49, 65)).shape == (1, 19, 4, 5)
        assert network(torch.zeros(1, 3, 50, 80)).shape == (1, 19, 5, 6)
    logits = torch.randn(2, 19, 4, 5)
    upsampled = upsample(logits, 49, 65)
    torch.testing.assert_close(upsampled[..., ::16, ::16], logits)
    torch.testing.assert_close(upsampled[..., 8, 16], (logits[..., 0, 1] + logits[..., 1, 1]) / 2)
    torch.testing.assert_close(upsample(logits, 40, 50), upsampled[..., :40, :50])
    head = [
        (conv.kernel_size, conv.dilation, conv.out_channels) for conv in network.head if isinstance(conv, nn.Conv2d)
    ]
    assert head == [((3, 3), (6, 6), 256)] * 2 + [((1, 1), (1, 1), 19)]


def test_classes_are_those_of_the_largest_upsampled_logits() -> None:
    logits = torch.randn(19, 4, 5)
    torch.testing.assert_close(predict(logits, 40, 50), upsample(logits[None], 40, 50)[0].argmax(dim=0).byte())


# ---- the metric


class Constant(nn.Module):
    """Takes all pixels for one class."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.full((1, 5, 7), self.number), 19).permute(0, 3, 1, 2).float()


def test_intersection_over_union_counts_pixels_of_all_images(directory: Path) -> None:
    images = list_split(directory, "val")
    labels = torch.from_numpy(np.stack([read_labels(pair.label) for pair in images])).long()
    labelled = (labels != IGNORED).sum().item()
    segmenter = _Segmenter(Constant(0), IMAGENET, Ranks(), bfloat16=False)
    miou, iou = segmenter.intersection_over_union(images, no_progress)
    road = 100 * (labels == 0).sum().item() / labelled
    assert [iou[number] for number in (0, 10, 13)] == pytest.approx([road, 0, 0])
    assert miou == pytest.approx(road / 3), "three classes occur"
    assert iou[1] is None
    library = import_module("torchmetrics.functional.classification").multiclass_jaccard_index
    assert miou == pytest.approx(100 * library(labels * 0, labels, 19, ignore_index=IGNORED).item())
    none = [segmenter.intersection_over_union([], no_progress)[1]]
    assert none == [[None] * 19]
