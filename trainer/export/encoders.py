"""Exports an encoder for torchvision, timm or ONNX: a file of weights, its SHA-256 and a model card.

The scale of pixels is written in each library's own form: timm's config.json, torchvision's transforms. ONNX can be
written of every encoder. "small" is no architecture of timm's: its export for timm has a Python file that registers it.

An architecture can be converted between torchvision and timm if both have a model of its name with the same keys and
shapes (plain ResNets, ResNeXts and wide ResNets do); before anything is written, the other library's model is loaded
with the weights, and its features must equal the encoder's.
"""

from __future__ import annotations

import inspect
import io
import json
import logging
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from trainer.data.config import DECODED, DataConfig
from trainer.data.decode import decoded_side
from trainer.export import LIBRARIES
from trainer.export.model_card import SMALL_IN_TIMM, LibraryEncoder, Origin, model_card
from trainer.model import (
    EncoderConfig,
    TorchvisionEncoder,
    build_encoder,
    encoder_metadata,
    library_model,
    separate,
    small_options,
    timm_options,
)
from trainer.run.checkpoint_file import newest_images, saved_images
from trainer.run.directory import read_encoder, read_settings, read_summary
from trainer.settings import settings_of
from trainer.small_resnet import SmallResNet
from weightserver.common.atomic_files import atomic_write, require_empty, sha256
from weightserver.common.installing import install_advice

_REGISTRATION = f'''

@timm.models.register_model
def {SMALL_IN_TIMM}(pretrained: bool = False, **options: Any) -> nn.Module:
    """Builds the encoder of this directory by timm.create_model("local-dir:PATH", pretrained=True)."""

    def without_classes(num_classes: int = 0, **options: Any) -> nn.Module:
        return SmallResNet(**options)

    return timm.models.build_model_with_cfg(without_classes, "{SMALL_IN_TIMM}", pretrained, **options)
'''


def export_encoder(
    run: Path, library: str, output: Path, *, checkpoint: str = "", licence: str = "unknown"
) -> list[Path]:
    """Writes a run's encoder, of its end or of a checkpoint, into the new directory `output`; returns the files.

    The files are NAME-LIBRARY-xxxxxxxx.safetensors, or .onnx, with the first digits of its SHA-256 in its name; the
    whole SHA-256, for `sha256sum -c`; README.md, the model card; for timm also config.json, by which timm loads the
    directory, and of "small" the Python file that registers it.

    Raises:
        ValueError: no run, no such checkpoint, an architecture that the library does not have, a directory in use.
        OSError: the files cannot be written.
    """
    settings = read_settings(run)
    summary = {} if checkpoint else read_summary(run)
    encoder, config = read_encoder(run, checkpoint)
    converted = convert(encoder, config, library)
    # images that are not decoded for each use are evaluated whole
    resized = decoded_side(config.image_size) if settings.get("dataset") in DECODED else config.image_size
    require_empty(output)
    output.mkdir(parents=True, exist_ok=True)
    unnamed = output / "encoder.unnamed"
    if library == "onnx":
        atomic_write(unnamed, lambda path: _write_onnx(encoder, config, path))
    else:
        tensors = separate(converted.tensors)
        of_images = settings_of(DataConfig, settings).metadata(knows_labels=settings.get("labels") is not None)
        metadata = encoder_metadata(config) | of_images
        atomic_write(unnamed, lambda path: save_file(tensors, path, metadata=metadata))
    digest = sha256(unnamed)
    weights = unnamed.rename(
        output / f"{converted.name}-{library}-{digest[:8]}{'.onnx' if library == 'onnx' else '.safetensors'}"
    )
    checksum, card = weights.with_suffix(".sha256"), output / "README.md"
    saved = run / "checkpoints"
    images = saved_images(saved, int(checkpoint.removeprefix("step-"))) if checkpoint else newest_images(saved)
    origin = Origin(
        settings=settings,
        summary=summary,
        checkpoint=checkpoint,
        licence=licence,
        num_images=images.num_images if images else settings.get("num_images"),
    )
    text = model_card(
        converted,
        origin,
        image_size=config.image_size,
        resized=resized,
        is_grey=config.in_channels == 1,
        file=weights.name,
        digest=digest,
    )
    atomic_write(checksum, lambda path: path.write_text(f"{digest}  {weights.name}\n"))
    atomic_write(card, lambda path: path.write_text(text))
    files = [weights, checksum, card]
    if library == "timm":
        fields = json.dumps(_timm_config(converted, config, resized), indent=2) + "\n"
        atomic_write(output / "config.json", lambda path: path.write_text(fields))
        files.append(output / "config.json")
    if converted.name == SMALL_IN_TIMM:
        source = (
            Path(inspect.getfile(SmallResNet))
            .read_text()
            .replace("\nimport torch\n", "\nimport timm\nimport torch\n", 1)
        )
        atomic_write(output / f"{SMALL_IN_TIMM}.py", lambda path: path.write_text(source + _REGISTRATION))
        files.append(output / f"{SMALL_IN_TIMM}.py")
    return files


