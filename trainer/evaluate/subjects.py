"""What is evaluated: the encoder of a run, a file, a library's model, or raw pixels."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.data import SYNTHETIC
from trainer.evaluate.evaluation import Subject
from trainer.export.importing import ImportOptions, encoder_config, import_encoder
from trainer.model import EncoderConfig, build_model, load_encoder, measure_feature_dim
from trainer.run.checkpoint_file import checkpoint_name, file_path, saved_steps
from trainer.run.directory import CONFIG_FILE, ENCODER_FILE, read_encoder, read_settings
from trainer.settings import Settings, check_at_least, flag
from trainer.torchvision_schemas import declare_missing_schemas
from weightserver.torch import Ranks

_KINDS = ("run", "encoder", "model", "pixels")
_NEEDS = {
    "checkpoint": "run",
    "weights": "model",
    "prefix": "weights",
    "image_size": "model",
    "in_channels": "model",
    "pixel_mean": "model",
    "pixel_std": "model",
    "encoder_seed": "model",
}
"""Options that need another one."""
_MOST_ATTEMPTS = 10
_SUFFIXES = (".safetensors", ".pth", ".pt", ".tar", ".bin", ".ckpt")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(Settings):
    """What to evaluate: exactly one of --run, --encoder, --model and --pixels."""

    run: Path | None = None
    """Directory of a run: its encoder at the end, or that of its newest checkpoint while it trains."""
    checkpoint: str | None = None
    """With --run: step-…, the checkpoint to evaluate instead."""
    encoder: Path | None = None
    """Encoder file that the trainer or an import wrote, or an exported file or directory."""
    model: str | None = None
    """torchvision:NAME or timm:NAME, with random weights unless --weights are given."""
    weights: Path | None = None
    """With --model: a safetensors file or checkpoint with its weights, as 'pic export import' takes."""
    prefix: str | None = None
    """With --weights: which encoder of several, a part of its keys' prefix, as encoder_k or teacher."""
    image_size: int | None = None
    """With --model: side of its images, in pixels; 224 if omitted."""
    in_channels: int | None = None
    """With --model: 1 for grey images, 3 for colour; 3 if omitted."""
    pixel_mean: tuple[float, ...] | None = None
    """With --model: mean of the pixels in 0..1 that it expects; ImageNet's if omitted."""
    pixel_std: tuple[float, ...] | None = None
    """With --model: standard deviation of these pixels; ImageNet's if omitted."""
    encoder_seed: int | None = None
    """With --model and without --weights: seed of the random weights; 0 if omitted."""
    pixels: bool = False
    """Raw pixels, for comparison."""

    def check(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind)]
        if len(given) != 1:
            found = " and ".join(map(flag, given)) or "none"
            raise ValueError(
                f"give exactly one of {', '.join(map(flag, _KINDS))}, got {found} (--weights is for --model)"
            )
        for name, needed in _NEEDS.items():
            if getattr(self, name) is not None and not getattr(self, needed):
                raise ValueError(f"{flag(name)} is for {flag(needed)}: omit it, or give {flag(needed)}")
        if self.weights is not None and self.encoder_seed is not None:
            raise ValueError("--encoder-seed is for random weights: omit it, or omit --weights")
        check_at_least(self, 1, "image_size")
        check_at_least(self, 0, "encoder_seed")

    def of_model(self) -> ImportOptions:
        """What --model and its options say."""
        return ImportOptions(
            name=self.model,
            image_size=self.image_size,
            in_channels=self.in_channels,
            pixel_mean=self.pixel_mean,
            pixel_std=self.pixel_std,
        )


@dataclass(frozen=True, kw_only=True)
class FoundSubject:
    """What the options name, loaded, and where its results go."""

    name: str
    """For people: "runs/a, step-000000001000", "torchvision:resnet50, random weights of seed 0", "raw pixels"."""
    encoder: nn.Module | None
    """In eval mode, on the CPU; None for raw pixels."""
    config: EncoderConfig | None
    directory: Path
    """Where evaluation/NAME.json is written. Of a run its own, of an export its own, of weights/a.safetensors
    weights/a, otherwise one in runs/."""
    dataset: str | None = None
    """Name of the run's data set; None without a run."""
    data_dir: Path | None = None
    """Its folder; None for the data set's default, or without a run."""
    background: str = "white"
    """What transparent pixels showed in the run."""
    notes: tuple[str, ...] = ()
    """Lines that say which weights were taken from a file of others."""

    @property
    def subject(self) -> Subject:
        """What a protocol sees of it."""
        return Subject(name=self.name, encoder=self.encoder, config=self.config)

    def data(self, dataset: str | None, data_dir: Path | None) -> tuple[str, Path | None]:
        """Name and folder of the data set: as --dataset and --data-dir say, or the run's, or fashion-mnist.

        Raises:
            ValueError: the run's images were generated, and no other data set is given.
        """
        if dataset is not None:
            return dataset, data_dir
        if self.dataset == SYNTHETIC:
            raise ValueError(
                f"{self.name} was trained on generated images, which have no labels: give another --dataset"
            )
        return self.dataset or "fashion-mnist", data_dir or self.data_dir


