"""Detection on a tiny tree of Pascal VOC: operators, ranks, resumption, and a good encoder told from a broken one.

As a script (under torchrun) this file is one rank: it trains into a state file and writes its results beside it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers import voc_tree
from trainer.distributed import process_group
from trainer.evaluate.detect import DetectConfig, DetectResult, build_detector, detect, objects_of, read_splits
from trainer.evaluate.detection.average_precision import average_precision
from trainer.evaluate.detection.batches import collate
from trainer.evaluate.detection.inference import detect_objects
from trainer.evaluate.detection.network import Detected, FasterRCNN, Size, Target, sample
from trainer.evaluate.detection.operators import _aligned, _greedy, roi_align
from trainer.evaluate.detection.training import DetectorTraining, learning_rate
from trainer.evaluate.detection.voc import CLASSES
from trainer.evaluate.progress import Advance
from trainer.model import EncoderConfig, build_encoder
from trainer.torchvision_schemas import import_module
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
RESNET = EncoderConfig(
    name="torchvision:resnet18", in_channels=3, image_size=64, pixel_mean=(0.5, 0.4, 0.45), pixel_std=(0.25,) * 3
)
CONFIG = DetectConfig(
    iterations=3,
    batch_size=3,
    learning_rate=0.01,
    learning_rate_drops=(2,),
    warmup_iterations=0,
    train_sides=(64, 72),
    test_side=72,
    max_side=100,
    anchor_sides=(24, 32),
    anchors_per_image=32,
    rois_per_image=8,
    roi_side=4,
    train_proposals=(100, 16),
    test_proposals=(60, 12),
    precise_norm_batches=2,
    save_every=1,
)


def encoder(config: EncoderConfig = RESNET) -> nn.Module:
    torch.manual_seed(0)
    return build_encoder(config).eval()


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return voc_tree.tree(tmp_path_factory.mktemp("voc"))


class Stopped(Exception):
    """An evaluation that the test interrupts."""


class Colours(nn.Module):
    """Finds squares by their colours, without any training."""

    def forward(self, images: Tensor, sizes: Sequence[Size]) -> list[Detected]:
        pixels = 255 * (images * torch.tensor(RESNET.pixel_std)[:, None, None])
        pixels += 255 * torch.tensor(RESNET.pixel_mean)[:, None, None]
        return [self._of(image) for image in pixels]

    def _of(self, image: Tensor) -> Detected:
        boxes, labels = [], []
        for name, colour in voc_tree.COLOURS.items():
            for half in (0, image.shape[2] // 2):
                part = image[:, :, half : half + image.shape[2] // 2]
                rows, columns = ((part - torch.tensor(colour)[:, None, None]).abs().amax(0) < 60).nonzero().unbind(1)
                if len(rows) > 50:
                    edges = [columns.min() + half, rows.min(), columns.max() + half + 1, rows.max() + 1]
                    boxes.append(torch.stack(edges).float())
                    labels.append(CLASSES.index(name))
        return Detected(torch.stack(boxes), 1 / torch.arange(2.0, 2 + len(boxes)), torch.tensor(labels))


def of_colours(devkit: Path, ranks: Ranks) -> list[float]:
    _, test = read_splits(devkit, CONFIG)
    found = detect_objects(Colours(), test, RESNET.pixels, CONFIG, ranks)
    precision = average_precision(objects_of(test), found, len(CLASSES))
    return [float(len(found.images)), *precision.by_class[~np.isnan(precision.by_class)].tolist()]


class Watching:
    """Keeps the losses that are shown, and stops the training after `last` of them."""

    def __init__(self, last: int | None = None) -> None:
        self.losses, self.first_step, self._last = list[float](), list[int](), last

    @contextmanager
    def __call__(self, description: str, total: int) -> Iterator[Advance]:
        def advance(n: int = 1, **shown: Tensor) -> None:
            self.losses += [loss.item() for loss in shown.values()]
            if not shown and description == "training":
                self.first_step.append(n)
            if len(self.losses) == self._last:
                raise Stopped

        yield advance


def trained(devkit: Path, state: Path, ranks: Ranks | None = None) -> list[float]:
    """Trains into `state`; returns the losses."""
    watching = Watching()
    detect(encoder(), RESNET, devkit, CONFIG, ranks, state_file=state, progress=watching)
    return watching.losses


@pytest.fixture(scope="module")
def on_one_rank(devkit: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """State file and losses of the training that others must equal."""
    state = tmp_path_factory.mktemp("state") / "state.safetensors"
    return state, trained(devkit, state)


@pytest.mark.guard
def test_two_ranks_have_the_weights_and_the_result_of_one(
    devkit: Path, on_one_rank: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """Batches of three images, and seven test images, are no multiples of two."""
    state, losses = on_one_rank
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.trainer.evaluate.test_detect", str(devkit), str(tmp_path / "state.safetensors")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["colours"] == of_colours(devkit, Ranks())
        assert found["losses"] == pytest.approx(losses, rel=1e-3)
    expected, weights = load_file(state), load_file(tmp_path / "state.safetensors")
    assert expected.keys() == weights.keys()
    for name, value in expected.items():
        difference = (weights[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-3)
        assert difference < 0.01, name


def test_the_colours_of_squares_find_them(devkit: Path) -> None:
    num_found, *precisions = of_colours(devkit, Ranks())
    assert num_found > 7
    assert min(precisions[:5]) > 90, "boxes are in the pixels of the image, whatever its size in the network"


@pytest.mark.guard
def test_resumes_to_the_same_weights(devkit: Path, on_one_rank: tuple[Path, list[float]], tmp_path: Path) -> None:
    state, config = tmp_path / "state.safetensors", replace(CONFIG, save_every=2)
    with pytest.raises(Stopped):
        detect(encoder(), RESNET, devkit, config, state_file=state, progress=Watching(last=2))
    resumed = Watching()
    detect(encoder(), RESNET, devkit, config, state_file=state, progress=resumed)
    assert resumed.first_step == [2]
    assert resumed.losses == on_one_rank[1][2:]
    expected, weights = load_file(on_one_rank[0]), load_file(state)
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())
    with pytest.raises(ValueError, match="is the state of other settings, images or weights: remove it, or use them"):
        detect(encoder(), RESNET, devkit, replace(config, seed=1), state_file=state)


@pytest.mark.slow
def test_tells_a_good_encoder_from_a_broken_one(tmp_path: Path) -> None:
    """The broken one sees nothing: its first convolution is 0, and so are all gradients before it."""
    devkit = voc_tree.tree(tmp_path, num_train=40, num_test=16)
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
    good, broken = encoder(), encoder()
    with torch.no_grad():
        for parameter in broken.get_submodule("classifier.conv1").parameters():
            parameter.zero_()
    assert detect(good, RESNET, devkit, config).ap50 > 70
    assert detect(broken, RESNET, devkit, config).ap50 < 20


@pytest.mark.guard  # seconds
def test_leaves_the_encoder_as_it_is(devkit: Path) -> None:
    given = encoder()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    result = detect(given, RESNET, devkit, replace(CONFIG, iterations=1, precise_norm_batches=0), bfloat16=True)
    assert isinstance(result, DetectResult)
    assert set(result.by_class) == set(voc_tree.COLOURS)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


@pytest.mark.parametrize("name", ["small", "torchvision:mobilenet_v3_small", "timm:vit_tiny_patch16_224"])
def test_rejects_encoders_that_are_not_resnets(name: str) -> None:
    config = EncoderConfig(name=name, in_channels=3, image_size=224 if "vit" in name else 64)
    with pytest.raises(
        ValueError, match=f"encoder '{name}' is not a ResNet for colour images: give torchvision:resnet50"
    ) as caught:
        build_detector(build_encoder(config).eval(), config, CONFIG)
    assert "\n" not in str(caught.value)


def test_takes_a_resnet_of_timm() -> None:
    config = replace(RESNET, name="timm:resnet18")
    given = encoder(config)
    detector, pixels = build_detector(given, config, CONFIG)
    assert pixels == RESNET.pixels
    assert torch.equal(detector.backbone.get_parameter("0.0.weight"), given.get_parameter("conv1.weight"))
    assert torch.equal(
        detector.box_head.conv5.get_parameter("1.bn2.weight"), given.get_parameter("layer4.1.bn2.weight")
    )


@pytest.fixture(scope="module")
def detector() -> FasterRCNN:
    return build_detector(encoder(), RESNET, CONFIG)[0]


def test_losses_of_images_add_up(detector: FasterRCNN) -> None:
    """With fixed statistics of BatchNorm, two images of a size have the losses that each has alone."""
    images = torch.randint(0, 256, (2, 3, 70, 90), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    targets = [
        Target(torch.tensor([[5.0, 5, 40, 45]]), torch.tensor([3]), 1),
        Target(torch.tensor([[30.0, 5, 60, 45], [1, 1, 9, 70]]), torch.tensor([19, 0]), 2),
    ]
    batch = collate(list(images), (70, 90), RESNET.pixels, torch.device("cpu"))
    detector.train()
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    together = detector(batch, [(70, 90)] * 2, targets)
    parts = [detector(batch[[place]], [(70, 90)], [targets[place]]) for place in range(2)]
    assert together.num_regions == sum(part.num_regions for part in parts) == 2 * CONFIG.rois_per_image
    assert together.anchors.item() == pytest.approx(sum(part.anchors.item() for part in parts), rel=1e-4)
    assert together.regions.item() == pytest.approx(sum(part.regions.item() for part in parts), rel=1e-4)


def test_boxes_stay_on_the_image_and_are_bounded(detector: FasterRCNN) -> None:
    config = replace(CONFIG, test_proposals=(30, 9))
    net, _ = build_detector(encoder(), RESNET, config)
    net.eval()
    with torch.no_grad():
        net.box_head.classes.weight.mul_(1000)
        features = net.backbone(torch.randn(1, 3, 72, 96))
        [proposed], _ = net.proposals(features, [(72, 90)], None)
        [found] = net(torch.randn(1, 3, 72, 96), [(72, 90)])
    assert 0 < len(proposed) <= 9
    for boxes in (proposed, found.boxes):
        assert bool((boxes >= 0).all())
        assert bool((boxes <= torch.tensor([90, 72, 90, 72])).all())
    assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    assert len(found.scores) <= 100


def test_anchors_are_centred_on_features(detector: FasterRCNN) -> None:
    anchors = detector.proposals.anchors(2, 3, torch.device("cpu")).view(2, 3, 6, 4)
    assert anchors[1, 2, 1].tolist() == [32 - 12, 16 - 12, 32 + 12, 16 + 12]
    sides = anchors[..., 2:] - anchors[..., :2]
    assert torch.allclose(sides.prod(-1)[0, 0], torch.tensor([24.0**2] * 3 + [32.0**2] * 3))
    assert torch.allclose((sides[..., 1] / sides[..., 0])[0, 0], torch.tensor([0.5, 1, 2] * 2))


def test_samples_depend_on_the_seed_alone() -> None:
    positive = torch.arange(50) < 10
    for number, most, expected in ((8, 4, (4, 4)), (30, 20, (10, 20)), (100, 50, (10, 40))):
        first, second = sample(positive, ~positive, number, most, 3), sample(positive, ~positive, number, most, 3)
        assert (len(first[0]), len(first[1])) == expected
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        assert bool(positive[first[0]].all())
        assert not bool(positive[first[1]].any())
        assert len(set(first[1].tolist())) == len(first[1])
    assert not torch.equal(sample(positive, ~positive, 8, 4, 4)[1], sample(positive, ~positive, 8, 4, 3)[1])


def test_suppresses_boxes_that_overlap_a_better_one() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 5, 10, 15], [20, 20, 30, 30]])
    scores = torch.tensor([0.5, 0.9, 0.8, 0.1])
    assert _greedy(boxes, scores, 0.7).tolist() == [1, 2, 3]
    assert _greedy(boxes, scores, 0.1).tolist() == [1, 3]
    assert _greedy(boxes[:0], scores[:0], 0.5).tolist() == []


@pytest.mark.slow
def test_roi_align_equals_torchvisions() -> None:
    """torchvision's own reference, which computes every sample of every bin."""
    reference = import_module("torchvision.ops.roi_align")._roi_align
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, 3, 9, 12, generator=generator)
    corners = torch.rand(7, 4, generator=generator) * torch.tensor([150.0, 100, 60, 60]) - 10
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:].clamp(min=0)], dim=1)
    boxes = torch.cat([boxes, torch.tensor([[0.0, 0, 192, 144]])])
    parts = [boxes[:3], boxes[3:]]
    indexes = torch.tensor([0.0] * 3 + [1.0] * 5)
    expected = reference.__wrapped__(maps, torch.cat([indexes[:, None], boxes], 1), 1 / 16, 4, 4, -1, True)
    ours = torch.cat([_aligned(image, part / 16 - 0.5, 4) for image, part in zip(maps, parts, strict=True)])
    assert torch.allclose(ours, expected, atol=1e-5)
    assert torch.allclose(roi_align(maps, parts, 4, 1 / 16), expected, atol=1e-5)
    assert roi_align(maps, [boxes[:0], boxes[:0]], 4, 1 / 16).shape == (0, 3, 4, 4)