def _write_onnx(encoder: nn.Module, config: EncoderConfig, path: Path) -> None:
    """Writes the graph from `images`, normalised float32 [batch, C, H, W], to `features` float32 [batch, d]."""
    images = torch.zeros(2, config.in_channels, config.image_size, config.image_size)
    for name in ("onnx_ir", "onnxscript"):  # they log each step
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(
            encoder,
            (images,),
            path,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=[{0: torch.export.Dim("batch")}],
            external_data=False,
            dynamo=True,
            verbose=False,
        )


def convert(encoder: nn.Module, config: EncoderConfig, library: str) -> LibraryEncoder:
    """Converts the encoder to a library's form. Raises ValueError if the library has no such model."""
    if library not in LIBRARIES:
        raise ValueError(f"library {library!r} is unknown: give {', '.join(LIBRARIES)}")
    family, _, name = config.name.rpartition(":")
    if config.name == "none":
        raise ValueError("encoder 'none' learns nothing: there is no encoder to export")
    tensors = library_model(encoder).state_dict()
    if library == "onnx":
        if find_spec("onnxscript") is None:
            raise ValueError(f"--format onnx needs the extra of that name: {install_advice('onnx')}")
        return LibraryEncoder(library, name, config.in_channels, config.pixels, tensors)
    if config.name == "small":
        if library != "timm":
            raise ValueError(f"{library} has no model like the encoder 'small': choose timm or onnx")
        return LibraryEncoder(library, SMALL_IN_TIMM, config.in_channels, config.pixels, tensors)
    home = family or "torchvision"
    in_channels = 3 if home == "torchvision" else config.in_channels
    pixels = config.pixels.channels(in_channels)
    last = encoder.last if isinstance(encoder, TorchvisionEncoder) else ""
    if library == home:
        return LibraryEncoder(library, name, in_channels, pixels, tensors, last, config.keywords())
    name = name.partition(".")[0]  # timm: without the tag of pretrained weights
    if library != "timm" and in_channels != 3:
        raise ValueError(f"{library}'s {name} takes colour images, but this encoder grey ones: choose timm")
    counterpart = _counterpart(encoder, config, f"{library}:{name}", in_channels)
    last = counterpart.last if isinstance(counterpart, TorchvisionEncoder) else ""
    return LibraryEncoder(library, name, in_channels, pixels, tensors, last)


def _counterpart(encoder: nn.Module, config: EncoderConfig, name: str, in_channels: int) -> nn.Module:
    """The other library's model with the encoder's weights. Raises ValueError if it computes other features."""
    library = name.partition(":")[0]
    try:
        counterpart = build_encoder(replace(config, name=name, in_channels=in_channels, options=())).eval()
    except ValueError as error:
        raise ValueError(f"{library} has no counterpart of {config.name!r}: {error}") from None
    try:
        library_model(counterpart).load_state_dict(library_model(encoder).state_dict())
    except RuntimeError:
        raise ValueError(
            f"{library} has no counterpart of {config.name!r}: its model of that name has other parts"
        ) from None
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, config.in_channels, config.image_size, config.image_size, generator=generator) * 2 - 1
    with torch.no_grad():
        mine, other = encoder(images), counterpart(images.expand(-1, in_channels, -1, -1))
    if mine.shape != other.shape or not torch.allclose(mine, other, rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"{library} has no counterpart of {config.name!r}: its model of that name computes other features"
        )
    return counterpart


def _timm_config(converted: LibraryEncoder, config: EncoderConfig, resized: int) -> dict[str, Any]:
    """timm's description of a model; its scripts prepare images, whose shorter side becomes `resized` pixels, by
    pretrained_cfg."""
    is_small = converted.name == SMALL_IN_TIMM
    without = replace(config, options=())  # those of torchvision are not timm's
    options = (
        small_options(config)
        if is_small
        else timm_options(converted.name, without) | {"in_chans": converted.in_channels} | converted.options
    )
    return {
        "architecture": converted.name,
        "num_classes": 0,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": [converted.in_channels, config.image_size, config.image_size],
            "crop_pct": config.image_size / resized,
            "interpolation": "bilinear",
            "mean": list(converted.pixels.mean),
            "std": list(converted.pixels.std),
            "num_classes": 0,
        },
    }
