"""What is evaluated: the encoder of a run or a file, or raw pixels."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.data import DECODED, SYNTHETIC
from trainer.data.config import FOLDER, KNOWS_LABELS, DataConfig, SourceOptions, usual
from trainer.data.manifest import Manifest, is_packed
from trainer.data.pixels import PixelScale
from trainer.evaluate.features import RAW, RawPixels
from trainer.evaluate.options import EncoderOptions
from trainer.model import EncoderConfig, load_encoder
from trainer.run.checkpoint_file import checkpoint_name, file_path, saved_steps
from trainer.run.directory import CONFIG_FILE, ENCODER_FILE, is_run, read_encoder, read_settings
from trainer.settings import settings_of
from trainer.torchvision_schemas import declare_missing_schemas
from weightserver.torch import Ranks

_MOST_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class LoadedEncoder:
    """What is evaluated, and where its results go."""

    name: str
    """For people: "runs/a, step-000000001000", "raw pixels"."""
    module: nn.Module | None
    """Maps normalised float32 [B, C, H, W] to features [B, d]; in eval mode, on the CPU. None: raw pixels."""
    config: EncoderConfig | None
    """None for raw pixels."""
    directory: Path = Path("runs/pixels")
    """Where evaluation/NAME.json is written. Of a run its own, of an export its own, of weights/a.safetensors
    weights/a, otherwise one in runs/."""
    images: DataConfig = field(default_factory=DataConfig)
    """The run's images, and how it reads them; of a file, how it says that pixels become colours."""
    knows_labels: bool = False
    """Whether the run trained on labels, so that none of its images can be held out."""

    @property
    def network(self) -> nn.Module:
        """The encoder, or `RawPixels`."""
        return self.module if self.module is not None else RawPixels()

    @property
    def pixels(self) -> PixelScale:
        """The scale of the network's input."""
        return self.config.pixels if self.config is not None else RAW

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the network's parameters and buffers."""
        digest = hashlib.sha256()
        for name, tensor in self.network.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def require_encoder(self, protocol: str) -> tuple[nn.Module, EncoderConfig]:
        """The encoder and its settings. Raises ValueError for raw pixels."""
        if self.module is None or self.config is None:
            raise ValueError(f"{protocol} needs an encoder, not raw pixels: give --run or --encoder")
        return self.module, self.config

    def check_images(self, channels: int, side: int) -> None:
        """Raises ValueError if the encoder is for images of other channels or another size."""
        own = self.config
        if own is not None and (channels, side) != (own.in_channels, own.image_size):
            raise ValueError(
                f"{self.name} is for {own.in_channels}-channel {own.image_size} px images, but the data set has "
                f"{channels}-channel {side} px ones: choose another --dataset"
            )

    def check_finite(self) -> None:
        """Raises ValueError if a weight is infinite or not a number."""
        for name, tensor in self.network.state_dict().items():
            if not tensor.isfinite().all():
                raise ValueError(f"{name} of {self.name} is not finite: the weights are damaged, give others")

    def data(self, dataset: str | None, data_dir: Path | None) -> tuple[str, Path | None]:
        """Name and folder of the data set: as --dataset and --data-dir say, or the run's, or fashion-mnist.

        Raises:
            ValueError: the run's images were generated, and no other data set is given.
        """
        if dataset is not None:
            return dataset, data_dir
        if self.images.dataset == SYNTHETIC:
            raise ValueError(
                f"{self.name} was trained on generated images, which have no labels: give another --dataset"
            )
        if data_dir and self.images.dataset in DECODED:
            return "packed" if is_packed(data_dir) else FOLDER, data_dir
        return self.images.dataset, data_dir or self.images.data_dir

    def reading_of(self, source: Path | None) -> SourceOptions:
        """How images are read: the run's own, also those of which its pack was made, as in the run; others with its
        pixels and its cache."""
        own = self.images
        background = usual("background", own.background)  # not that of another pack
        pixels = replace(own.of_pixels, background=background, cache_dir=own.cache_dir, cache_gib=own.cache_gib)
        if source is None or own.data_dir is None:
            return pixels
        if source.resolve() == own.data_dir.resolve():
            return own
        packed = Manifest.load(own.data_dir) if is_packed(own.data_dir) else None
        return replace(own, **packed.options.given | own.given) if packed and packed.is_of(source) else pixels


