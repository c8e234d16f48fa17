"""Resuming a run: which step to resume from, and whether directory, settings and weight servers belong together."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from trainer.config import LENGTH, OF_ONE_START, RESUMABLE, TrainConfig
from trainer.data.config import usual
from trainer.run.checkpoint_file import (
    RESUME_STEP,
    STEM,
    begun_path,
    file_path,
    read_metadata,
    saved_rows,
    saved_steps,
    steps_on_both,
)
from trainer.run.directory import CONFIG_FILE, flat, read_settings
from trainer.settings import flag
from weightserver import Checkpoint, DataLossError, NoTableError, WeightClient
from weightserver.common.atomic_files import atomic_write
from weightserver.torch import Ranks

_log = logging.getLogger(__name__)

_OF_ALL_RANKS = {"evaluate", "knn_every"}
"""Resumable settings that `pic train FOLDER` chooses, and by which ranks work together."""


def resolve_resume(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Replaces `--resume auto` by True or False, on every rank by what rank 0 finds in the run's directory. All ranks
    take rank 0's settings: it alone needs that directory, and what is chosen for a machine differs. In a new run they
    keep what may differ when it is resumed, such as paths and ports.

    Only a directory that no run has claimed starts a new run; anything that prevents an existing run from being resumed
    is found and refused later. Dense rows cannot be resumed.
    """
    if config.run.resume != "auto":
        return _as_on_first(config, ranks)
    found = ranks.is_first and config.rows.rows != "dense" and (config.run.output / CONFIG_FILE).exists()
    (resumes,) = ranks.max_over_ranks([float(found)])
    if config.run.resume_step is not None and not resumes:
        raise ValueError(f"{config.run.output} holds no run to resume: omit --resume-step, or give the run's --output")
    config = config.with_settings(resume=bool(resumes))
    config.check()  # a new run may have no setting without effect
    return _as_on_first(config, ranks)


