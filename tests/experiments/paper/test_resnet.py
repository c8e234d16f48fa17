"""Stages of a ResNet: the same maps as the whole, a dilated conv5, and encoders that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experiments.paper.resnet import dilate, resnet_stages
from trainer.model import EncoderConfig, build_encoder


def config(name: str, in_channels: int = 3) -> EncoderConfig:
    return EncoderConfig(name=name, image_size=64, in_channels=in_channels)


@pytest.mark.parametrize(("name", "channels"), [("resnet18", (256, 512)), ("timm:resnet26", (1024, 2048))])
def test_stages_compute_what_the_encoder_does(name: str, channels: tuple[int, int]) -> None:
    encoder = build_encoder(config(name)).eval()
    stages = resnet_stages(encoder, config(name))
    images = torch.rand(1, 3, 96, 64)
    maps = stages.backbone(images)
    assert maps.shape == (1, channels[0], 6, 4)
    maps = stages.conv5(maps)
    assert maps.shape == (1, channels[1], 3, 2)
    torch.testing.assert_close(maps.mean(dim=(2, 3)), encoder(images))
    assert (stages.conv4_channels, stages.conv5_channels) == channels
    ours = {parameter.data_ptr() for parameter in stages.conv5.parameters()}
    assert not ours & {parameter.data_ptr() for parameter in encoder.parameters()}


def test_a_dilated_conv5_keeps_the_size_of_its_input() -> None:
    for name in ("resnet18", "resnet50", "resnext50_32x4d"):
        conv5 = resnet_stages(build_encoder(config(name)), config(name)).conv5
        dilate(conv5)
        convs = [module for module in conv5.modules() if isinstance(module, nn.Conv2d)]
        assert {conv.stride for conv in convs} == {(1, 1)}
        assert {conv.dilation for conv in convs if conv.kernel_size == (3, 3)} == {(2, 2)}
        assert {conv.dilation for conv in convs if conv.kernel_size == (1, 1)} == {(1, 1)}
        first = convs[0].in_channels
        assert conv5(torch.rand(1, first, 5, 7)).shape[2:] == (5, 7)


def test_refuses_other_encoders() -> None:
    others = [
        config(name) for name in ("small", "torchvision:mobilenet_v2", "timm:hrnet_w18_small", "timm:resnetv2_50")
    ]
    for other in [*others, config("timm:resnet26", in_channels=1)]:
        with pytest.raises(ValueError, match=f"encoder '{other.name}' is not a ResNet for colour images: give torchv"):
            resnet_stages(build_encoder(other), other)
    conv5 = resnet_stages(build_encoder(config("timm:resnet26d")), config("timm:resnet26d")).conv5
    with pytest.raises(ValueError, match=r"0.downsample.0 \(AvgPool2d\) has a stride, which dilation cannot replace"):
        dilate(conv5)
