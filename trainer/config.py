"""A run's settings, the presets, and the command line made from them."""

from __future__ import annotations

import difflib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import tyro

from trainer.compute import ComputeConfig
from trainer.data.augmentation_config import AugmentationConfig
from trainer.data.config import DataConfig, ViewsConfig
from trainer.encoder_config import EncoderConfig, ModelConfig
from trainer.loss import LossConfig
from trainer.optimization import OptimizationConfig
from trainer.rows_config import RowsConfig, ServersConfig
from trainer.run.config import OnlineProbeConfig, ReportConfig, RunConfig
from trainer.run.directory import CONFIG_FILE, RUN_FORMAT, read_settings
from trainer.schedule import SamplingConfig
from trainer.settings import Settings, flag, leaves, problems_of, set_help_texts, settings_of
from trainer.wrong_arguments import parsed_or_exit
from weightserver.common.atomic_files import EMPTY_PATH
from weightserver.common.logs import print_error

if TYPE_CHECKING:
    from trainer.data.augment import Augmentation
    from weightserver.torch import NegativeSampler

PARTS: tuple[type[Settings], ...] = (
    DataConfig,
    RunConfig,
    RowsConfig,
    ServersConfig,
    OptimizationConfig,
    SamplingConfig,
    ModelConfig,
    LossConfig,
    ViewsConfig,
    ComputeConfig,
    ReportConfig,
    OnlineProbeConfig,
)


# A dataclass collects its fields from the last base to the first, which is the order of --help.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    OnlineProbeConfig,
    ReportConfig,
    ComputeConfig,
    ViewsConfig,
    LossConfig,
    ModelConfig,
    SamplingConfig,
    OptimizationConfig,
    ServersConfig,
    RowsConfig,
    RunConfig,
    DataConfig,
):
    """All settings of one run, flat: one keyword argument, flag and key of config.json for each.

    Each part is defined and checked in the module that uses it; this class adds what depends on several parts.
    """

    def check(self) -> None:
        """Raises ValueError for settings out of range or that contradict each other; a line for each problem."""
        problems, _ = self.problems()
        if problems:
            raise ValueError("\n".join(problems))

    def problems(self) -> tuple[list[str], set[str]]:
        """A line for each setting out of range and for settings that contradict each other; and the names of those out
        of range."""
        found = [problems_of(part, self) for part in PARTS]
        of_parts = [problem for problems, _ in found for problem in problems]
        at_fault = {name for _, names in found for name in names}
        return of_parts or [problem for problem in self._problems_between_parts() if problem], at_fault

    def _problems_between_parts(self) -> Iterator[str]:
        if self.rows == "dense" and self.resume is True:
            yield "--rows dense saves no checkpoints: omit --resume"
        if self.rows == "dense" and self.servers:
            yield "--rows dense keeps the rows in the trainer: omit --servers, or use --rows resident"
        if self.init == "embedding" and self.negatives != "recent":
            yield (
                f"--negatives {self.negatives} would include classes that were not met, which --init embedding leaves "
                "out: choose --negatives recent, or --init random"
            )
        if self.cutmix and self.init == "embedding":
            yield "--cutmix shows two images at once, at which no row of --init embedding can begin: omit one of them"
        if self.cutmix and self.online_probe:
            yield "--cutmix shows two images at once, but --online-probe learns one label of each: omit one of them"
        if self.labels is not None and self.extend:
            yield "--extend adds images, but --labels has no rows for new classes: omit --extend"
        if self.image_order is not None and self.extend:
            yield "--extend adds images, but --image-order has no places for them: omit --extend"
        if self.small_crops and self.small_crop_size >= self.side_of_views:
            yield (
                f"--small-crop-size {self.small_crop_size} is not below the {self.side_of_views} px of a view: "
                "give a smaller one"
            )
        if not self.resume:  # a resumed run keeps its settings, even if they have no effect
            yield from self._options_without_effect()
            yield self.problem_of_areas()

    def _options_without_effect(self) -> Iterator[str]:
        for name, needed in self.unused_settings().items():
            if getattr(self, name) != getattr(TrainConfig, name):
                yield f"{flag(name)} {getattr(self, name)} is for {needed}: omit it, or give {needed} too"

    def unused_settings(self) -> dict[str, str]:
        """Settings that have no effect with the others, each with the option that it needs."""
        return {name: needed for part in PARTS for name, needed in part.unused_settings(self).items()}

    @property
    def side_of_views(self) -> int:
        """Side of a view in pixels."""
        return self.encoder.image_size if self.view_size is None else self.view_size

    def augmentations(self) -> list[Augmentation]:
        """One augmentation for each view of an image, then one for each of its small crops.

        Raises:
            ValueError: a size or an area out of range.
        """
        return self.augmentations_of(self.encoder, compiled=self.compile)

    def negative_sampler(self, num_rows: int) -> NegativeSampler:
        """The choice of a step's classes among `num_rows`."""
        from weightserver.torch import NegativeSampler

        return NegativeSampler(
            self.num_negatives,
            num_rows=num_rows,
            rows_per_block=self.rows_per_block,
            kind=self.negatives,
            recent_share=self.recent_share,
            only_met=self.init == "embedding",
            seed=self.seed,
        )

    def resident_rows(self, num_images: int, num_classes: int | None = None) -> int:
        """Number of rows to keep resident, on all ranks together. Without `num_classes` each image is its own class.

        Raises:
            ValueError: --capacity is too small for these steps.
        """
        num_rows = num_images if num_classes is None else num_classes
        needed, default = self.negative_sampler(num_rows).resident_rows(
            self.visit_schedule(num_images) if num_classes is None else None, self.batch_size, self.prefetch_steps
        )
        if self.capacity is not None and self.capacity < needed:
            raise ValueError(
                f"--capacity {self.capacity} is too small for {self.num_negatives} active rows and "
                f"{self.prefetch_steps} steps of prefetching: give at least {needed}, or fewer --prefetch-steps"
            )
        return min(num_rows, default if self.capacity is None else self.capacity)

    def to_json(self) -> str:
        """The text of the run's config.json."""
        settings = {"format": RUN_FORMAT} | asdict(self)
        del settings["resume_step"]  # concerns one start, not the run
        if self.warmup_epochs is None:
            settings["warmup_fraction"] = self._warmup_fraction  # also if it is the default
        return json.dumps(settings, indent=2, default=str) + "\n"


