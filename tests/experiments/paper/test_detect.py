"""Detection on a tiny tree of Pascal VOC: torchvision's detector on an encoder, its settings, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.paper.detect import (
    _parameter_groups,
    batches,
    detect,
    example,
    learning_rate_factor,
    read_splits,
)
from experiments.paper.detector import build_detector, greedy_nms
from experiments.paper.settings import DetectConfig
from experiments.paper.voc import CLASSES
from tests.helpers import voc_tree
from tests.helpers.evaluations import RESNET, made_evaluation, small_resnet
from tests.trainer.evaluate.test_training import DETECT as CONFIG
from trainer.model import build_encoder
from trainer.torchvision_schemas import import_module
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return voc_tree.tree(tmp_path_factory.mktemp("voc"))


@pytest.mark.slow
def test_tells_a_good_encoder_from_a_broken_one(tmp_path: Path) -> None:
    """The broken one sees nothing: its first convolution is 0, and so are all gradients before it."""
    devkit = voc_tree.tree(tmp_path / "voc", num_train=40, num_test=16)
    config = replace(
        CONFIG,
        iterations=80,
        batch_size=6,
        learning_rate=0.03,
        learning_rate_drops=(60,),
        warmup_iterations=5,
        precise_norm_batches=8,
        train_sides=(72,),
        rois_per_image=16,
        roi_side=2,
        train_proposals=(200, 30),
        test_proposals=(100, 20),
        save_every=1000,
    )
    good, broken = small_resnet(), small_resnet()
    with torch.no_grad():
        for parameter in broken.get_submodule("classifier.conv1").parameters():
            parameter.zero_()
    before = {name: value.clone() for name, value in good.state_dict().items()}
    ap50 = [
        detect(made_evaluation(encoder, tmp_path / name, config=RESNET, data_dir=devkit), config).results["ap50"]
        for name, encoder in (("good", good), ("broken", broken))
    ]
    assert ap50[0] > 70
    assert ap50[1] < 20
    assert all(torch.equal(value, before[name]) for name, value in good.state_dict().items()), "it stays as it is"


def test_the_detector_is_mocos_with_the_encoders_weights() -> None:
    """conv1 to conv4 in front, conv5 with a BatchNorm behind; only BatchNorm has no weight decay."""
    config = replace(RESNET, name="timm:resnet18")
    given = build_encoder(config).eval()
    detector = build_detector(given, config, CONFIG)
    assert torch.equal(detector.backbone.get_parameter("0.0.weight"), given.get_parameter("conv1.weight"))
    head = detector.roi_heads.box_head
    assert torch.equal(head.get_parameter("0.1.bn2.weight"), given.get_parameter("layer4.1.bn2.weight"))
    assert [type(layer).__name__ for layer in head][1:3] == ["BatchNorm2d", "AdaptiveAvgPool2d"]
    images = torch.zeros(1, 3, 64, 96)
    listed = import_module("torchvision.models.detection.image_list").ImageList(images, [(64, 96)])
    (anchors,) = detector.rpn.anchor_generator(listed, [detector.backbone(images)])
    assert torch.allclose(anchors.view(4, 6, 6, 4)[1, 2, 2], torch.tensor([20.0, 4, 44, 28])), "around 32, 16"
    others, norms = _parameter_groups(detector, CONFIG)
    assert (others["weight_decay"], norms["weight_decay"]) == (CONFIG.weight_decay, 0)
    assert len([*others["params"], *norms["params"]]) == len(list(detector.parameters()))
    norm_layers = sum(isinstance(module, nn.BatchNorm2d) for module in detector.modules())
    assert len([*norms["params"]]) == 2 * norm_layers


def test_boxes_are_not_rounded_to_bfloat16() -> None:
    detector = build_detector(small_resnet(), RESNET, CONFIG).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (features,) = detector.backbone(torch.rand(1, 3, 64, 96)).split(1)
        assert features.dtype == torch.bfloat16
        (scores,), (shifts,) = detector.rpn.head([features])
        classes, boxes = detector.roi_heads.box_predictor(torch.rand(2, 512))
    assert {each.dtype for each in (scores, shifts, classes, boxes)} == {torch.float32}


def test_suppresses_boxes_that_overlap_a_better_one() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 5, 10, 15], [20, 20, 30, 30]])
    scores = torch.tensor([0.5, 0.9, 0.8, 0.1])
    assert greedy_nms(boxes, scores, 0.7).tolist() == [1, 2, 3]
    assert greedy_nms(boxes, scores, 0.1).tolist() == [1, 3]
    assert greedy_nms(boxes[:0], scores[:0], 0.5).tolist() == []


def test_the_learning_rate_is_detectron2s() -> None:
    paper = DetectConfig()
    rates = [0.02 * learning_rate_factor(paper, step) for step in (0, 50, 100, 17_999, 18_000, 22_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 0.002, 0.0002])


def test_boxes_and_pixels_change_together(devkit: Path) -> None:
    image = read_splits(devkit, CONFIG)[0][1]
    left, top, right, bottom = image.objects.boxes[0].tolist()
    for is_flipped in (False, True):
        pixels, objects = example(image, is_flipped)
        edges = [image.width - right, top, image.width - left, bottom] if is_flipped else [left, top, right, bottom]
        assert objects["boxes"][0].tolist() == edges
        first, upper, last, lower = (int(edge) for edge in edges)
        inside = pixels[:, upper + 2 : lower - 2, first + 2 : last - 2].float()
        colour = torch.tensor(voc_tree.COLOURS[CLASSES[int(objects["labels"][0]) - 1]])
        assert (inside.mean(dim=(1, 2)) - colour).abs().max() < 15


def test_batches_depend_on_the_step_and_are_of_one_orientation(devkit: Path) -> None:
    images, _ = read_splits(devkit, CONFIG)
    config = replace(CONFIG, batch_size=3)
    whole = list(islice(batches(images, config, Ranks(), 0), 12))
    for batch in whole:
        assert len({pixels.shape[2] > pixels.shape[1] for pixels in batch.images}) == 1
    parts = [next(batches(images, config, Ranks(rank=rank, world_size=2), 7)) for rank in range(2)]
    assert [len(part.images) for part in parts] == [1, 2]
    for pixels, expected in zip((each for part in parts for each in part.images), whole[7].images, strict=True):
        assert torch.equal(pixels, expected)
    assert parts[0].seed == whole[7].seed != parts[1].seed
    assert len({batch.seed for batch in whole}) == 12
    other = next(batches(images, replace(config, seed=1), Ranks(), 0))
    assert other.seed != whole[0].seed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "--iterations must be at least 1, got 0"),
        ({"learning_rate": math.inf}, "--learning-rate must be positive and finite, got inf"),
        ({"learning_rate_drops": (5, 3)}, r"--learning-rate-drops must be steps in ascending order, got \(5, 3\)"),
        ({"train_sides": ()}, r"--train-sides must be one or more positive numbers, got \(\)"),
        ({"train_splits": ()}, "--train-splits must name at least one split"),
    ],
)
def test_rejects_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **settings).check()


def test_rejects_what_makes_no_batch(devkit: Path, tmp_path: Path) -> None:
    alone = made_evaluation(small_resnet(), tmp_path, config=RESNET, data_dir=devkit)
    with pytest.raises(ValueError, match="18 training images make no batch of 19: give a smaller --batch-size"):
        detect(alone, replace(CONFIG, batch_size=19))
    evaluation = made_evaluation(small_resnet(), tmp_path, ranks=Ranks(world_size=4), config=RESNET, data_dir=devkit)
    with pytest.raises(ValueError, match="--batch-size 2 leaves some of 4 ranks without images"):
        detect(evaluation, CONFIG)
