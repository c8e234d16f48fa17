"""Encoder and projection head, and the file format of trained encoders.

Encoders: "small", our ResNet for 28–64 px images; "timm:NAME"; "torchvision:NAME", or just NAME for short; "none",
which passes on a few pixels at next to no cost, to measure everything else. All start from random weights and take
normalised float32 images [B, C, H, W] (`trainer.data.pixels.normalise`). BatchNorm is local to a rank, as in the paper
(appendix, Experimental Settings); evaluate in eval mode.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.encoder_config import EncoderConfig as EncoderConfig
from trainer.torchvision_schemas import import_module
from weightserver.common.atomic_files import atomic_write

_FORMAT = "pic-encoder-1"


def _group_norm(width: int) -> nn.GroupNorm:
    """Eight groups, or fewer if eight do not divide the channels (Wu and He, 1803.08494)."""
    return nn.GroupNorm(math.gcd(width, 8), width)


_FULL_BLOCK = 16
"""Channels that oneDNN computes at a time: 16, or 8 without AVX-512."""
_Norm = Callable[[int], nn.BatchNorm2d | nn.GroupNorm]
_NORMS: dict[str, _Norm] = {"batch": nn.BatchNorm2d, "group": _group_norm}


class PICModel(nn.Module):
    """Encoder and projection head (Section 2.1), without BatchNorm in the head; images to embeddings [B, dim].

    The head has two linear layers with a ReLU between them, as wide as the features, or a single one (`head_layers`).
    With `encoder_in_bfloat16` the encoder computes under autocast; head and embeddings are always float32.
    """

    def __init__(self, config: EncoderConfig, dim: int = 128, *, head_layers: Literal[1, 2] = 2) -> None:
        super().__init__()
        self.config = config
        self.encoder_in_bfloat16 = False
        self.encoder = build_encoder(config)
        self.feature_dim = measure_feature_dim(self.encoder, config)
        hidden = [nn.Linear(self.feature_dim, self.feature_dim), nn.ReLU()] if head_layers == 2 else []
        self.head = nn.Sequential(*hidden, nn.Linear(self.feature_dim, dim))

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.encoder_in_bfloat16):
            features = self.encoder(images)  # (B, feature_dim)
        embeddings: Tensor = self.head(features.float())  # (B, dim), not normalised: the loss does that
        return embeddings


def build_model(
    config: EncoderConfig, dim: int = 128, *, seed: int | None = None, head_layers: Literal[1, 2] = 2
) -> PICModel:
    """Builds an encoder with its head. With `seed`, weights depend on it alone and torch's generators do not change."""
    if seed is None:
        return PICModel(config, dim, head_layers=head_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PICModel(config, dim, head_layers=head_layers)


def build_encoder(config: EncoderConfig) -> nn.Module:
    """Builds an encoder with random weights: normalised images to features float32 [B, feature_dim]."""
    family, _, name = config.name.rpartition(":")
    if config.name == "small":
        return SmallResNet(config)
    if config.name == "none":
        return _FewPixels()
    if family == "timm":
        timm = import_module("timm")
        if not timm.is_model(name):
            raise ValueError(f"timm has no model {name!r}: timm.list_models() lists them")
        encoder: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, in_chans=config.in_channels)
        return encoder
    if family in ("", "torchvision"):
        models = import_module("torchvision.models")
        if name not in models.list_models(module=models):
            raise ValueError(
                f"unknown encoder {config.name!r}: give small, none, timm:NAME or a torchvision classifier"
            )
        options = {"zero_init_residual": True} if "resne" in name else {}  # ResNet, ResNeXt, Wide ResNet
        return TorchvisionEncoder(models.get_model(name, weights=None, **options))
    raise ValueError(f"unknown kind of encoder {config.name!r}: give small, none, timm:NAME or torchvision:NAME")


def measure_feature_dim(encoder: nn.Module, config: EncoderConfig) -> int:
    """Returns the number of features; raises ValueError if the encoder cannot take images of the config's size."""
    was_training = encoder.training
    encoder.eval()
    images = torch.zeros(1, config.in_channels, config.image_size, config.image_size)
    try:
        with torch.no_grad():
            features = encoder(images)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"encoder {config.name!r} cannot take {config.image_size} px images: {reason}") from error
    finally:
        encoder.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError(f"encoder {config.name!r} does not give one feature vector per image: choose a classifier")
    return features.shape[1]


def check_image_size(encoder: nn.Module, config: EncoderConfig, image_size: int) -> None:
    """Raises ValueError unless images of `image_size` pixels have as many features as those of the config's size."""
    if image_size == config.image_size:
        return
    expected, found = (
        measure_feature_dim(encoder, config),
        measure_feature_dim(encoder, replace(config, image_size=image_size)),
    )
    if found != expected:
        raise ValueError(
            f"encoder {config.name!r} has {found} features for {image_size} px views and {expected} for "
            f"{config.image_size} px images: give views of the size of the images"
        )


