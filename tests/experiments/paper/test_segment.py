"""Semantic segmentation on a tiny Cityscapes: crops, upsampled logits, the metric, learning, and damaged data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from experiments.paper.__main__ import main
from experiments.paper.cityscapes import IGNORED, LabelledImage, class_names, list_split, read_labels, read_pair
from experiments.paper.crops import RandomCrops, crops_ahead
from experiments.paper.fcn import FCN, upsample
from experiments.paper.resnet import resnet_stages
from experiments.paper.segment import intersection_over_union, segment
from experiments.paper.settings import SegmentConfig
from tests.helpers.evaluations import RESNET, made_evaluation, small_resnet
from tests.helpers.made_cityscapes import COLOURS, file_names, make_cityscapes
from trainer.data.pixels import IMAGENET
from trainer.evaluate.evaluation import Outcome
from trainer.model import EncoderConfig, build_encoder, save_encoder
from trainer.torchvision_schemas import import_module
from weightserver.core.arrays import Float32Array
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
CLASS_OF_ID = {7: 0, 23: 10, 26: 13, 0: IGNORED}
CONFIG = SegmentConfig(iterations=3, batch_size=3, crop_size=33, learning_rate=0.05)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_cityscapes(tmp_path)


def segmented(
    directory: Path, config: SegmentConfig = CONFIG, encoder: nn.Module | None = None, ranks: Ranks | None = None
) -> Outcome:
    state = directory / f"state-{len(list(directory.iterdir()))}"
    evaluation = made_evaluation(encoder or small_resnet(), state, ranks=ranks, config=RESNET, data_dir=directory)
    return segment(evaluation, config)


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
    cropped, of_crop = crops(scales=(1.0, 1.0)).crop(pair, uniforms(0.3, 0.5, 0.999, 0.5))
    np.testing.assert_array_equal(cropped.transpose(1, 2, 0), pixels[12:52, 56:96])
    np.testing.assert_array_equal(of_crop, labels[12:52, 56:96])
    flipped, of_flipped = crops(scales=(1.0, 1.0)).crop(pair, uniforms(0.3, 0.5, 0.999, 0.49))
    np.testing.assert_array_equal(flipped, cropped[:, :, ::-1])
    np.testing.assert_array_equal(of_flipped, of_crop[:, ::-1])


def test_a_smaller_scaled_image_is_padded(directory: Path) -> None:
    pair = list_split(directory, "train")[0]
    pixels, labels = crops(side=64).crop(pair, uniforms(0, 0.9, 0.9, 0.9))  # scaled to 48 × 32
    assert (labels[32:] == IGNORED).all()
    assert (labels[:, 48:] == IGNORED).all()
    assert (pixels[:, 32:].reshape(3, -1) == [[1], [2], [3]]).all()
    assert (labels[1:32, :48] != IGNORED).all()


def test_labels_stay_on_their_pixels_at_every_scale(directory: Path) -> None:
    generator, colours = np.random.default_rng(0), np.zeros((256, 3), np.int64)
    for label, colour in COLOURS.items():
        colours[CLASS_OF_ID[label]] = colour
    for pair in list_split(directory, "train"):
        pixels, labels = crops().crop(pair, generator.random(4, dtype=np.float32))
        inside = pixels.max(axis=0) > 3  # not padding
        nearest = np.abs(pixels.transpose(1, 2, 0) - colours[labels] - 20).max(axis=2)
        assert (nearest < 60)[inside].mean() > 0.93, "all but the borders of regions"


def test_batches_depend_on_seed_and_step_alone(directory: Path) -> None:
    def batches(steps: range, ranks: Ranks, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        images = list_split(directory, "train")
        return list(crops_ahead(images, crops(), 4, ranks, seed=seed, steps=steps))

    whole = batches(range(5), Ranks())
    assert [pixels.shape for pixels, _ in whole] == [(4, 3, 40, 40)] * 5
    for (pixels, labels), (resumed_pixels, resumed_labels) in zip(
        whole[3:], batches(range(3, 5), Ranks(rank=1, world_size=2)), strict=True
    ):
        assert torch.equal(pixels[2:], resumed_pixels)
        assert torch.equal(labels[2:], resumed_labels)
    assert not torch.equal(whole[0][0], batches(range(1), Ranks(), seed=1)[0][0])


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


# ---- the metric


class Constant(nn.Module):
    """Takes all pixels for one class."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot(torch.full((1, 5, 7), self.number), 19).permute(0, 3, 1, 2).float()