def _as_on_first(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """Rank 0's settings, but for those of this start, or, in a new run, of this machine."""
    settings = ranks.of_first(lambda: json.loads(config.to_json()))
    if ranks.is_first:
        return config
    of_rank = OF_ONE_START if config.run.resume else (OF_ONE_START | RESUMABLE) - _OF_ALL_RANKS
    own = {name: value for name, value in config.settings().items() if name in of_rank}
    return TrainConfig.of_run(settings).with_settings(**own)


def check_same_run(config: TrainConfig, num_images: int) -> None:
    """Raises ValueError unless the run in config.run.output is the one that `config` describes, at least as long."""
    if not (config.run.output / CONFIG_FILE).exists():
        raise ValueError(f"{config.run.output} holds no run to resume: omit --resume, or give another --output")
    check_local_servers(config)
    wanted = json.loads(config.to_json())
    run = run_settings(config.run.output)
    if run.rows.rows == "dense":
        raise ValueError(
            f"{config.run.output} holds a run with --rows dense, which saves no checkpoints: choose another "
            "--output, or delete it"
        )
    stored = json.loads(run.to_json())  # with the defaults of settings that were added since
    free = RESUMABLE | LENGTH | config.unused_settings()
    had, given = ({name: settings[name] for name in wanted.keys() - free} for settings in (stored, wanted))
    had, given = flat(had), flat(given)
    for name in sorted(had.keys() | given.keys()):
        before, now = usual(name, had.get(name)), usual(name, given.get(name))
        if before != now:
            raise ValueError(
                f"--resume resumes the run in {config.run.output}, whose {flag(name)} is {before}, not {now}: "
                "give the same settings"
            )
    _check_length(config, run, num_images)


def check_local_servers(config: TrainConfig) -> None:
    """Raises ValueError if the run's directory holds another number of local weight servers."""
    servers = config.run.output / "servers"
    found = {len(list(servers.glob("shard-*/")))}
    if config.rows.rows == "dense" or config.servers.servers or found == {0}:
        return
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        found.add(json.loads((servers / "cluster.json").read_text())["num_shards"])  # also of shards that are missing
    if config.servers.num_shards not in found:
        raise ValueError(f"{servers} holds {max(found)} shards: give --num-shards {max(found)}")


def _check_length(config: TrainConfig, stored: TrainConfig, num_images: int) -> None:
    """Raises ValueError if the run would become shorter."""
    had, has = stored.optimization.num_steps(num_images), config.optimization.num_steps(num_images)
    if has < had:
        unit = "epochs" if stored.optimization.steps is None else "steps"
        raise ValueError(
            f"--resume resumes the run in {config.run.output}, which has a length of {had:,} updates, not {has:,}: it "
            f"can become longer, not shorter: give {flag(unit)} {getattr(stored.optimization, unit):g}"
        )


def run_settings(output: Path) -> TrainConfig:
    """The settings of the run in a directory."""
    return TrainConfig.of_run(read_settings(output))


def update_settings(config: TrainConfig) -> None:
    """Writes the settings that changed on resuming, such as paths and addresses, to the run's config.json."""
    stored, now = read_settings(config.run.output), json.loads(config.to_json())
    settings = stored | {name: now[name] for name in (RESUMABLE | LENGTH) - OF_ONE_START}
    text = json.dumps(settings, indent=2) + "\n"
    atomic_write(config.run.output / CONFIG_FILE, lambda path: path.write_text(text))


def step_to_resume(directory: Path, client: WeightClient, asked: int | None = None) -> int | None:
    """The step to resume from: that of the newest file in `directory`, or the older one that `asked` names.

    None for a run that died before its first checkpoint. If the run was resumed from step `asked` before, and the same
    command is started again, it resumes from its newest file.

    Raises:
        ValueError: the shards do not all keep the file's checkpoint, or have newer ones than there are files.
        DataLossError: a shard's data does not descend from the file's checkpoint: it is an older copy.
    """
    steps = saved_steps(directory)
    if not steps and asked is None and _is_untouched(client):
        return None
    kept = client.checkpoints()
    if not steps:
        raise ValueError(
            f"there is no checkpoint to resume from: {directory} has no file, the weight servers keep "
            f"{[known.name for known in kept]}: are these the run's servers?"
        )
    both, newest = steps_on_both(directory, kept), steps[-1]
    if asked is not None:
        return _asked_step(asked, newest, both, directory)
    try:
        saved_rows(directory, newest).check_held(client)
    except (ValueError, DataLossError) as error:
        or_older = f", or give --resume-step {both[-1]}, the newest whose checkpoint they have" if both else ""
        raise type(error)(f"{file_path(directory, newest)}: {error}{or_older}") from None
    _check_no_later(directory, newest, kept, client)
    return newest


def _asked_step(asked: int, newest: int, both: Sequence[int], directory: Path) -> int:
    """The step to resume from if the user asked for one."""
    if newest in both and read_metadata(file_path(directory, newest)).get(RESUME_STEP) == str(asked):
        steps = {"asked": asked, "step": newest}
        _log.warning("the run was resumed from step %(asked)d before: resuming from step %(step)d, its newest", steps)
        return newest
    if asked not in both:
        raise ValueError(
            f"the run cannot be resumed from step {asked}: only steps {both} have both a file in {directory} and a "
            "checkpoint on the weight servers"
        )
    return asked


def _check_no_later(directory: Path, newest: int, kept: Sequence[Checkpoint], client: WeightClient) -> None:
    """Raises ValueError if the shards keep later checkpoints than a run that died in one can have left."""
    later = sorted(known.step for known in kept if known.step > newest and STEM.fullmatch(known.name))
    if later and not (len(later) == 1 and _may_have_died_in(directory, later[0], client)):
        raise ValueError(
            f"the weight servers have checkpoints of steps {later}, and {directory} has none of these files; it may be "
            f"an older copy: put them there, or give --resume-step {newest} to discard what came later"
        )


def _may_have_died_in(directory: Path, step: int, client: WeightClient) -> bool:
    """Whether a run may have left this checkpoint on the shards before its file existed: it was begun, and no update
    followed, since a run finishes no further step before the file exists."""
    return begun_path(directory, step).exists() and client.describe().clock <= step


def _is_untouched(client: WeightClient) -> bool:
    try:
        info = client.describe()
    except NoTableError:
        return True
    return info.clock == 0 and info.rows_stored == 0
