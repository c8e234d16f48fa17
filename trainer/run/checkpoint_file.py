"""The trainer's checkpoint files: encoder, optimizer, and the head's state, which names a checkpoint of the rows.

checkpoints/step-NNNNNNNNNNNN.safetensors      a complete file
checkpoints/step-….begun.partial               a checkpoint was started, its file is not complete yet
checkpoints/set-aside-…                        files that a resumed run replaced, for a person to look at
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainer.distributed import tensors_of_first
from trainer.model import separate
from trainer.run.run_images import RunImages
from weightserver import Checkpoint
from weightserver.common.atomic_files import sync
from weightserver.torch import HostCopy, Ranks, SavedRows

_log = logging.getLogger(__name__)

FORMAT = "pic-checkpoint-2"
IMAGES, RESUME_STEP = "images", "resume_step"
"""Keys of a file's metadata: the run's `RunImages`, and the --resume-step that the run was last resumed from."""
MODEL, MOMENTUM, STATE, GROUP, HEAD = "model.", "momentum.", "optimizer.", "optimizer_group.", "head._extra_state"
"""Prefixes of the tensors' names, and the name of the head's state. Of a parameter NAME: momentum.NAME, otherwise
optimizer.exp_avg.NAME; of the optimizer's first group: optimizer_group.0.step."""
_ENCODER = MODEL + "encoder."
STEM = re.compile(r"step-(\d{12})")
_PARTIAL = re.compile(STEM.pattern + r"\..*\.partial")


def checkpoint_name(step: int) -> str:
    """Name of the shards' checkpoint, and stem of its file."""
    return f"step-{step:012d}"


def file_path(directory: Path, step: int) -> Path:
    return directory / f"{checkpoint_name(step)}.safetensors"


def begun_path(directory: Path, step: int) -> Path:
    """The marker that exists from before the shards' checkpoint until the trainer's file is complete."""
    return directory / f"{checkpoint_name(step)}.begun.partial"


def saved_steps(directory: Path) -> list[int]:
    """Steps of the checkpoint files, ascending."""
    found = (STEM.fullmatch(path.stem) for path in directory.glob("*.safetensors"))
    return sorted(int(match.group(1)) for match in found if match)


def steps_on_both(directory: Path, kept: Sequence[Checkpoint]) -> list[int]:
    """Steps, ascending, whose file belongs to one of the checkpoints that all shards keep."""
    found = []
    for step in saved_steps(directory):
        with contextlib.suppress(ValueError):  # an unreadable file
            if (saved := saved_rows(directory, step)).name == checkpoint_name(step) and saved.is_among(kept):
                found.append(step)
    return found


def load(directory: Path, step: int, ranks: Ranks) -> dict[str, Tensor]:
    """The tensors in the file of a checkpoint by name, which rank 0 reads and sends to the others.

    Raises:
        ValueError: the file is damaged, or of another format.
    """

    def read() -> dict[str, Tensor]:
        path = file_path(directory, step)
        if read_metadata(path).get("step") != str(step):
            raise ValueError(f"{path} is not a checkpoint of step {step}")
        return _read_tensors(path)

    return tensors_of_first(read, ranks)


