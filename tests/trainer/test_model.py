"""Encoders, head and encoder files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.model import (
    EncoderConfig,
    SmallResNet,
    _BasicBlock,
    build_encoder,
    build_model,
    load_encoder,
    save_encoder,
)

SMALL = EncoderConfig(width=8, blocks=(1, 2), stem_stride=2, pool_size=2)


@pytest.mark.parametrize(
    ("config", "feature_dim"),
    [
        (EncoderConfig(width=8), 32),
        (SMALL, 16 * 2 * 2),
        (EncoderConfig(width=8, in_channels=3, image_size=64), 32),
        (EncoderConfig(name="timm:resnet10t"), 512),
        (EncoderConfig(name="resnet18"), 512),
        (EncoderConfig(name="torchvision:resnet18", in_channels=3, image_size=64), 512),
    ],
)
def test_shapes_from_images_to_embeddings(config: EncoderConfig, feature_dim: int) -> None:
    model = build_model(config, dim=16, seed=0)
    images = torch.randn(4, config.in_channels, config.image_size, config.image_size)
    assert model.encoder(images).shape == (4, feature_dim)
    assert model(images).shape == (4, 16)
    linear, relu, last = model.head  # no BatchNorm in the head
    assert (linear.in_features, linear.out_features, last.out_features) == (feature_dim, feature_dim, 16)
    assert isinstance(relu, torch.nn.ReLU)


def test_weights_are_a_function_of_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first = build_model(SMALL, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(7)
    again, other = build_model(SMALL, seed=3).state_dict(), build_model(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.0.weight"], other["head.0.weight"])


def test_a_block_starts_as_its_shortcut() -> None:
    encoder = build_encoder(SMALL)
    assert isinstance(encoder, SmallResNet)
    blocks = [module for module in encoder.modules() if isinstance(module, _BasicBlock)]
    assert len(blocks) == 3
    for block in blocks:
        block.eval()
        maps = torch.randn(2, block.conv1.in_channels, 14, 14)
        assert torch.equal(block(maps), torch.relu(block.shortcut(maps)))


@pytest.mark.parametrize("name", ["small", "timm:resnet10t", "resnet18"])
def test_an_encoder_file_rebuilds_the_encoder(tmp_path: Path, name: str) -> None:
    config = EncoderConfig(name=name, width=8)
    model = build_model(config, seed=0)
    images = torch.randn(4, 1, 28, 28)
    model(images)  # moves BatchNorm's running statistics
    path = tmp_path / "encoder.safetensors"
    save_encoder(model.encoder, config, path)
    loaded, loaded_config = load_encoder(path)
    assert loaded_config == config
    assert not loaded.training
    assert torch.equal(loaded(images), model.encoder.eval()(images))
    assert [entry.name for entry in tmp_path.iterdir()] == ["encoder.safetensors"]


def missing(path: Path) -> None:
    pass


def text(path: Path) -> None:
    path.write_text("not an encoder\n" * 100)


def truncated(path: Path) -> None:
    save_encoder(build_encoder(SMALL), SMALL, path)
    path.write_bytes(path.read_bytes()[:-10])


def without_metadata(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path)


def of_another_encoder(path: Path) -> None:
    save_encoder(build_encoder(SMALL), EncoderConfig(width=4), path)


def with_an_unknown_option(path: Path) -> None:
    encoder = json.dumps({"name": "small", "wings": 2, "blocks": [1]})
    save_file({"weight": torch.zeros(3)}, path, metadata={"format": "pic-encoder-1", "encoder": encoder})


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (missing, "cannot read encoder file .*give one that the trainer wrote"),
        (text, "cannot read encoder file"),
        (truncated, "cannot read encoder file"),
        (without_metadata, "not a pic-encoder-1 file"),
        (of_another_encoder, "does not hold the encoder it names, 'small'"),
        (with_an_unknown_option, "names an encoder that cannot be built.*wings"),
    ],
)
def test_a_wrong_encoder_file_gives_one_clear_line(tmp_path: Path, write: Any, message: str) -> None:
    path = tmp_path / "encoder.safetensors"
    write(path)
    with pytest.raises(ValueError, match=message) as caught:
        load_encoder(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet999"}, "unknown encoder 'resnet999'"),
        ({"name": "timm:nothing"}, "timm has no model 'nothing'"),
        ({"name": "hub:resnet18"}, "unknown kind of encoder 'hub:resnet18'"),
        ({"name": "vgg11"}, "encoder 'vgg11' cannot take 28 px images"),
        ({"name": "squeezenet1_1", "image_size": 64}, "no linear layer"),
        ({"in_channels": 2}, "in_channels is 2"),
        ({"width": 0}, "width is 0"),
        ({"blocks": ()}, "blocks is"),
    ],
)
def test_impossible_encoders(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(EncoderConfig(**options))