class SmallResNet(nn.Module):
    """ResNet of basic blocks for 28–64 px images: a 3×3 stem without max pooling, stages, a grid of averages.

    The last norm of each block starts at 0, so that a block starts as its shortcut (Goyal et al., 1706.02677).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, norm = config.width, _NORMS[config.norm]
        layers: list[nn.Module] = [
            nn.Conv2d(config.in_channels, width, 3, config.stem_stride, padding=1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
        ]
        in_width = width
        for stage, num_blocks in enumerate(config.blocks):
            for block in range(num_blocks):
                out_width = width * 2**stage
                layers.append(_BasicBlock(in_width, out_width, 2 if stage > 0 and block == 0 else 1, norm))
                in_width = out_width
        self.stages = nn.Sequential(*layers)
        self.pool = _GridOfAverages(config.pool_size)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, _BasicBlock):
                nn.init.zeros_(module.norm2.weight)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stages(images)  # (B, width·2^(stages-1), side, side)
        pooled: Tensor = self.pool(maps)
        return pooled.flatten(1)


class _GridOfAverages(nn.Module):
    """nn.AdaptiveAvgPool2d with the same bits; its backward also works with deterministic algorithms on CUDA."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, maps: Tensor) -> Tensor:
        if self.size > 1 and torch.are_deterministic_algorithms_enabled():
            averages: Tensor = _DeterministicAverages.apply(maps, self.size)  # type: ignore[no-untyped-call]
            return averages
        return F.adaptive_avg_pool2d(maps, self.size)


class _DeterministicAverages(torch.autograd.Function):
    """F.adaptive_avg_pool2d with a backward that adds the parts' gradients in order, as on the CPU."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(maps)
        return F.adaptive_avg_pool2d(maps, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (maps,) = ctx.saved_tensors  # (B, C, height, width)
        size, result = gradients[0].shape[-1], torch.zeros_like(maps)
        height, width = maps.shape[-2:]
        for row, column in itertools.product(range(size), repeat=2):
            top, bottom = row * height // size, -(-(row + 1) * height // size)
            left, right = column * width // size, -(-(column + 1) * width // size)
            share = gradients[0][:, :, row, column] / (bottom - top) / (right - left)  # (B, C)
            result[:, :, top:bottom, left:right] += share[:, :, None, None]
        return result, None


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 1512.03385)."""

    def __init__(self, in_width: int, out_width: int, stride: int, norm: _Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, out_width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1, bias=False)
        self.norm2 = norm(out_width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != out_width:
            convolution = nn.Conv2d if in_width >= _FULL_BLOCK else _StridedPointwise
            self.shortcut = nn.Sequential(convolution(in_width, out_width, 1, stride, bias=False), norm(out_width))

    def forward(self, maps: Tensor) -> Tensor:
        out = torch.relu_(self.norm1(self.conv1(maps)))
        out = self.norm2(self.conv2(out))
        return torch.relu_(out + self.shortcut(maps))


class _StridedPointwise(nn.Conv2d):
    """A 1×1 convolution, for few channels.

    It takes each stride-th pixel by itself: where oneDNN does so, the gradient of the weights reads and writes beyond
    its buffer if pixels have fewer channels than a block and lie in the order channels_last, which is wrong, or a
    crash, on processors without AVX-512 (oneDNN's issue 6035).
    """

    def forward(self, maps: Tensor) -> Tensor:
        down, across = self.stride
        return F.conv2d(maps[:, :, ::down, ::across], self.weight)


class _FewPixels(nn.Module):
    """Up to 4×4 pixels of the first channel, spread over the image, times one trainable factor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        row_stride, column_stride = (-(-side // 4) for side in images.shape[-2:])
        return images[:, 0, ::row_stride, ::column_stride].flatten(1) * self.scale


class TorchvisionEncoder(nn.Module):
    """A torchvision classifier without its last linear layer, `last`; repeats grey images to three channels."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        last = [name for name, module in classifier.named_modules() if isinstance(module, nn.Linear)][-1:]
        if not last:
            raise ValueError(
                f"{type(classifier).__name__} has no linear layer whose input could be the features: choose another"
            )
        parent, _, leaf = last[0].rpartition(".")
        setattr(classifier.get_submodule(parent), leaf, nn.Identity())
        self.classifier = classifier
        self.last = last[0]

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.classifier(images.expand(-1, 3, -1, -1))
        return features


def save_encoder(encoder: nn.Module, config: EncoderConfig, path: Path) -> None:
    """Writes an encoder and its config atomically as one safetensors file."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in encoder.state_dict().items()}
    metadata = {"format": _FORMAT, "encoder": json.dumps(asdict(config))}
    atomic_write(path, lambda partial: save_file(tensors, partial, metadata=metadata))


def load_encoder(path: Path) -> tuple[nn.Module, EncoderConfig]:
    """Rebuilds the encoder of a `save_encoder` file, in eval mode, on the CPU.

    Raises:
        ValueError: the file does not exist, is damaged, or is not an encoder file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read encoder file {path} ({error}): give one that the trainer wrote") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a {_FORMAT} file (format {metadata.get('format')!r}): give another")
    try:
        options = json.loads(metadata["encoder"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} names an encoder that cannot be built ({error}): give another") from error
    return encoder_from_tensors(tensors, options, path)


def encoder_from_tensors(tensors: dict[str, Tensor], options: Any, path: Path) -> tuple[nn.Module, EncoderConfig]:
    """Builds the encoder of `options`, an EncoderConfig from JSON, with weights by name; in eval mode, on the CPU.

    Raises:
        ValueError: options and weights do not match; the message names `path`.
    """
    try:
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in dict(options).items()
        }
        config = EncoderConfig(**fields)
        if missing := asdict(config).keys() - fields.keys():
            raise ValueError(f"it is of an earlier version, without {', '.join(sorted(missing))}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} names an encoder that cannot be built ({error}): give another") from error
    encoder = build_encoder(config)
    try:
        encoder.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold the encoder it names, {config.name!r}: {reason[:200]}") from error
    return encoder.eval(), config