def tensors_to_save(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and the optimizer's state under their names in the file, copied to the host."""
    tensors = {MODEL + name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if value is not None:
                tensors[_prefix(key) + name] = value.detach()
    for number, group in enumerate(optimizer.param_groups):
        if "step" in group:  # of timm's Lamb: a tensor, or, in its older versions, an int
            tensors[f"{GROUP}{number}.step"] = torch.as_tensor(group["step"])
    copies = HostCopy(list(tensors.values())).wait()
    return separate(dict(zip(tensors, copies, strict=True)))


def _prefix(key: str) -> str:
    """What stands before a parameter's name for the value `key` of its optimizer's state."""
    return MOMENTUM if key == "momentum_buffer" else f"{STATE}{key}."


def give_state(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives model and optimizer what `tensors_to_save` found. Raises RuntimeError for the state of another model."""
    model.load_state_dict(_named(tensors, MODEL))
    keys = {name.split(".")[1] for name in tensors if name.startswith(STATE)} | {"momentum_buffer"}
    for key in keys:
        for name, value in _named(tensors, _prefix(key)).items():
            parameter = model.get_parameter(name)
            # Copied into the strides of the weights: files do not store strides, and CUDA's fused SGD requires them.
            # A number of steps stays on the host.
            state = value if key == "step" else torch.empty_like(parameter.detach()).copy_(value)
            optimizer.state[parameter][key] = state
    for name, value in _named(tensors, GROUP).items():
        number, _, key = name.partition(".")
        optimizer.param_groups[int(number)][key] = value if value.is_floating_point() else int(value)


def restore(tensors: Mapping[str, Tensor], path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`give_state` of the tensors of `path`. Raises ValueError for those of another model."""
    try:
        give_state(tensors, model, optimizer)
    except RuntimeError as error:
        raise _unreadable(path, error) from None


def saved_rows(directory: Path, step: int) -> SavedRows:
    """What identifies the rows of a checkpoint. Raises ValueError for a file that cannot be read, or is none."""
    path = file_path(directory, step)
    if "" not in (found := _read_tensors(path, HEAD)):
        raise ValueError(f"{path} is not a checkpoint in format {FORMAT}: use the version of the program that wrote it")
    return SavedRows.from_state(found[""])


def encoder_tensors(directory: Path, name: str) -> dict[str, Tensor]:
    """The encoder's weights by name, from the checkpoint step-…. Raises ValueError if it is missing or damaged."""
    path = directory / f"{name}.safetensors"
    if not STEM.fullmatch(name) or not path.exists():
        known = ", ".join(checkpoint_name(step) for step in saved_steps(directory)) or "none"
        raise ValueError(f"{directory} has no checkpoint {name!r}: it has {known}")
    return _read_tensors(path, _ENCODER)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a checkpoint file. Raises ValueError if it cannot be read, or is of another format."""
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint in format {FORMAT}: use the version of the program that wrote it")
    return metadata


def _read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file whose names start with `prefix`, by the rest of the name."""
    with _opened(path) as file:
        return _named({name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}, prefix)  # noqa: SIM118


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of tensors, by `safe_open`. Raises ValueError if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} cannot be read ({str(error).splitlines()[0]}): restore a copy of it, or resume from an older "
        "checkpoint by --resume-step"
    )


def saved_images(directory: Path, step: int) -> RunImages:
    """The images of the run in the file of a checkpoint."""
    return RunImages.from_json(read_metadata(file_path(directory, step))[IMAGES])


def newest_images(directory: Path) -> RunImages | None:
    """`saved_images` of the newest checkpoint file; None without any."""
    steps = saved_steps(directory)
    return saved_images(directory, steps[-1]) if steps else None


def num_images_to_resume(directory: Path, asked: int | None) -> int:
    """The number of images that a run is resumed with: as in the newest file, or the older one that `asked` names; 0
    without a file."""
    if asked is not None and file_path(directory, asked).exists():
        return saved_images(directory, asked).num_images
    images = newest_images(directory)
    return images.num_images if images else 0


def set_newer_aside(directory: Path, step: int, results: Sequence[Path], metrics: Path) -> None:
    """Sets aside checkpoint files after `step` and the run's `results`, together with a copy of its `metrics`."""
    moved = [file_path(directory, later) for later in reversed(saved_steps(directory)) if later > step]
    moved += [path for path in results if path.exists()]
    if moved:
        set_aside(directory, moved, [metrics] if metrics.exists() else [])


def set_aside(directory: Path, moved: Sequence[Path], copied: Sequence[Path] = ()) -> None:
    """Moves and copies files into a new directory in `directory`, for a person to look at and remove."""
    directory.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=time.strftime("set-aside-%Y-%m-%dT%H-%M-%S-", time.gmtime()), dir=directory))
    shutil.copymode(directory, aside)
    for path in copied:
        shutil.copy2(path, aside)
        sync(aside / path.name)
    for path in moved:
        try:
            path.rename(aside / path.name)
        except OSError:  # checkpoints/ may be a link to another disk
            shutil.copy2(path, aside)
            sync(aside / path.name)
            path.unlink()
    for changed in {aside, directory, *(path.parent for path in moved)}:
        sync(changed)
    names = ", ".join(path.name for path in [*moved, *copied])
    _log.warning("set aside in %(directory)s: %(files)s", {"directory": str(aside), "files": names})


def remove_unfinished(directory: Path) -> None:
    """Removes the partial files of runs that were killed during a checkpoint."""
    for partial in directory.glob("*.partial"):
        if _PARTIAL.fullmatch(partial.name):
            partial.unlink()