def test_intersection_over_union_counts_pixels_of_all_images(directory: Path, tmp_path: Path) -> None:
    images = list_split(directory, "val")
    labels = torch.from_numpy(np.stack([read_labels(pair.label) for pair in images])).long()
    evaluation = made_evaluation(small_resnet(), tmp_path / "state")
    iou = intersection_over_union(Constant(0), images, IMAGENET, evaluation)
    road = 100 * (labels == 0).sum().item() / (labels != IGNORED).sum().item()
    assert iou[[0, 10, 13]].tolist() == pytest.approx([road, 0, 0])
    library = import_module("torchmetrics.functional.classification").multiclass_jaccard_index
    expected = 100 * library(labels * 0, labels, 19, ignore_index=IGNORED).item()
    assert iou[~iou.isnan()].mean().item() == pytest.approx(expected), "three classes occur"
    assert intersection_over_union(Constant(0), [], IMAGENET, evaluation).isnan().all()


# ---- learning, and what is refused


@pytest.mark.guard
def test_learns_regions_by_their_colour_except_from_a_dead_encoder(directory: Path) -> None:
    config = replace(CONFIG, iterations=12, batch_size=4, crop_size=65)
    encoder = small_resnet()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    result = segmented(directory, config, encoder)
    assert result.results["miou"] > 65
    assert {name for name, value in result.details["iou"].items() if value} >= {"road", "sky", "car"}
    assert result.details["iou"]["bus"] is None
    assert (result.details["num_train_images"], result.details["num_val_images"]) == (6, 3)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items()), "it is copied"
    for parameter in encoder.parameters():
        nn.init.zeros_(parameter)
    assert segmented(directory, config, encoder).results["miou"] < 40


# ---- what is damaged


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def relabelled(path: Path) -> None:
    ids = np.array(Image.open(path))
    ids[5, 7] = 34
    Image.fromarray(ids).save(path)


def smaller(path: Path) -> None:
    Image.fromarray(np.array(Image.open(path))[:, 1:]).save(path)


def coloured(path: Path) -> None:
    Image.open(path).convert("RGB").save(path)


IMAGE, LABEL = 0, 1


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        (IMAGE, truncated, r"ulm_000001_000019_leftImg8bit.png is not a complete PNG image \(image file is trunc"),
        (LABEL, Path.unlink, r"ulm_000001_000019_gtFine_labelIds.png is not a complete PNG image \(.*No such"),
        (LABEL, relabelled, "labelIds.png has other label ids than Cityscapes' 0..33: restore it"),
        (LABEL, coloured, "labelIds.png has other label ids than Cityscapes' 0..33: restore it"),
        (IMAGE, smaller, "labelIds.png is not of the size of its image: restore both from"),
    ],
)
def test_rejects_damaged_data(directory: Path, kind: int, damage: Callable[[Path], object], message: str) -> None:
    pair = file_names(directory, "val", 1)
    damage(pair[kind])
    with pytest.raises(ValueError, match=message) as caught:
        read_pair(LabelledImage(*pair))
    assert "\n" not in str(caught.value)


def test_rejects_missing_folders(directory: Path) -> None:
    (directory / "gtFine/val").rename(directory / "gtFine/other")
    with pytest.raises(
        ValueError, match=r"has no whole leftImg8bit/val and gtFine/val \(.*: extract Cityscapes'"
    ) as found:
        segmented(directory)
    assert "\n" not in str(found.value)
    (directory / "gtFine/other").rename(directory / "gtFine/val")
    (directory / "leftImg8bit/val").rename(directory / "leftImg8bit/other")
    (directory / "leftImg8bit/val").mkdir()
    with pytest.raises(ValueError, match="leftImg8bit/val has no images: extract Cityscapes' archives again"):
        segmented(directory)


# ---- the command


@pytest.mark.guard  # seconds
def test_the_command_writes_and_prints_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EncoderConfig(name="resnet18", in_channels=3, image_size=64)
    save_encoder(build_encoder(config), config, tmp_path / "resnet.safetensors")
    subject = ["--encoder", str(tmp_path / "resnet.safetensors"), "--output", str(tmp_path / "results")]
    short = ["--iterations", "1", "--batch-size", "2", "--crop-size", "33"]
    place = ["--data-dir", str(make_cityscapes(tmp_path, num_val=1))]
    assert main(["segment", *subject, *place, *short]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 <= result["miou"] <= 100
    assert set(result["iou"]) > {"road", "car"}
    with pytest.raises(SystemExit, match="2"):
        main(["segment", *subject, *short])
    assert "experiments.paper: --data-dir is missing: give the folder of Cityscapes" in capsys.readouterr().err
