"""What a run is: every setting, its default and its meaning; the presets; the command line made from them."""

from __future__ import annotations

import difflib
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from trainer.data import DECODED
from trainer.data.augment import Augmentation, AugmentationConfig, Unchanged
from trainer.model import EncoderConfig
from trainer.run.earlier import began_earlier, earlier_defaults
from weightserver import ClientSecurity
from weightserver.common.addresses import is_loopback
from weightserver.common.atomic_files import EMPTY_PATH
from weightserver.common.logs import LogFormat, print_error
from weightserver.core.correction import MAX_STEPS

Resume = bool | Literal["auto"]

_DEFAULT_WARMUP_FRACTION = 0.1
_PAPERS_AREAS = (AugmentationConfig.min_scale, AugmentationConfig.max_scale)
_CORRECTION_OF_FLAG: dict[object, str] = {True: "exact", False: "none"}


def _resume(words: list[str]) -> Resume:
    if words not in ([], ["auto"]):
        raise ValueError(f"--resume stands alone or with 'auto', not with {' '.join(words)!r}")
    return "auto" if words else True


# A flag, as it always was, that may be followed by a word.
_RESUME_OPTION = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto]",
    instance_from_str=_resume,
    is_instance=lambda value: value in (False, True, "auto"),
    str_from_instance=lambda value: [str(value)],
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of one run."""

    # ---- what to train on, and where the results go
    dataset: str = "fashion-mnist"
    """Name of the data set: fashion-mnist, idx, folder, packed or synthetic."""
    num_images: int | None = None
    """N, where the data set is synthetic: as many as you like, up to 10⁹."""
    data_dir: Path | None = None
    """Folder with the data set's files; without one they are looked for, and downloaded where need be."""
    decode_threads: int | None = None
    """Threads of each rank that decode images; without it the rank's share of the cores that the machine, the process's
    affinity and its cgroup allow, at most 16."""
    output: Path = Path("runs/fashion-mnist")
    """The run's own directory: config.json, metrics.jsonl, summary.json, tensorboard/, encoder.safetensors."""

    # ---- who holds the rows
    rows: Literal["resident", "remote", "dense"] = "resident"
    """resident: those around the window on the trainer's device, the others on the weight servers. remote: all on the
    weight servers, fetched for each step. dense: all in the trainers' memory, moved by plain SGD."""
    capacity: int | None = None
    """Resident rows, on all ranks together; without it those that the window and prefetching make use of. A rank has
    room for its share, for two blocks more, and for chance to deal it more of the active rows than others."""
    prefetch_steps: int = 8
    """How many steps before they are active resident rows are asked for."""
    servers: str | None = None
    """Addresses of all weight servers, host:port,host:port; without any, local ones are started for the run (where all
    ranks are on one machine)."""
    num_shards: int = 2
    """Local weight servers to start where no --servers are given; their rows are kept in the run's directory."""
    retry_seconds: float = 300.0
    """How long a weight server that is away is tried again before the run stops."""
    rank_timeout_seconds: float = 600.0
    """How long ranks wait for one that is gone without a word (a machine without power), on top of --retry-seconds,
    before the run stops. All wait for rank 0 while it evaluates by --knn-every: give more than that takes."""
    tls_ca: Path | None = None
    """Call --servers over TLS; the CA that signed their certificates, PEM."""
    tls_cert: Path | None = None
    """The trainer's own certificate, PEM, for --servers that ask for one."""
    tls_key: Path | None = None
    """The key of --tls-cert, PEM."""
    token_file: Path | None = None
    """File with the token of --servers; without one it is WEIGHTSERVER_TOKEN, if that is set."""
    insecure: bool = False
    """Take --servers on other machines without TLS."""
    resume: Annotated[Resume, _RESUME_OPTION] = False
    """Go on with the run in --output from its newest checkpoint, as if it had never stopped. auto: do so where a run is
    there, and start a new one where none is."""
    resume_step: int | None = None
    """With --resume: go on from the checkpoint of this step, not the newest. Files of later steps are moved to
    checkpoints/set-aside-…; the rows' later updates and checkpoints are given up."""
    extend: bool = False
    """With --resume: images that were packed with 'pack --extend' since take part from now on. --epochs then counts
    visits for each of all images, and the learning rates from now on are those of the longer run."""
    checkpoint_every: int = 1_000
    """Steps between checkpoints; 0 for none but those of step 0 and of a run that SIGTERM or SIGINT ends. Dense rows
    live and die with the trainer: with them there are no checkpoints."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep."""

    # ---- how long
    epochs: float = 6.0
    """Length of the run: visits for each image, on average."""
    steps: int | None = None
    """Length of the run in updates; --epochs means nothing then."""

    # ---- instance classification
    batch_size: int = 128
    """B, images in each update, on all ranks together."""
    accumulate: int = 1
    """Parts of a batch whose gradients are added up before the update: less memory for the same B. BatchNorm sees one
    part at a time."""
    views: int = 1
    """Views of each image in an update, whose losses are averaged (paper: 1; Table 5 compares with 2)."""
    view_size: int | None = None
    """Side of a view in pixels, where it is not --encoder.image-size, which evaluations take."""
    small_crops: int = 0
    """Small crops of each image in an update beside its views: multi-crop, which the paper does not have. The recipe of
    the authors' released code is --view-size 160 --small-crops 3. The losses of small crops are averaged with those of
    the views, and move the encoder but no row."""
    small_crop_size: int = 96
    """Side of a small crop in pixels."""
    small_crop_scale: tuple[float, float] = (0.08, 0.14)
    """Smallest and largest area of a small crop, as parts of the image's (the authors' code; SwAV's: 0.05 and 0.14)."""
    view_scale: tuple[float, float] | None = (0.14, 1.0)
    """Smallest and largest area of a view that has small crops beside it (the authors' code). None: those of views
    without small crops, --augmentation.min-scale and --augmentation.max-scale."""
    num_negatives: int = 1024
    """K, the most recently visited rows, which are the classes of a step; the batch's own are among them."""
    window_size: int = 1024
    """W, images in the sliding window."""
    window_stride: int = 128
    """S, by how many images the window moves once all its images were visited. Epoch order is S = W = N."""
    softmax: Literal["cosine", "plain"] = "cosine"
    """Logits: cosines of row and embedding, or their products (plain: Table 1's comparison)."""
    temperature: float = 0.2
    """τ, by which cosines are divided; products are not."""
    correction: Literal["exact", "paper", "none"] = "exact"
    """How rows that are not active follow momentum and weight decay: exact, with the learning rate of each step; paper,
    with one learning rate for all steps since they were active; none, or --no-correction: they stand still (Table 2's
    comparison). From Python True and False are exact and none."""

    # ---- optimisation: one SGD for encoder, head and rows
    learning_rate: float = 0.1
    """Base learning rate η, reached after the warm-up; then a cosine to 0, step by step."""
    learning_rate_batch: int | None = None
    """Batch size that --learning-rate is for, where B is another: η is then scaled by B over this (linear rule)."""
    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises linearly from η/100 to η, however long the run is (paper: 5). An epoch is
    one of the images that the run begins with."""
    warmup_fraction: float | None = None
    """The same as a part of the run. Without either it is a tenth of the run; a preset's own gives way to the one that
    is given."""
    momentum: float = 0.9
    """m."""
    weight_decay: float = 1e-4
    """λ, on everything, as in the paper."""

    # ---- model
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """The network whose features are wanted."""
    init_encoder: Path | None = None
    """encoder.safetensors of another run to begin with, of the same --encoder settings; it brings its pixel scale."""
    head_layers: Literal[1, 2] = 2
    """Layers of the projection head: two with a ReLU between them, or a linear one (Table 1's comparison)."""
    dim: int = 128
    """D, length of an embedding and of a row."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """What happens to an image at each visit."""

    # ---- rows as they are stored
    init_std: float = 0.01
    """Standard deviation of a row's initial values."""
    rows_per_block: int = 63
    """Rows that the weight servers store together."""

    # ---- randomness and reports
    seed: int = 0
    """Seed of the encoder, the initial rows, the order within windows and the augmentations."""
    order_seed: int = 0
    """Seed of the order of the images, in which the window slides."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """What the encoder computes in; head, loss and rows are float32. tf32: float32, whose mantissa a GPU's products cut
    from 23 bits to 10, those of the head too."""
    channels_last: bool = True
    """Whether images lie in memory pixel by pixel, which convolutions like."""
    compile: bool = False
    """Whether torch.compile makes encoder and augmentation faster, after a minute or more; it needs a C compiler."""
    deterministic: bool = False
    """Whether operations that may differ from run to run are replaced, or refused; on a CPU none does."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    knn_every: float = 0.0
    """Epochs between kNN evaluations on held-out training images; 0 for none."""
    wandb_project: str | None = None
    """Weights & Biases project that hears of the run too (needs the extra wandb)."""
    log_format: LogFormat = "text"
    """How events are logged to stderr, one line each."""
    metrics_port: int | None = None
    """Port of the Prometheus metrics of the first rank on each machine; the next rank has the next one. 0
    takes free ones, None serves none."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics; they tell no secret and ask for no token."""
    evaluate: bool = True
    """Whether to end with the kNN and linear evaluations."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "correction", _CORRECTION_OF_FLAG.get(self.correction, self.correction))

    def check(self) -> None:
        """Raises ValueError for settings that contradict each other, or that this version cannot do."""
        if self.resume is True and self.rows == "dense":
            raise ValueError("--rows dense leaves no checkpoints: there is nothing to --resume")
        if self.extend and not self.resume:
            raise ValueError("--extend adds images to a run that goes on: give --resume too, or leave it away")
        if self.resume_step is not None and not self.resume:
            raise ValueError("--resume-step is for a run that goes on: give --resume too, or leave it away")
        if self.checkpoint_every < 0:
            raise ValueError(f"--checkpoint-every must not be negative, got {self.checkpoint_every}")
        if self.rows == "dense" and self.servers:
            raise ValueError("--rows dense keeps the rows in the trainer: leave --servers away, or use --rows resident")
        if self.rows == "dense" and self.correction == "paper":
            raise ValueError(
                "--correction paper is for rows that wait to be corrected, --rows dense moves all in each step: "
                "use --rows resident or --rows remote"
            )
        if self.capacity is not None and self.rows != "resident":
            raise ValueError(f"--capacity is for --rows resident, not {self.rows}: leave it away")
        if self.prefetch_steps < 0:
            raise ValueError(f"--prefetch-steps must not be negative, got {self.prefetch_steps}")
        security = self.security
        if security.tls_ca is not None and not self.servers:
            raise ValueError("--tls-ca is for --servers: leave it away, or give their addresses")
        for address in self.server_addresses:
            if not is_loopback(address) and security.tls_ca is None and not self.insecure:
                raise ValueError(
                    f"--servers {address} is on another machine and would be called without TLS: "
                    "give --tls-ca, or --insecure on a network you trust"
                )
        for name in ("num_shards", "batch_size", "accumulate", "views", "log_every", "dim", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.side_of_views < 1:
            raise ValueError(f"--view-size must be at least 1, got {self.view_size}")
        for name, known in (
            ("softmax", ("cosine", "plain")),
            ("head_layers", (1, 2)),
            ("correction", ("exact", "paper", "none")),
        ):
            if getattr(self, name) not in known:
                *most, last = map(str, known)
                raise ValueError(
                    f"--{name.replace('_', '-')} must be {', '.join(most)} or {last}, got {getattr(self, name)}"
                )
        for name in ("epochs", "temperature", "rank_timeout_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be positive and finite, got {getattr(self, name)}")
        for name in ("learning_rate", "knn_every", "retry_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be finite and not negative, got {getattr(self, name)}")
        if self.small_crops < 0:
            raise ValueError(f"--small-crops must not be negative, got {self.small_crops}")
        if self.small_crop_size < 1:
            raise ValueError(f"--small-crop-size must be at least 1, got {self.small_crop_size}")
        for name in ("small_crop_scale", "view_scale"):
            try:
                self._cropped_to(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
        if self.small_crops and self.small_crop_size >= self.side_of_views:
            raise ValueError(
                f"--small-crop-size {self.small_crop_size} is not below the {self.side_of_views} px of a view: "
                "give a smaller one"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"--batch-size {self.batch_size} is no multiple of --accumulate {self.accumulate}: parts must be equal"
            )
        if (part_size := self.batch_size // self.accumulate) < (world_size := int(os.environ.get("WORLD_SIZE", "1"))):
            raise ValueError(
                f"--batch-size {self.batch_size} in {self.accumulate} parts (--accumulate) leaves some of {world_size} "
                f"ranks without images in a part of {part_size}: give larger batches, fewer parts or fewer ranks"
            )
        if self.decode_threads is not None and self.decode_threads < 1:
            raise ValueError(f"--decode-threads must be at least 1, got {self.decode_threads}")
        if self.learning_rate_batch is not None and self.learning_rate_batch < 1:
            raise ValueError(f"--learning-rate-batch must be at least 1, got {self.learning_rate_batch}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        last_port = 2**16 - int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each rank has its own
        if self.metrics_port is not None and not 0 <= self.metrics_port <= last_port:
            raise ValueError(f"--metrics-port must lie in 0..{last_port}, got {self.metrics_port}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"--seed must lie in 0..2^64-1, got {self.seed}")
        if self.warmup_epochs is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"--warmup-epochs {self.warmup_epochs} and --warmup-fraction {self.warmup_fraction} both give the "
                "length of the warm-up: give one of them"
            )
        if self.warmup_epochs is not None and not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(f"--warmup-epochs must be finite and not negative, got {self.warmup_epochs}")
        if not 0 <= self._warmup_fraction <= 1:
            raise ValueError(f"--warmup-fraction must lie in 0..1, got {self.warmup_fraction}")
        if not self.resume:  # a run that goes on keeps the settings that it has
            self._check_used()

    def _check_used(self) -> None:
        """Raises ValueError for an option that means nothing beside the others."""
        for name, wanted in self.unused_settings().items():
            if getattr(self, name) != getattr(TrainConfig, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {getattr(self, name)} is for {wanted}: leave it away, or give {wanted} too")
        areas = (self.augmentation.min_scale, self.augmentation.max_scale)
        if self.small_crops and self.view_scale == TrainConfig.view_scale and areas != _PAPERS_AREAS:
            raise ValueError(
                f"beside --small-crops views have areas of {self.view_scale}, not the augmentation's {areas}: "
                "give --view-scale, or --view-scale None for the augmentation's"
            )

    def unused_settings(self) -> dict[str, str]:
        """Settings that mean nothing beside the others, and the option each of them is for."""
        wanted_by = {
            "temperature": (self.softmax == "cosine", "--softmax cosine"),
            "small_crop_size": (self.small_crops > 0, "--small-crops"),
            "small_crop_scale": (self.small_crops > 0, "--small-crops"),
            "view_scale": (self.small_crops > 0, "--small-crops"),
            "token_file": (bool(self.servers), "--servers"),
            "decode_threads": (self.dataset in DECODED, "--dataset packed or folder"),
        }
        return {name: wanted for name, (used, wanted) in wanted_by.items() if not used}

    @property
    def security(self) -> ClientSecurity:
        """How --servers are called; ValueError for options that make no sense together."""
        return ClientSecurity(**{field.name: getattr(self, field.name) for field in fields(ClientSecurity)})

    @property
    def server_addresses(self) -> list[str]:
        return [address.strip() for address in self.servers.split(",")] if self.servers else []

    @property
    def side_of_views(self) -> int:
        """In pixels."""
        return self.encoder.image_size if self.view_size is None else self.view_size

    def augmentations(self) -> list[Augmentation]:
        """What makes each of an image's views, and then each of its small crops.

        Raises:
            ValueError: sizes or areas that are none.
        """
        if self.encoder.name == "none":  # what is measured then is the rows' path
            return [Unchanged(self.encoder.image_size, self.encoder.pixels)] * (self.views + self.small_crops)
        make = partial(Augmentation, pixels=self.encoder.pixels, compiled=self.compile)
        of_views = self._cropped_to(self.view_scale if self.small_crops else None)
        return [
            *[make(of_views, self.side_of_views)] * self.views,
            *[make(self._cropped_to(self.small_crop_scale), self.small_crop_size)] * self.small_crops,
        ]

    def _cropped_to(self, scale: tuple[float, float] | None) -> AugmentationConfig:
        """The augmentation with crops of the smallest and largest area in `scale`, or of its own."""
        return (
            self.augmentation if scale is None else replace(self.augmentation, min_scale=scale[0], max_scale=scale[1])
        )

    @property
    def base_learning_rate(self) -> float:
        """η for the batch size of the run."""
        return self.learning_rate * self.batch_size / (self.learning_rate_batch or self.batch_size)

    def num_steps(self, num_images: int) -> int:
        """Updates of the run; ValueError where their learning rates alone would fill the memory."""
        steps = self.steps if self.steps is not None else max(1, round(self.epochs * num_images / self.batch_size))
        if steps > MAX_STEPS:
            raise ValueError(f"the run would take {steps:.3g} steps, at most {MAX_STEPS:,} are possible: choose fewer")
        return steps

    @property
    def _warmup_fraction(self) -> float:
        """Of a run whose warm-up is not told in epochs."""
        return _DEFAULT_WARMUP_FRACTION if self.warmup_fraction is None else self.warmup_fraction

    def warmup_steps(self, num_images: int, num_steps: int) -> int:
        """Updates of the warm-up of a run that begins with `num_images` and takes `num_steps` updates.

        It may be longer than the run, which then ends within it. ValueError where it is longer than any run.
        """
        if self.warmup_epochs is None:
            return round(self._warmup_fraction * num_steps)
        steps = self.warmup_epochs * num_images / self.batch_size
        if steps > MAX_STEPS:
            raise ValueError(
                f"--warmup-epochs {self.warmup_epochs:g} would take {steps:.3g} steps, at most {MAX_STEPS:,} are "
                "possible: choose fewer"
            )
        return round(steps)

    def resident_rows(self, num_images: int) -> int:
        """Rows to keep resident, on all ranks together.

        With the default no row of the window has to come twice: all steps from one to the last whose rows are
        prefetched look at the rows of so many windows.

        Raises:
            ValueError: --capacity is less than these steps need at once.
        """
        visits_ahead = self.prefetch_steps * self.batch_size
        windows = 1 + -(-max(0, self.num_negatives - self.window_size) // self.window_stride)
        windows += -(-visits_ahead // self.window_size)
        visited = min(num_images, self.window_size + windows * self.window_stride)
        needed = min(visited, self.num_negatives + visits_ahead)
        if self.capacity is not None and self.capacity < needed:
            raise ValueError(
                f"--capacity {self.capacity} is too small for {self.num_negatives} active rows and "
                f"{self.prefetch_steps} steps of prefetching: give at least {needed}, or fewer --prefetch-steps"
            )
        default = max(visited, min(num_images, max(self.window_size, self.num_negatives) + 2 * self.window_stride))
        return min(num_images, default if self.capacity is None else self.capacity)

    def to_json(self) -> str:
        settings = asdict(self)
        del settings["resume_step"]  # what one start did, no run keeps
        if self.warmup_epochs is None:
            settings["warmup_fraction"] = self._warmup_fraction  # also where it is the default
        return json.dumps(settings, indent=2, default=str) + "\n"


# The paper's settings for ImageNet-1K (Section 4.1, and Experimental Settings in its appendix), eight GPUs sharing a
# batch of 512; for ImageNet-11K "the same pre-training setting [...] with only dataset changed".
# docs/paper-to-code.md has them one by one.
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

PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "fashion-mnist": (
        "Fashion-MNIST, 60,000 images of 28×28: minutes on a CPU",
        TrainConfig(
            encoder=EncoderConfig(stem_stride=2, pool_size=3),  # small centred images: where things are says much
            augmentation=AugmentationConfig(min_scale=0.5, blur_probability=0.0),
            window_stride=64,
        ),
    ),
    "imagenet-1k": (
        "packed ImageNet-1K, as in the paper: ResNet-50, 512 images a step, 200 epochs; give --data-dir",
        _IMAGENET,
    ),
    "imagenet-11k": (
        "packed ImageNet-11K or 22K, or any other large set: the same recipe for 100 epochs, the paper's longest for "
        "ImageNet-11K (the others: --epochs 25, --epochs 50); give --data-dir",
        replace(_IMAGENET, output=Path("runs/imagenet-11k"), epochs=100.0),
    ),
    "synthetic": (
        "generated images without labels, any number of them: to measure rows at scale",
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


def parse_config(arguments: Sequence[str] | None = None) -> TrainConfig:
    """The config that a command line, PRESET --OPTIONS, asks for; exits where it cannot be parsed."""
    arguments = _with_correction_named(sys.argv[1:] if arguments is None else arguments)
    _refuse_empty_paths(arguments)
    preset = arguments[0] if arguments else ""
    if preset in PRESETS:
        description, default = PRESETS[preset]

        def parsed(default: TrainConfig) -> TrainConfig:
            return tyro.cli(
                TrainConfig,
                prog=f"python -m trainer {preset}",
                description=description,
                args=arguments[1:],
                default=_without_other_warmup(default, arguments),
                config=(tyro.conf.AvoidSubcommands,),
            )

        config = parsed(default)
        if config.resume and began_earlier(config.output):  # with the defaults of its time
            config = parsed(replace(default, **earlier_defaults(preset)))
        return config
    if preset and not preset.startswith("-"):
        near = difflib.get_close_matches(preset, [*PRESETS, "report"], n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(PRESETS)}"
        print_error(f"trainer: there is no preset {preset!r}: {hint}")
        sys.exit(2)
    anything: TrainConfig = tyro.extras.overridable_config_cli(
        PRESETS,
        prog="python -m trainer",
        description="Train an encoder by instance classification; 'report RUN' makes a page about a run.",
        args=arguments,
    )
    return anything


def _refuse_empty_paths(arguments: Sequence[str]) -> None:
    """Exits where one is given, as by a variable that is not set: it would be the current folder."""
    paths = {f"--{field.name.replace('_', '-')}" for field in fields(TrainConfig) if "Path" in str(field.type)}
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, is_assigned, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in paths and (value if is_assigned else following) == "":
            print_error(f"trainer: {name}: {EMPTY_PATH}")
            sys.exit(2)


def _with_correction_named(arguments: Sequence[str]) -> list[str]:
    """--correction and --no-correction alone, which were flags, as what they meant."""
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
    """A preset without the warm-up that it tells in another unit than the command line does."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if "--warmup-fraction" in given:
        default = replace(default, warmup_epochs=None)
    if "--warmup-epochs" in given:
        default = replace(default, warmup_fraction=None)
    return default