def load_subject(options: SubjectOptions, ranks: Ranks | None = None) -> FoundSubject:
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


def _load(options: SubjectOptions) -> FoundSubject:
    if options.run is not None:
        return _of_run(options.run, options.checkpoint)
    if options.encoder is not None:
        return _of_file(options.encoder)
    if options.weights is not None:
        return _of_weights(options.weights, options.of_model(), options.prefix)
    if options.model:
        return _random_model(options.of_model(), options.encoder_seed or 0)
    return FoundSubject(name="raw pixels", encoder=None, config=None, directory=Path("runs/pixels"))


def _of_run(run: Path, checkpoint: str | None) -> FoundSubject:
    settings = read_settings(run)
    (encoder, config), state = (read_encoder(run, checkpoint), checkpoint) if checkpoint else _newest(run)
    data_dir = settings.get("data_dir")
    return FoundSubject(
        name=f"{run}, {state}" if state else str(run),
        encoder=encoder,
        config=config,
        directory=run,
        dataset=str(settings.get("dataset", "fashion-mnist")),
        data_dir=Path(data_dir) if data_dir else None,
        background=settings["background"],
    )


def _newest(run: Path) -> tuple[tuple[nn.Module, EncoderConfig], str]:
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


def _of_file(path: Path) -> FoundSubject:
    """An encoder file of ours, or an exported one; of a directory, the one in it."""
    file = _exported_file(path) if path.is_dir() else path
    if _format(file).startswith("pic-encoder"):
        encoder, config = load_encoder(file)
        return FoundSubject(name=str(file), encoder=encoder, config=config, directory=_directory_for(file))
    found = _of_weights(file, ImportOptions())
    return replace(found, directory=path) if path.is_dir() else found


def _exported_file(directory: Path) -> Path:
    if (directory / CONFIG_FILE).is_file() and (directory / "checkpoints").is_dir():
        raise ValueError(f"{directory} is a run's directory: give --run")
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(f"{directory} has {len(files)} safetensors files, not one: give the file of an encoder")
    return files[0]


def _format(file: Path) -> str:
    """The format that a safetensors file names; empty for any other file."""
    try:
        with safe_open(file, "pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            return metadata.get("format", "")
    except (OSError, SafetensorError):
        return ""


def _of_weights(file: Path, options: ImportOptions, prefix: str | None = None) -> FoundSubject:
    imported = import_encoder(file, options, prefix=prefix)
    return FoundSubject(
        name=f"{imported.config.name} of {file}",
        encoder=imported.encoder,
        config=imported.config,
        directory=_directory_for(file),
        notes=tuple(imported.notes),
    )


def _random_model(options: ImportOptions, seed: int) -> FoundSubject:
    """The encoder that a training with this seed would start from; its BatchNorm statistics describe no data."""
    config = encoder_config(options)
    encoder = build_model(config, seed=seed).encoder.eval()
    measure_feature_dim(encoder, config)
    return FoundSubject(
        name=f"{config.name}, random weights of seed {seed}",
        encoder=encoder,
        config=config,
        directory=Path("runs") / re.sub(r"[^\w.]+", "-", f"{config.name}-random-{seed}"),
    )


def _directory_for(file: Path) -> Path:
    """Where results about a file go: a run's directory for its encoder, otherwise one of the file's name next to it."""
    if file.name == ENCODER_FILE and (file.parent / CONFIG_FILE).is_file():
        return file.parent
    name = file.name
    while (shorter := Path(name).stem) and Path(name).suffix in _SUFFIXES:
        name = shorter
    return file.with_name(name if name != file.name else f"{name}-results")
