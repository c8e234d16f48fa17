"""Checkpoints of a run: the rows on the weight servers, and one file for all the rest, of the same step."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.data import Dataset
from trainer.distributed import Ranks
from trainer.model import load_encoder
from trainer.rows import RowStore
from trainer.run.earlier import in_todays_terms
from trainer.run.history import ImageHistory
from trainer.transfer import HostCopy
from weightserver import Checkpoint, DataLossError, FencedError, NoTableError, WeightClient
from weightserver.common.atomic_files import atomic_write, make_directory, sync, write_synced

_log = logging.getLogger(__name__)

_FORMAT = "pic-checkpoint-1"
_CHECKPOINT, _TABLE, _MARKS, _HISTORY, _RESUME_STEP = "checkpoint", "table", "marks", "images", "resume_step"
"""Where a file's metadata has the identities of the shards' checkpoint and table, the checkpoint's marks, the run's
`ImageHistory`, and the --resume-step that the run went back to before. Files of 0.1 have neither table nor marks."""
_MODEL, _MOMENTUM = "model.", "momentum."
_ENCODER = _MODEL + "encoder."
_STEM = re.compile(r"step-(\d{12})")
_PARTIAL = re.compile(_STEM.pattern + r"\..*\.partial")
# What may differ when a run goes on: where it runs, how its rows are stored ('weightserver reshard' changes that; what
# does not fit is refused by the weight servers), and what it tells.
RESUMABLE = frozenset(
    [
        "output",
        "resume",
        "extend",
        "servers",
        "num_shards",
        "rows_per_block",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "token_file",
        "insecure",
        "retry_seconds",
        "rank_timeout_seconds",
        "compile",
        "channels_last",
        "rows",
        "capacity",
        "prefetch_steps",
        "decode_threads",
        "device",
        "data_dir",  # the images themselves are compared: `ImageHistory`
        "log_every",
        "knn_every",
        "metrics_port",
        "metrics_host",
        "log_format",
        "wandb_project",
        "evaluate",
        "checkpoint_every",
        "keep_checkpoints",
    ]
)
_OF_ONE_START = frozenset(["resume", "extend", "init_encoder"])
"""What tells how a run was started, and not what it is."""


class Checkpoints:
    """Takes the checkpoints of a run, step by step consistent, and forgets old ones.

    In this order: every rank's rows are made durable; the directory says that the checkpoint was begun; every shard
    keeps the rows under its name; the file is written and renamed into place; older files are removed and their
    checkpoints released. A run that dies anywhere in between goes on from its newest file, which names the shards'
    checkpoint by its identity, so that it goes with no other. Files that belong to none of the shards' checkpoints are
    left alone.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        rows: RowStore,
        client: WeightClient | None,
        history: ImageHistory,
        *,
        on_saved: Callable[[], None],
    ) -> None:
        self._directory = config.output / "checkpoints"
        self._keep = config.keep_checkpoints
        self._resume_step = config.resume_step
        self._ranks = ranks
        self._rows = rows
        self._client = client
        self._history = history
        self._on_saved = on_saved

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Keeps what `step` finished updates made; every rank calls it. With dense rows it does nothing."""
        if self._client is None:
            return
        if not torch.stack([tensor.isfinite().all() for tensor in model.state_dict().values()]).all():
            raise ValueError(
                f"the encoder's weights overflowed before step {step}, which is not kept: try a lower --learning-rate"
            )
        self._rows.flush()
        self._ranks.barrier()
        if self._ranks.is_first:
            self._begin(step)
            self._client.checkpoint(checkpoint_name(step), step=step)
        try:
            self._ranks.barrier()  # nobody writes rows of later steps before that
            if self._ranks.is_first:
                (kept,) = (known for known in self._client.checkpoints() if known.name == checkpoint_name(step))
                self._write(kept, model, optimizer)
        except (OSError, RuntimeError):  # a disk that is full, a rank that is gone
            if self._ranks.is_first and not _path(self._directory, step).exists():
                self._client.release(checkpoint_name(step))  # it is no use without its file
            raise
        self._on_saved()
        if self._ranks.is_first:
            self._forget_old()
            _log.info("checkpoint saved", extra={"checkpoint": checkpoint_name(step), "step": step})

    def _begin(self, step: int) -> None:
        """From now on a checkpoint of the shards without its file is one in which this run has died."""
        begun = _begun(self._directory, step)
        make_directory(begun.parent)
        write_synced(begun, lambda path: None)
        sync(begun.parent)

    def _write(self, kept: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Writes the file of the shards' checkpoint `kept`, whole or not at all."""
        assert self._client is not None
        tensors = {_MODEL + name: tensor.detach() for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            momentum_buffer = optimizer.state[parameter].get("momentum_buffer")
            if momentum_buffer is not None:
                tensors[_MOMENTUM + name] = momentum_buffer.detach()
        copies = HostCopy(list(tensors.values())).wait()
        tensors = {name: copy.contiguous() for name, copy in zip(tensors, copies, strict=True)}
        path = _path(self._directory, kept.step)
        partial = path.with_suffix(f".{kept.checkpoint_id.hex()}.partial")
        metadata = {
            "format": _FORMAT,
            "step": str(kept.step),
            _CHECKPOINT: kept.checkpoint_id.hex(),
            _TABLE: self._client.table_identity().hex(),
            _MARKS: json.dumps(kept.marks),
            _HISTORY: self._history.to_json(),
        }
        if self._resume_step is not None:
            metadata[_RESUME_STEP] = str(self._resume_step)
        try:
            write_synced(partial, lambda new: save_file(tensors, new, metadata=metadata))
        except OSError as error:
            raise OSError(f"{partial} cannot be written ({error})") from None
        if kept.checkpoint_id not in {known.checkpoint_id for known in self._client.checkpoints()}:
            partial.unlink(missing_ok=True)
            raise FencedError(f"checkpoint {kept.name} was undone: another trainer goes on with this run")
        if path.exists():  # somebody put it there meanwhile
            set_aside(self._directory, [path])
        partial.replace(path)
        sync(path.parent)
        _begun(self._directory, kept.step).unlink(missing_ok=True)

    def _forget_old(self) -> None:
        assert self._client is not None
        ours = _steps_on_both(self._directory, self._client.checkpoints())
        for step in ours[: -self._keep]:
            _path(self._directory, step).unlink()
        kept = {checkpoint_name(step) for step in ours[-self._keep :]}
        for name in sorted(self._client.describe().checkpoint_names - kept):
            if _STEM.fullmatch(name):  # a run's; those too that a failure left on some of the shards
                self._client.release(name)


def resolve_resume(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """`config` with True or False for `--resume auto`, on every rank what rank 0 finds in the run's directory.

    Whatever stands in the way of going on with a run that is there is found later, and refused then: only a directory
    that no run has claimed makes a new one. Dense rows cannot go on with any.
    """
    if config.resume != "auto":
        return config
    found = ranks.is_first and config.rows != "dense" and config_path(config).exists()
    (goes_on,) = ranks.max_over_ranks([float(found)])
    if config.resume_step is not None and not goes_on:
        raise ValueError(f"{config.output} holds no run to go on with: leave --resume-step away, or name its --output")
    return replace(config, resume=bool(goes_on))


def with_pixel_scale(config: TrainConfig, dataset: Dataset, ranks: Ranks) -> TrainConfig:
    """`config` with a mean and deviation of pixels where it leaves them to be found, the same on every rank.

    They are those of the run that is resumed; else those of --init-encoder, whose weights expect them; else the images'
    own.
    """
    if config.encoder.pixel_mean is not None:
        return config
    found: dict[str, Any] = {}
    if ranks.is_first:
        found = _pixel_scale(config, dataset)
    found = json.loads(ranks.broadcast_text(json.dumps(found)))
    numbers: dict[str, Any] = {name: value and tuple(value) for name, value in found.items()}
    return replace(config, encoder=replace(config.encoder, **numbers))


def _pixel_scale(config: TrainConfig, dataset: Dataset) -> dict[str, Sequence[float] | None]:
    """pixel_mean and pixel_std as a config.json has them; None, which is -1..1, for runs of before."""
    names = ("pixel_mean", "pixel_std")
    if config.resume and config_path(config).exists():
        stored = _settings(config_path(config)).get("encoder", {})
        if names[0] not in stored:
            _log.warning("the run began with an earlier version: from now on its crops and colours are drawn otherwise")
        return {name: stored.get(name) for name in names}
    if config.init_encoder is not None:
        encoder = load_encoder(config.init_encoder)[1]
        return {name: getattr(encoder, name) for name in names}
    return dict(zip(names, dataset.pixels, strict=True))


def check_same_run(config: TrainConfig) -> None:
    """Raises ValueError unless the run in config.output is the one that `config` describes."""
    path = config_path(config)
    if not path.exists():
        raise ValueError(f"{config.output} holds no run to go on with: leave --resume away, or name another --output")
    num_local = len(list((config.output / "servers").glob("shard-*/")))
    if not config.servers and num_local not in (0, config.num_shards):
        raise ValueError(f"{config.output / 'servers'} holds {num_local} shards: give --num-shards {num_local}")
    wanted, defaults = json.loads(config.to_json()), json.loads(TrainConfig().to_json())
    stored = _with_defaults(in_todays_terms(_settings(path)), defaults)
    begins = not saved_steps(config.output / "checkpoints")  # it was killed before its first
    free = RESUMABLE | config.unused_settings().keys() | (set() if begins else {"init_encoder"})
    for name in sorted(wanted.keys() - free):
        if stored[name] != wanted[name]:
            raise ValueError(
                f"--resume goes on with the run in {config.output}, whose {name} is {stored[name]}, "
                f"not {wanted[name]}: give the same settings"
            )


def update_settings(config: TrainConfig) -> None:
    """Makes the config.json of a run that goes on say where its data and servers are now, and what else may differ."""
    stored, now = _settings(config_path(config)), json.loads(config.to_json())
    settings = stored | {name: now[name] for name in RESUMABLE - _OF_ONE_START}
    atomic_write(config_path(config), lambda path: path.write_text(json.dumps(settings, indent=2) + "\n"))


def config_path(config: TrainConfig) -> Path:
    """The file by which a run claims its directory."""
    return config.output / "config.json"


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path} is no run's config.json: put it back, or choose another --output") from None


def _with_defaults(stored: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, with what this version added to them since."""
    return {
        name: _with_defaults(stored.get(name, {}), default) if isinstance(default, dict) else stored.get(name, default)
        for name, default in defaults.items()
    }


def step_to_resume(directory: Path, client: WeightClient, asked: int | None = None) -> int | None:
    """The step to go on from: that of the newest file in `directory`, or the older one that `asked` names.

    None for a run that has died before its first checkpoint. A run that has gone on from the step `asked`, and that the
    same command starts again, goes on from its newest file.

    Raises:
        ValueError: the shards do not all keep the file's checkpoint, or have newer ones than there are files.
        DataLossError: a shard's data does not descend from the file's checkpoint: it is an older copy.
    """
    kept, steps = client.checkpoints(), saved_steps(directory)
    both = _steps_on_both(directory, kept)
    if not steps:
        if asked is None and _is_untouched(client):
            return None
        raise ValueError(
            f"there is no checkpoint to go on from: {directory} has no file, the weight servers keep "
            f"{[known.name for known in kept]}: are these the run's servers?"
        )
    newest, path = steps[-1], _path(directory, steps[-1])
    if asked is not None:
        if newest in both and _metadata(path).get(_RESUME_STEP) == str(asked):
            _log.warning("the run has gone on from step %d before: it goes on from step %d, its newest", asked, newest)
            return newest
        if asked not in both:
            raise ValueError(
                f"the run cannot go on from step {asked}: of steps {both} there are both a file in {directory} and its "
                "checkpoint on the weight servers"
            )
        return asked
    or_older = f", or give --resume-step {both[-1]}, the newest whose checkpoint they have" if both else ""
    check_descent(directory, newest, client, otherwise=or_older)
    if newest not in both:
        raise ValueError(
            f"the weight servers do not have the checkpoint of {path}, the run's newest file, as older copies of them "
            f"would not: start those that have it{or_older}"
        )
    later = sorted(known.step for known in kept if known.step > newest and _STEM.fullmatch(known.name))
    if later and not (len(later) == 1 and _may_have_died_in(directory, later[0], client)):
        raise ValueError(
            f"the weight servers have checkpoints of steps {later}, and {directory} has none of these files, as an "
            f"older copy of it would not: put them there, or give --resume-step {newest} to give up what came later"
        )
    return newest


def _may_have_died_in(directory: Path, step: int, client: WeightClient) -> bool:
    """Whether a run may have left this checkpoint on the shards without ever having had its file: it was begun, and
    nothing came after it, since nobody ends another step before the file is there."""
    return _begun(directory, step).exists() and client.describe().clock <= step


def check_descent(directory: Path, step: int, client: WeightClient, *, otherwise: str) -> None:
    """Holds the weight servers to have had the checkpoint of a file; `otherwise` ends the lines that tell what to do.

    Raises:
        ValueError: they hold another table.
        DataLossError: a shard's data does not descend from the checkpoint.
    """
    path = _path(directory, step)
    metadata = _metadata(path)
    with contextlib.suppress(NoTableError):
        if metadata.get(_TABLE, "") not in ("", client.table_identity().hex()):
            raise ValueError(
                f"the weight servers hold another table than that of {path}: start the run's servers{otherwise}"
            )
    marks = json.loads(metadata.get(_MARKS, "[]"))
    if len(marks) == len(client.marks()):  # others come from 'reshard', and are known by the checkpoint alone
        try:
            client.expect(marks)
        except DataLossError as error:
            raise DataLossError(f"{error}{otherwise}") from None


def _steps_on_both(directory: Path, kept: Sequence[Checkpoint]) -> list[int]:
    """Those, ascending, whose file belongs to one of the checkpoints that all shards keep."""
    known = {(checkpoint.name, checkpoint.checkpoint_id.hex()) for checkpoint in kept}
    found = []
    for step in saved_steps(directory):
        with contextlib.suppress(ValueError):  # a file that cannot be read
            if (checkpoint_name(step), _metadata(_path(directory, step)).get(_CHECKPOINT)) in known:
                found.append(step)
    return found


def _is_untouched(client: WeightClient) -> bool:
    try:
        info = client.describe()
    except NoTableError:
        return True
    return info.clock == 0 and info.rows_stored == 0


def set_newer_aside(directory: Path, step: int, results: Sequence[Path], metrics: Path) -> None:
    """Sets aside the files of checkpoints after `step`, and the run's `results`, beside a copy of its `metrics`."""
    moved = [_path(directory, later) for later in reversed(saved_steps(directory)) if later > step]
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
        path.rename(aside / path.name)
    for changed in {aside, directory, *(path.parent for path in moved)}:
        sync(changed)
    _log.warning("set aside in %s: %s", aside, ", ".join(path.name for path in [*moved, *copied]))


def remove_unfinished(directory: Path) -> None:
    """Removes what runs that were killed in a checkpoint have left."""
    for partial in directory.glob("*.partial"):
        if _PARTIAL.fullmatch(partial.name):
            partial.unlink()


def saved_history(directory: Path, step: int) -> ImageHistory | None:
    """What the file of a checkpoint says of the run's images; None where there is no file, or an older version's."""
    path = _path(directory, step)
    stored = _metadata(path).get(_HISTORY) if path.exists() else None
    return ImageHistory.from_json(stored) if stored else None


def history_to_resume(directory: Path, asked: int | None) -> ImageHistory | None:
    """`saved_history` of the file that a run goes on from: of the newest, or the older one that `asked` names."""
    return (None if asked is None else saved_history(directory, asked)) or newest_history(directory)


def newest_history(directory: Path) -> ImageHistory | None:
    """`saved_history` of the newest checkpoint file; None without any."""
    steps = saved_steps(directory)
    return saved_history(directory, steps[-1]) if steps else None


def note_history(directory: Path, step: int, history: ImageHistory) -> None:
    """Makes the file of a checkpoint say what images the run goes on with from there."""
    path = _path(directory, step)
    if path.exists() and saved_history(directory, step) != history:
        metadata = _metadata(path) | {_HISTORY: history.to_json()}
        atomic_write(path, lambda partial: save_file(_tensors(path), partial, metadata=metadata))


def saved_steps(directory: Path) -> list[int]:
    """Steps of the checkpoint files, ascending."""
    found = (_STEM.fullmatch(path.stem) for path in directory.glob("*.safetensors"))
    return sorted(int(match.group(1)) for match in found if match)


def load(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes model and optimizer what they were after `step` updates.

    Raises:
        ValueError: the file is damaged, or of another format or model.
    """
    path = _path(directory, step)
    if not path.exists():
        raise ValueError(f"{path} is not on this machine: all ranks of a run that goes on need its directory")
    metadata = _metadata(path)
    if (metadata.get("format"), metadata.get("step")) != (_FORMAT, str(step)):
        raise ValueError(f"{path} is no checkpoint of step {step} in format {_FORMAT}")
    try:
        model.load_state_dict(_tensors(path, _MODEL))
    except RuntimeError as error:
        raise _unreadable(path, error) from None
    momentum = _tensors(path, _MOMENTUM)
    for name, parameter in model.named_parameters():
        if name in momentum:
            # With the strides of the weights, which files do not keep and CUDA's fused SGD insists on.
            optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter.detach()).copy_(momentum[name])


def encoder_tensors(directory: Path, name: str) -> dict[str, Tensor]:
    """The encoder's weights by name, of the checkpoint step-…; ValueError where there is none, or it is damaged."""
    path = directory / f"{name}.safetensors"
    if not _STEM.fullmatch(name) or not path.exists():
        known = ", ".join(checkpoint_name(step) for step in saved_steps(directory)) or "none"
        raise ValueError(f"{directory} has no checkpoint {name!r}: it has {known}")
    return _tensors(path, _ENCODER)


def _tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Those whose names begin with `prefix`, by the rest of the name."""
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} cannot be read ({str(error).splitlines()[0]}): put a copy of it back, or go on from an older one by "
        "--resume-step"
    )


def checkpoint_name(step: int) -> str:
    """Under which the shards keep it; the stem of its file."""
    return f"step-{step:012d}"


def _begun(directory: Path, step: int) -> Path:
    """The file that is there from before the shards' checkpoint until the trainer's file is."""
    return directory / f"{checkpoint_name(step)}.begun.partial"


def _path(directory: Path, step: int) -> Path:
    return directory / f"{checkpoint_name(step)}.safetensors"
