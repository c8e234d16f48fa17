"""Encoder and projection head, and the file format of trained encoders.

Encoders: "small", our ResNet for 28–64 px images; "timm:NAME"; "torchvision:NAME", or just NAME for short; "none",
which passes on a few pixels at next to no cost, to measure everything else. All start from random weights and take
normalised float32 images [B, C, H, W] (`trainer.data.pixels.normalise`). BatchNorm is local to a rank, as in the paper
(appendix, Experimental Settings); evaluate in eval mode.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.batch_norm import BatchNormOfRanks
from trainer.encoder_config import OF_SMALL
from trainer.encoder_config import EncoderConfig as EncoderConfig
from trainer.small_resnet import SmallResNet
from trainer.torchvision_schemas import import_module
from weightserver.common.atomic_files import atomic_write

_FORMAT = "pic-encoder-1"


class PICModel(nn.Module):
    """Encoder and projection head (Section 2.1), without BatchNorm in the head; images to embeddings [B, dim].

    The head has two linear layers with a ReLU between them, as wide as the features, or a single one (`head_layers`);
    with `embedding_norm` "batch", BatchNorm of the embeddings follows. With `encoder_in_bfloat16` the encoder computes
    under autocast; head and embeddings are always float32.
    """

    def __init__(
        self,
        config: EncoderConfig,
        dim: int = 128,
        *,
        head_layers: Literal[1, 2] = 2,
        embedding_norm: Literal["none", "batch"] = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder_in_bfloat16 = False
        self.encoder = build_encoder(config)
        self.feature_dim = measure_feature_dim(self.encoder, config)
        hidden = [nn.Linear(self.feature_dim, self.feature_dim), nn.ReLU()] if head_layers == 2 else []
        norm = [BatchNormOfRanks(dim, affine=False)] if embedding_norm == "batch" else []
        self.head = nn.Sequential(*hidden, nn.Linear(self.feature_dim, dim), *norm)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.encoder_in_bfloat16):
            features = self.encoder(images)  # (B, feature_dim)
        embeddings: Tensor = self.head(features.float())  # (B, dim), not normalised: the loss does that
        return embeddings


def build_model(config: EncoderConfig, dim: int = 128, *, seed: int = 0, **head: Any) -> PICModel:
    """Builds an encoder with its head, whose keywords are `PICModel`'s. Weights depend on the seed alone, and torch's
    generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PICModel(config, dim, **head)


def build_encoder(config: EncoderConfig) -> nn.Module:
    """Builds an encoder with random weights: normalised images to features float32 [B, feature_dim]."""
    config.check()
    family, _, name = config.name.rpartition(":")
    if config.name == "small":
        return SmallResNet(**small_options(config))
    if config.name == "none":
        return _FewPixels()
    if family == "timm":
        return _of_timm(name, config)
    if family in ("", "torchvision"):
        models = import_module("torchvision.models")
        if name not in models.list_models(module=models):
            raise ValueError(
                f"unknown encoder {config.name!r}: give small, none, timm:NAME or a torchvision classifier"
            )
        options = {"zero_init_residual": True} if "resne" in name else {}  # ResNet, ResNeXt, Wide ResNet
        with _refusals(config):
            classifier = models.get_model(name, weights=None, **options | config.keywords())
        return TorchvisionEncoder(classifier)
    raise ValueError(f"unknown kind of encoder {config.name!r}: give small, none, timm:NAME or torchvision:NAME")


def _of_timm(name: str, config: EncoderConfig) -> nn.Module:
    """A model of timm without its classifier."""
    timm = import_module("timm")
    if not timm.is_model(name):
        raise ValueError(f"timm has no model {name!r}: timm.list_models() lists them")
    with _refusals(config):
        encoder: nn.Module = timm.create_model(name, pretrained=False, num_classes=0, **timm_options(name, config))
    return encoder


@contextmanager
def _refusals(config: EncoderConfig) -> Iterator[None]:
    """Turns what a library raises inside into a ValueError of one line that names the encoder and its options."""
    try:
        yield
    except Exception as error:  # values of options can make a library raise anything
        if not config.options and not isinstance(error, TypeError | ValueError | AssertionError | RuntimeError):
            raise
        given = f" with --encoder.options {' '.join(config.options)}" if config.options else ""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"encoder {config.name!r} cannot take {config.image_size} px images{given}: {reason}"
        ) from error


def timm_options(name: str, config: EncoderConfig) -> dict[str, Any]:
    """The options of timm's model; one whose weights depend on the images' size, by its positions, is for theirs."""
    usual = import_module("timm").get_pretrained_cfg(name)
    fits = usual is None or not usual.fixed_input_size or usual.input_size[-1] == config.image_size
    return {"in_chans": config.in_channels} | ({} if fits else {"img_size": config.image_size}) | config.keywords()


def small_options(config: EncoderConfig) -> dict[str, Any]:
    """The options of `SmallResNet` for the encoder "small"."""
    return {"in_chans": config.in_channels} | {name: getattr(config, name) for name in OF_SMALL}


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


def library_model(encoder: nn.Module) -> nn.Module:
    """The model of the encoder's library, whose weights have the library's names."""
    return encoder.classifier if isinstance(encoder, TorchvisionEncoder) else encoder


def save_encoder(
    encoder: nn.Module, config: EncoderConfig, path: Path, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes an encoder and its config atomically as one safetensors file, with more metadata."""
    tensors = separate(encoder.state_dict())
    atomic_write(path, lambda partial: save_file(tensors, partial, metadata=encoder_metadata(config) | dict(metadata)))


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the host that share no memory, which safetensors refuses; layers may share weights."""
    found, known = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        content = tensor.cpu().contiguous()
        found[name] = content.clone() if content.data_ptr() in known else content
        known.add(content.data_ptr())
    return found


def encoder_metadata(config: EncoderConfig) -> dict[str, str]:
    """What an encoder file says about its tensors."""
    return {"format": _FORMAT, "encoder": json.dumps(asdict(config))}


def load_encoder(path: Path) -> tuple[nn.Module, EncoderConfig]:
    """Rebuilds the encoder of a `save_encoder` file, or of an export to torchvision or timm, in eval mode, on the CPU.

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
        config.check()
        if missing := asdict(config).keys() - fields.keys() - {"options"}:  # without them there were none
            raise ValueError(f"it is of an earlier version, without {', '.join(sorted(missing))}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} names an encoder that cannot be built ({error}): give another") from error
    encoder = build_encoder(config)
    try:
        model = library_model(encoder)
        (model if tensors.keys() == model.state_dict().keys() else encoder).load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not hold the encoder it names, {config.name!r}: {reason[:200]}") from error
    return encoder.eval(), config
