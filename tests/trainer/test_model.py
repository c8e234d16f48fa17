"""Encoders, head and encoder files."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.compute import ComputeConfig
from trainer.config import TrainConfig
from trainer.model import EncoderConfig, build_encoder, build_model, encoder_metadata, load_encoder, save_encoder
from trainer.run.checkpoint_file import give_state, tensors_to_save
from trainer.small_resnet import BasicBlock, GridOfAverages, SmallResNet

SMALL = EncoderConfig(width=8, blocks=(1, 2), stem_stride=2, pool_size=2)
GROUP = dataclasses.replace(SMALL, norm="group")


@pytest.mark.parametrize(
    ("config", "feature_dim"),
    [
        (EncoderConfig(width=8), 32),
        (SMALL, 16 * 2 * 2),
        (EncoderConfig(width=8, in_channels=3, image_size=64), 32),
        (GROUP, 16 * 2 * 2),
        (EncoderConfig(width=6, norm="group"), 24),
        (EncoderConfig(name="none"), 16),
        (EncoderConfig(name="none", in_channels=3, image_size=31), 16),
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
    assert isinstance(linear, torch.nn.Linear)
    assert isinstance(last, torch.nn.Linear)
    assert (linear.in_features, linear.out_features, last.out_features) == (feature_dim, feature_dim, 16)
    assert isinstance(relu, torch.nn.ReLU)


def test_building_a_model_leaves_torchs_generator_as_it_is() -> None:
    before = torch.get_rng_state()
    build_model(SMALL, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_embeddings_are_centred_and_scaled_without_parameters() -> None:
    """The linear layers are those without; tests/integration/test_ranks.py has several ranks."""
    plain, normed = (build_model(SMALL, 16, seed=0, embedding_norm=norm) for norm in ("none", "batch"))
    assert [name for name, _ in normed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    images = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    embeddings, expected = normed(images), plain(images)
    expected = (expected - expected.mean(dim=0)) / (expected.var(dim=0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(embeddings, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 4, "accumulate": 4}])
def test_an_image_alone_cannot_be_centred_and_scaled(changes: dict[str, Any]) -> None:
    TrainConfig().with_settings(**changes).check()
    with pytest.raises(ValueError, match="--embedding-norm batch needs two images at a time"):
        TrainConfig().with_settings(**changes, embedding_norm="batch").check()


@pytest.mark.parametrize("config", [SMALL, GROUP], ids=["batch", "group"])
def test_a_block_starts_as_its_shortcut(config: EncoderConfig) -> None:
    encoder = build_encoder(config)
    assert isinstance(encoder, SmallResNet)
    blocks = [module for module in encoder.modules() if isinstance(module, BasicBlock)]
    assert len(blocks) == 3
    for block in blocks:
        block.eval()
        maps = torch.randn(2, block.conv1.in_channels, 14, 14)
        assert torch.equal(block(maps), torch.relu(block.shortcut(maps)))


def test_with_group_norm_an_image_depends_on_no_other() -> None:
    images = torch.randn(6, 1, 28, 28)
    for config, alone in ((GROUP, True), (SMALL, False)):
        encoder = build_encoder(config).train()
        features = encoder(images)
        assert torch.allclose(encoder(images[:2]), features[:2], atol=1e-5) == alone
        assert torch.allclose(encoder.eval()(images), features, atol=1e-5) == alone
    assert list(build_encoder(GROUP).buffers()) == []


def test_encoder_none_passes_on_pixels_and_still_learns() -> None:
    model = build_model(EncoderConfig(name="none", in_channels=3, image_size=32), dim=8, seed=0)
    images = torch.randn(5, 3, 32, 32)
    pixels = torch.stack([images[:, 0, row, column] for row in (0, 8, 16, 24) for column in (0, 8, 16, 24)], dim=1)
    (scale,) = model.encoder.parameters()
    features = model.encoder(images)
    torch.testing.assert_close(features, pixels * scale)
    features.sum().backward()
    torch.testing.assert_close(scale.grad, pixels.sum().reshape(scale.shape))
    assert sum(p.numel() for p in model.parameters()) < 1_000


@pytest.mark.parametrize(
    "config",
    [
        GROUP,
        *(EncoderConfig(name=name, width=8) for name in ("small", "none", "timm:resnet10t", "resnet18")),
        EncoderConfig(name="timm:resnet10t", options=("act_layer=silu", "stem_width=16", "drop_path_rate=0.1")),
    ],
    ids=lambda config: f"{config.name}-{config.norm}-{len(config.options)}",
)
def test_an_encoder_file_rebuilds_the_encoder(tmp_path: Path, config: EncoderConfig) -> None:
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


def cut_off(path: Path) -> None:
    save_encoder(build_encoder(SMALL), SMALL, path)
    os.truncate(path, path.stat().st_size - 10)


def naming(encoder: dict[str, Any], path: Path) -> None:
    metadata = {"format": "pic-encoder-1", "encoder": json.dumps(encoder)}
    save_file({"weight": torch.zeros(3)}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "cannot read encoder file .*give one that the trainer wrote"),
        (lambda path: path.write_text("not an encoder\n" * 100), "cannot read encoder file"),
        (cut_off, "cannot read encoder file"),
        (lambda path: save_file({"weight": torch.zeros(3)}, path), "not a pic-encoder-1 file"),
        (
            lambda path: save_encoder(build_encoder(SMALL), EncoderConfig(width=4), path),
            "does not hold the encoder it names, 'small'",
        ),
        (
            lambda path: naming({"name": "small", "wings": 2, "blocks": [1]}, path),
            "names an encoder that cannot be built.*wings",
        ),
        (lambda path: naming({"name": "small"}, path), "of an earlier version, without .*pixel_mean, pixel_std"),
        (
            lambda path: naming({"name": "timm:resnet18", "options": ["checkpoint_path=a.pth"]}, path),
            "names an encoder that cannot be built.*checkpoint_path=a.pth sets what the trainer",
        ),
    ],
)
def test_a_wrong_encoder_file_gives_one_clear_line(tmp_path: Path, write: Any, message: str) -> None:
    write(tmp_path / "encoder.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load_encoder(tmp_path / "encoder.safetensors")
    assert "\n" not in str(caught.value)


def test_an_encoder_file_without_options_has_none(tmp_path: Path) -> None:
    encoder, path = build_encoder(SMALL), tmp_path / "encoder.safetensors"
    metadata = encoder_metadata(SMALL)
    settings = json.loads(metadata["encoder"])
    assert settings.pop("options") == []
    save_file(encoder.state_dict(), path, metadata | {"encoder": json.dumps(settings)})
    assert load_encoder(path)[1] == SMALL


def test_layers_that_share_weights_are_saved(tmp_path: Path) -> None:
    """As those of timm's CoaT do."""
    layer, path = nn.Linear(2, 2), tmp_path / "file.safetensors"
    network = nn.Sequential(layer, layer)
    save_encoder(network, SMALL, path)
    assert load_file(path)["1.weight"].equal(layer.weight)
    optimizer = torch.optim.SGD(network.parameters())
    save_file(tensors_to_save(network, optimizer), path)
    layer.weight.data.zero_()
    give_state(load_file(path), network, optimizer)
    assert layer.weight.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet999"}, "unknown encoder 'resnet999'"),
        ({"name": "timm:nothing"}, "timm has no model 'nothing'"),
        ({"name": "hub:resnet18"}, "unknown kind of encoder 'hub:resnet18'"),
        ({"name": "vgg11"}, "encoder 'vgg11' cannot take 28 px images"),
        ({"name": "squeezenet1_1", "image_size": 64}, "no linear layer"),
        (
            {"name": "timm:resnet18", "options": ("wings=2",)},
            r"encoder 'timm:resnet18' cannot take 28 px images with --encoder\.options wings=2: .*argument 'wings'",
        ),
        (
            {"name": "resnet18", "options": ("wings=2", "groups=1")},
            r"'resnet18' .* with --encoder\.options wings=2 groups=1: .*argument 'wings'",
        ),
        ({"name": "timm:resnet18", "options": ("act_layer=wings",)}, r"with --encoder\.options act_layer=wings: "),
        ({"in_channels": 2}, "in_channels is 2"),
        ({"width": 0}, "width is 0"),
        ({"blocks": ()}, "blocks is"),
        ({"norm": "layer"}, "norm is 'layer': give batch or group"),
        ({"name": "timm:resnet10t", "norm": "group"}, "norm is 'group', but 'timm:resnet10t' has its own"),
        ({"name": "resnet18", "norm": "group"}, "norm is 'group', but 'resnet18' has its own: choose small"),
    ],
)
def test_impossible_encoders(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(EncoderConfig(**options))


@pytest.mark.parametrize(
    ("height", "width", "size"), [(4, 4, 3), (7, 5, 3), (14, 14, 3), (3, 3, 3), (2, 2, 3), (9, 6, 1)]
)
def test_deterministic_pooling_has_the_bits_of_torchs(height: int, width: int, size: int) -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(0)
        maps = torch.randn(3, 5, height, width, generator=generator).contiguous(memory_format=memory_format)
        upstream = torch.randn(3, 5, size, size, generator=generator)
        results = []
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            leaf = maps.clone().requires_grad_()
            pooled = GridOfAverages(size)(leaf)
            pooled.backward(upstream)
            assert leaf.grad is not None
            results.append((pooled.detach(), leaf.grad))
        torch.use_deterministic_algorithms(False)
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("width", [2, 4, 7, 8, 12, 16, 32])
def test_gradients_of_narrow_encoders(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 1, 14, 14, generator=generator)
    upstream = torch.randn(20, 4 * width, generator=generator)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        encoder = build_model(EncoderConfig(width=width, norm="group"), seed=0).encoder
        encoder = encoder.double().to(memory_format=memory_format)  # type: ignore[call-overload]
        exact = _gradients(encoder, images.double(), upstream.double())
        for name, gradient in _gradients(encoder.float(), images, upstream).items():
            # rounding of sums of up to 20 · 14² products in a dozen layers
            assert (gradient - exact[name]).norm() <= 1e-4 * exact[name].norm() + 1e-7, (name, memory_format)


def _gradients(encoder: torch.nn.Module, images: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Float64, of all parameters."""
    encoder.zero_grad()
    encoder(images).backward(upstream)
    return {name: value.grad.double() for name, value in encoder.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("precision", get_args(get_type_hints(ComputeConfig)["precision"]))
def test_tf32_is_used_only_on_request(precision: Any) -> None:
    ComputeConfig(precision=precision).configure_torch()
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    expected = "tf32" if precision == "tf32" else "ieee"
    assert [part.fp32_precision for part in (cudnn, cudnn.conv, cudnn.rnn, matmul)] == [expected] * 4
    # torch raises here if its older and newer flags contradict each other; Inductor reads them.
    assert cudnn.allow_tf32 == matmul.allow_tf32 == (expected == "tf32")
    assert torch.get_float32_matmul_precision() == ("high" if expected == "tf32" else "highest")