def unused_settings(settings: Mapping[str, Any]) -> set[str]:
    """Names of the settings in a run's config.json that had no effect with the others, whichever version wrote it."""
    complete: Any = SimpleNamespace(**vars(TrainConfig()) | dict(settings))
    unused = {name for part in PARTS for name in part.unused_settings(complete)}
    if complete.steps is not None:
        unused.add("epochs")
    unused.add("warmup_fraction" if complete.warmup_epochs is not None else "warmup_epochs")
    return unused


RESUMABLE = frozenset(field.name for field in fields(TrainConfig) if field.metadata.get("resumable"))
"""Settings that may differ when a run is resumed: where it runs, how its rows are stored, and what it reports. The
weight servers refuse those that do not fit how they store the rows."""
LENGTH = frozenset(["epochs", "steps"])
"""Settings by which a resumed run may become longer."""


# The paper's settings for ImageNet-1K (Section 4.1, and Experimental Settings in its appendix), eight GPUs sharing a
# batch of 512; for ImageNet-11K "the same pre-training setting [...] with only dataset changed".
# docs/paper-to-code.md lists them one by one.
_IMAGENET = TrainConfig(
    dataset="packed",
    output=Path("runs/imagenet-1k"),
    epochs=200.0,
    warmup_epochs=5.0,
    batch_size=512,
    num_negatives=65_536,
    window_size=131_072,
    window_stride=16_384,
    temperature=0.2,
    learning_rate=0.06,
    momentum=0.9,
    weight_decay=1e-4,
    encoder=EncoderConfig(name="resnet50", in_channels=3, image_size=224),
    precision="bfloat16",
    evaluate=False,
)

_FASHION_MNIST = TrainConfig(
    encoder=EncoderConfig(stem_stride=2, pool_size=3),  # small centred images: positions are informative
    augmentation=AugmentationConfig(min_scale=0.5, blur_probability=0.0),
    window_stride=64,
)
# A sixth of the images, so that rows leave the window and return several times within minutes; few classes a step and a
# strong decay, so that it matters where they return to. In so short a run an encoder of two stages, whose features keep
# more of the images' layout, is better than one of three, and takes 0.6 of its time.
_DEMO = replace(
    _FASHION_MNIST,
    output=Path("runs/demo"),
    encoder=replace(_FASHION_MNIST.encoder, blocks=(1, 1), pool_size=4),
    num_images=10_000,
    epochs=32.0,
    num_negatives=128,
    window_size=2048,
    window_stride=256,
    weight_decay=3e-3,
)
PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "fashion-mnist": ("Fashion-MNIST, 60,000 images of 28×28: minutes on a CPU", _FASHION_MNIST),
    "demo": ("10,000 images of Fashion-MNIST, with the settings of `make demo`", _DEMO),
    "imagenet-1k": (
        "packed ImageNet-1K, as in the paper: ResNet-50, 512 images a step, 200 epochs; give --data-dir",
        _IMAGENET,
    ),
    "imagenet-11k": (
        "packed ImageNet-11K or 22K, or any other large set: the same recipe for 100 epochs, the paper's longest for "
        "ImageNet-11K (its others: --epochs 25, --epochs 50); give --data-dir",
        replace(_IMAGENET, output=Path("runs/imagenet-11k"), epochs=100.0),
    ),
    "images": (
        "a folder of your own images: all settings that are not given are chosen from the images and the machine; give "
        "--data-dir",
        TrainConfig(
            dataset="folder",
            output=Path("runs/images"),
            encoder=EncoderConfig(in_channels=3, image_size=64, stem_stride=2),
            evaluate=False,
        ),
    ),
    "synthetic": (
        "generated images without labels, in any number: to measure rows at scale",
        TrainConfig(
            dataset="synthetic",
            num_images=1_000_000,
            output=Path("runs/synthetic"),
            steps=1_000,
            batch_size=512,
            num_negatives=65_536,
            window_size=131_072,
            window_stride=16_384,
            learning_rate=0.06,
            encoder=EncoderConfig(in_channels=3, image_size=32, stem_stride=2),
            evaluate=False,
        ),
    ),
}