def test_the_learning_rate_is_detectron2s() -> None:
    paper = DetectConfig()
    rates = [learning_rate(paper, step) for step in (0, 50, 100, 17_999, 18_000, 22_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 0.002, 0.0002])


def test_batch_norm_has_no_weight_decay(detector: FasterRCNN) -> None:
    training = DetectorTraining(detector, RESNET.pixels, CONFIG, Ranks())
    others, norms = training._optimizer.param_groups
    assert (others["weight_decay"], norms["weight_decay"]) == (CONFIG.weight_decay, 0)
    assert len(others["params"]) + len(norms["params"]) == len(list(detector.parameters()))
    assert all(parameter.ndim == 1 for parameter in norms["params"])
    assert len(norms["params"]) == 2 * sum(isinstance(module, nn.BatchNorm2d) for module in detector.modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "--iterations must be at least 1, got 0"),
        ({"roi_side": 1}, "--roi-side must be at least 2, got 1"),
        ({"learning_rate": math.inf}, "--learning-rate must be positive and finite, got inf"),
        ({"weight_decay": -1.0}, "--weight-decay must be finite and not negative, got -1.0"),
        ({"learning_rate_drops": (5, 3)}, r"--learning-rate-drops must be steps in ascending order, got \(5, 3\)"),
        ({"train_sides": ()}, r"--train-sides must be one or more positive numbers, got \(\)"),
        ({"train_splits": ()}, "--train-splits must name at least one split"),
    ],
)
def test_rejects_settings(settings: dict[str, object], message: str) -> None:
    changed: Any = settings
    with pytest.raises(ValueError, match=message):
        detect(encoder(), RESNET, Path("unread"), replace(CONFIG, **changed))


def test_rejects_fewer_images_than_ranks_and_a_divergent_loss(devkit: Path, detector: FasterRCNN) -> None:
    with pytest.raises(
        ValueError, match="a batch of 3 images has none for some of 4 ranks: give a larger --batch-size"
    ):
        DetectorTraining(detector, RESNET.pixels, CONFIG, Ranks(world_size=4))
    with pytest.raises(ValueError, match=r"the loss of step \d is (nan|inf): give a lower --learning-rate"):
        detect(encoder(), RESNET, devkit, replace(CONFIG, learning_rate=1e30))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group(torch.device("cpu")) as ranks:
        found = {"losses": trained(Path(sys.argv[1]), Path(sys.argv[2]), ranks)}
        found["colours"] = of_colours(Path(sys.argv[1]), ranks)
        Path(sys.argv[2]).with_name(f"{ranks.rank}.json").write_text(json.dumps(found))