def encoder_of(options: EncoderOptions, ranks: Ranks | None = None) -> LoadedEncoder:
    """Loads what the options name. The first rank reads it, and the others receive it: all have the same checkpoint.

    Raises:
        ValueError: options that name nothing or too much; a run, file or model that does not exist, or is damaged.
    """
    options.check()
    ranks = ranks or Ranks()
    found = [_load(options) if ranks.is_first else None]
    if ranks.world_size > 1:
        declare_missing_schemas()  # the encoder's class may be of torchvision or timm
        dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def _load(options: EncoderOptions) -> LoadedEncoder:
    if options.run is not None:
        return _of_run(options.run, options.checkpoint)
    if options.encoder is not None:
        return _of_file(options.encoder)
    return LoadedEncoder(name="raw pixels", module=None, config=None)


def _of_run(run: Path, checkpoint: str | None) -> LoadedEncoder:
    if run.is_dir() and not is_run(run):  # an export, perhaps, which may have a config.json of its own
        raise ValueError(f"{run} holds no run: give the --output of one, or an encoder's file or export by --encoder")
    settings = read_settings(run)
    (encoder, config), state = (read_encoder(run, checkpoint), checkpoint) if checkpoint else newest_encoder(run)
    return LoadedEncoder(
        name=f"{run}, {state}" if state else str(run),
        module=encoder,
        config=config,
        directory=run,
        images=settings_of(DataConfig, settings),
        knows_labels=settings.get("labels") is not None,
    )


def newest_encoder(run: Path) -> tuple[tuple[nn.Module, EncoderConfig], str]:
    """The encoder at the run's end, or of its newest checkpoint, and the checkpoint's name; "" for the end.

    A run that trains deletes its old checkpoints, perhaps the one that is about to be read; the next one is read then.
    """
    for _ in range(_MOST_ATTEMPTS):
        steps = saved_steps(run / "checkpoints")
        path = run / ENCODER_FILE
        if not path.exists() and steps:
            path = file_path(run / "checkpoints", steps[-1])
        name = "" if path.name == ENCODER_FILE else checkpoint_name(steps[-1])
        try:
            return read_encoder(run, name), name
        except ValueError:
            if path.exists():
                raise
    raise ValueError(f"{run} has neither {ENCODER_FILE} nor a checkpoint yet: wait for its first checkpoint")


def _of_file(path: Path) -> LoadedEncoder:
    """An encoder file of ours, or an exported one; of a directory, the one in it."""
    file = _exported_file(path) if path.is_dir() else path
    metadata = _metadata(file)
    if file.exists() and not metadata.get("format", "").startswith("pic-encoder"):
        raise ValueError(f"{file} is no encoder file of this trainer: give weights of others to 'pic export import'")
    encoder, config = load_encoder(file)
    return LoadedEncoder(
        name=str(file),
        module=encoder,
        config=config,
        directory=path if path.is_dir() else _directory_for(file),
        images=DataConfig.of_metadata(metadata),
        knows_labels=KNOWS_LABELS in metadata,
    )


def _exported_file(directory: Path) -> Path:
    if (directory / CONFIG_FILE).is_file() and (directory / "checkpoints").is_dir():
        raise ValueError(f"{directory} is a run's directory: give --run")
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(f"{directory} has {len(files)} safetensors files, not one: give the file of an encoder")
    return files[0]


def _metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says about itself; empty for any other file."""
    try:
        with safe_open(file, "pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def _directory_for(file: Path) -> Path:
    """Where results about a file go: a run's directory for its encoder, otherwise one of the file's name next to it."""
    if file.name == ENCODER_FILE and (file.parent / CONFIG_FILE).is_file():
        return file.parent
    return file.with_suffix("") if file.suffix else file.with_name(f"{file.name}-results")
