"""The evaluation for Detectron2: its weights, its configuration and, where it is installed, its network."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from trainer.evaluate.detect import DetectConfig, write_detectron2
from trainer.model import EncoderConfig, build_encoder

RESNET = EncoderConfig(
    name="torchvision:resnet50", in_channels=3, image_size=64, pixel_mean=(0.5, 0.4, 0.45), pixel_std=(0.25,) * 3
)


def encoder(config: EncoderConfig = RESNET) -> nn.Module:
    torch.manual_seed(0)
    return build_encoder(config).eval()


@pytest.mark.slow
def test_writes_the_papers_settings(tmp_path: Path) -> None:
    given = encoder()
    files = write_detectron2(given, RESNET, DetectConfig(weight_decay=1e-5), tmp_path / "d2")
    assert [file.name for file in files] == ["encoder.safetensors", "detector.yaml", "train.py"]
    weights = load_file(files[0])
    assert torch.equal(weights["res5.0.conv1.weight"], given.get_parameter("classifier.layer4.0.conv1.weight"))
    settings: dict[str, Any] = yaml.safe_load(files[1].read_text())
    assert settings["MODEL"]["PIXEL_MEAN"] == [127.5, 102.0, 114.75]
    assert settings["MODEL"]["RESNETS"] == {
        "DEPTH": 50, "NUM_GROUPS": 1, "WIDTH_PER_GROUP": 64, "STRIDE_IN_1X1": False, "NORM": "SyncBN"
    }  # fmt: skip
    assert settings["MODEL"]["RPN"]["PRE_NMS_TOPK_TRAIN"] == 12_000
    assert settings["INPUT"]["MIN_SIZE_TRAIN"] == list(range(480, 801, 32))
    assert settings["DATASETS"] == {"TRAIN": ["voc_2007_trainval", "voc_2012_trainval"], "TEST": ["voc_2007_test"]}
    solver = settings["SOLVER"]
    assert (solver["MAX_ITER"], solver["STEPS"], solver["IMS_PER_BATCH"]) == (24_000, [18_000, 22_000], 16)
    assert (solver["BASE_LR"], solver["WEIGHT_DECAY"], solver["WARMUP_ITERS"]) == (0.02, 1e-5, 100)
    compile(files[2].read_text(), "train.py", "exec")
    with pytest.raises(ValueError, match="d2"):
        write_detectron2(given, RESNET, DetectConfig(), tmp_path / "d2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:resnet18", "Detectron2's box head has no blocks of 'torchvision:resnet18': omit --detectron2"),
        ("torchvision:mobilenet_v3_small", "detectron2 has no counterpart of 'torchvision:mobilenet_v3_small'"),
    ],
)
def test_rejects_other_encoders(name: str, message: str, tmp_path: Path) -> None:
    config = replace(RESNET, name=name)
    with pytest.raises(ValueError, match=message):
        write_detectron2(encoder(config), config, DetectConfig(), tmp_path / "d2")
    assert not (tmp_path / "d2").exists()


def test_detectron2_itself(tmp_path: Path) -> None:
    config = pytest.importorskip("detectron2.config", reason="detectron2 is not installed").get_cfg()
    _, settings, program = write_detectron2(encoder(), RESNET, DetectConfig(), tmp_path / "d2")
    config.merge_from_file(str(settings))
    config.merge_from_list(["MODEL.DEVICE", "cpu"])
    model = runpy.run_path(str(program))["Trainer"].build_model(config)
    assert model.roi_heads.res5.norm.num_features == 2048
    expected = encoder().get_parameter("classifier.layer4.2.conv3.weight")
    assert torch.equal(model.roi_heads.res5.get_parameter("2.conv3.weight"), expected)