FLAGS = tuple(flag(name) for name, _ in leaves(TrainConfig()))
"""All options of a run; --no-… of those that are switches come with them."""

_DESCRIPTION = """Train an encoder by instance classification.

Instead of a preset:
  FOLDER                 train on a folder of your own images
  --resume --output RUN  resume a run with all of its settings
  --config FILE          read the settings that --print-config wrote"""
_OF_FILES = "--print-config writes the settings as TOML, and --config FILE reads them."


def parse_config(
    arguments: Sequence[str] | None = None,
    *,
    default: TrainConfig | None = None,
) -> TrainConfig:
    """Parses a command line, PRESET --OPTIONS; exits with status 2 if it is invalid.

    With --resume, all settings that are not given are those of the run in --output, and the preset may be omitted.
    `default` replaces the preset's settings.
    """
    for settings in (*PARTS, EncoderConfig, AugmentationConfig):
        set_help_texts(settings)
    arguments = _with_correction_named(sys.argv[1:] if arguments is None else arguments)
    _refuse_empty_paths(arguments)
    preset = arguments[0] if arguments else ""
    if preset in PRESETS:
        config = _parsed(preset, default or PRESETS[preset][1], arguments[1:])
        return _parsed(preset, _of_run(config, arguments), arguments[1:]) if _is_there(config) else config
    if any(argument.partition("=")[0] == "--resume" for argument in arguments) and preset.startswith("-"):
        config = _parsed("", TrainConfig(), arguments)
        if _is_there(config):
            return _parsed("", _of_run(config, arguments), arguments)
        print_error(f"trainer: {config.output} holds no run to resume: give its --output, or a preset to start one")
        sys.exit(2)
    if preset and not preset.startswith("-"):
        _refuse_preset(preset)

    def parse(options: list[str]) -> TrainConfig:
        return tyro.extras.overridable_config_cli(PRESETS, prog="pic train", description=_DESCRIPTION, args=options)

    return parsed_or_exit(parse, arguments, command="trainer", flags=FLAGS)


def _parsed(preset: str, default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    what = f"Train on {PRESETS[preset][0].partition(':')[0]}." if preset else "Resume a run."  # is not wrapped
    what += f"\n{_OF_FILES}"

    def parse(options: list[str]) -> TrainConfig:
        return tyro.cli(
            TrainConfig,
            prog=f"pic train {preset}".rstrip(),
            description=what,
            args=options,
            default=_without_other_warmup(default, options),
            config=(tyro.conf.AvoidSubcommands,),
        )

    return parsed_or_exit(parse, arguments, command="trainer", flags=FLAGS)


def _is_there(config: TrainConfig) -> bool:
    """Whether a run is to be resumed whose settings can be read; others are refused later."""
    if not config.resume or not (config.output / CONFIG_FILE).exists():
        return False
    try:
        return bool(read_settings(config.output))
    except ValueError:
        return False


def _of_run(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The settings of the run in the --output of `config`, as defaults for the command line that resumes it."""
    stored = settings_of(TrainConfig, read_settings(config.output))
    given = {argument.partition("=")[0] for argument in arguments}
    if "--epochs" in given and "--steps" not in given:
        stored = replace(stored, steps=None)  # which would override them
    return replace(stored, output=config.output, resume=False, resume_step=None, extend=False)


def _refuse_preset(preset: str) -> NoReturn:
    near = difflib.get_close_matches(preset, [*PRESETS, "report"], n=1)
    hint = f"did you mean {near[0]}?" if near else f"give a folder that exists, or one of {', '.join(PRESETS)}"
    print_error(f"trainer: unknown preset {preset!r}: {hint}")
    sys.exit(2)


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Exits if a path is empty, for example because a variable is not set: it would mean the current folder."""
    paths = {f"--{field.name.replace('_', '-')}" for field in fields(TrainConfig) if "Path" in str(field.type)}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in paths and (value if is_assigned else following) == "":
            print_error(f"trainer: {name}: {EMPTY_PATH}")
            sys.exit(2)


def _with_correction_named(arguments: Sequence[str]) -> list[str]:
    """Replaces --correction and --no-correction, flags of earlier versions, by --correction=exact and =none."""
    named = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        flag = argument.replace("_", "-")
        if flag == "--no-correction":
            argument = "--correction=none"
        elif flag == "--correction" and following.startswith("-"):
            argument = "--correction=exact"
        named.append(argument)
    return named


def _without_other_warmup(default: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """A preset without its own warm-up if the command line gives one in another unit."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--warmup-fraction" in given:
        default = replace(default, warmup_epochs=None)
    if "--warmup-epochs" in given:
        default = replace(default, warmup_fraction=None)
    return default
