"""Training on GPUs, by `pytest -m gpu`; tests/trainer/test_gpu_runs.py and one case here have pretended ones."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.gpus import Gpus
from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import NUM_IMAGES, small_run
from trainer.loop import train
from trainer.model import EncoderConfig

ALL = 0
"""As a number of GPUs: as many as there are."""
NUM_STEPS = 16
KILLED_BEFORE, CHECKPOINT_EVERY = 11, 4
FLOAT32_TOLERANCE = 1e-3
"""Of a loss, relative, after 16 steps: sums in another order, 1e-7 each, and what training makes of them."""
GROUPS = EncoderConfig(in_channels=3, image_size=16, width=8, stem_stride=2, blocks=(1, 1), norm="group")
"""With BatchNorm a rank's statistics are its slice's."""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]


def number_of(gpus: Gpus, wanted: int) -> int:
    """The number of GPUs to use; skips if the machine has fewer."""
    if wanted == ALL:
        gpus.need(3)  # fewer are cases of their own
        return gpus.number
    gpus.need(wanted)
    return wanted


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def settings_of(images: str, directory: Path, **changes: Any) -> dict[str, Any]:
    """The settings of a small run on "generated" or "decoded" images."""
    shown: dict[str, Any] = {"num_images": NUM_IMAGES}
    if images == "decoded":
        shown = {"dataset": "folder", "num_images": None, "data_dir": directory / "images"}
        if not (directory / "images").exists():
            plain_tree(directory / "images", NUM_IMAGES)
    return shown | {"steps": NUM_STEPS, "checkpoint_every": 0, "encoder": GROUPS} | changes


# ---- what each rank does


def train_small(output: Path, settings: dict[str, Any]) -> None:
    train(small_run(output, **settings))


def train_until_killed(output: Path, settings: dict[str, Any], step: int) -> None:
    """Kills every rank before that step."""

    def die(at: int) -> None:
        if at == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(small_run(output, **settings), on_step=die)


def train_without_waiting(output: Path, settings: dict[str, Any], first: int, stop: int) -> None:
    """Raises an error if the program waits for its GPU in steps `first` to `stop` - 1."""

    def watch(step: int) -> None:
        if step == first:
            torch.cuda.set_sync_debug_mode("error")
            _assert_waits_raise()
        if step == stop:
            torch.cuda.set_sync_debug_mode("default")

    train(small_run(output, **settings), on_step=watch)


def _assert_waits_raise() -> None:
    one = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
    with pytest.raises(RuntimeError, match="synchronizing"):
        one.item()


def train_and_tell_gpus(output: Path, settings: dict[str, Any], told: Path) -> None:
    """Writes told-RANK: the numbers of the GPUs on which this process has a context."""
    train(small_run(output, **settings))
    # A context alone, without a tensor, takes half a GB.
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: torch.cuda.max_memory_reserved(index) > 0)
    used = [index for index in range(torch.cuda.device_count()) if has_context(index)]
    Path(f"{told}-{os.environ['RANK']}").write_text(json.dumps(used))


# ---- on GPUs and on the CPU

TRAINED = [*product((1, 2, ALL), ("generated", "decoded"), ("float32", "bfloat16"))]


def test_the_page_on_gpus_begins_with_those_on_one() -> None:
    """The words by which its command chooses tests are in the names of these, and of no others."""
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    words = re.findall(r"-k '(\S+) and (\S+)'", page)[0]
    names = {case: f"test_losses_are_those_of_the_cpu[{'-'.join(map(str, case))}]" for case in TRAINED}
    assert [case for case, name in names.items() if all(word in name for word in words)] == [
        case for case in TRAINED if case[0] == 1
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_gpus", "images", "precision"), TRAINED)
def test_losses_are_those_of_the_cpu(num_gpus: int, images: str, precision: str, gpus: Gpus, tmp_path: Path) -> None:
    """bfloat16: by no more than twice what it differs from float32 on the CPU."""
    ranks = number_of(gpus, num_gpus)
    settings = settings_of(images, tmp_path)
    found = {}
    for other in {precision, "float32"}:
        train(small_run(tmp_path / other, **settings, precision=other, device="cpu"))
        found[other] = losses(tmp_path / other)
    settings |= {"precision": precision, "device": "cuda"}
    gpus.run(train_small, tmp_path / "gpu", settings, directory=tmp_path / "logs", num_ranks=ranks)
    expected, exact = found[precision], found["float32"]
    rounding = max(abs(one / other - 1) for one, other in zip(expected, exact, strict=True))
    assert losses(tmp_path / "gpu") == pytest.approx(expected, rel=FLOAT32_TOLERANCE + 2 * rounding, abs=0)
    assert (precision == "bfloat16") == (rounding > 0), "the precision made no difference: this shows nothing"


RESUMED = [(1, -1), (-1, 1), (1, 1), (1, 2), (2, 1), (2, -1), (-1, 2), (ALL, 1), (1, ALL)]
"""Numbers of GPUs before and after; -1 is the CPU."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(pytest.param(*case, marks=pytest.mark.gpu) for case in RESUMED),
        pytest.param(2, -1, marks=pytest.mark.guard, id="pretended"),
    ],
)
def test_a_killed_run_is_resumed_elsewhere(before: int, after: int, gpus: Gpus, tmp_path: Path) -> None:
    settings = settings_of("generated", tmp_path, checkpoint_every=CHECKPOINT_EVERY)
    output = tmp_path / "run"
    ranks = [1 if number == -1 else number_of(gpus, number) for number in (before, after)]
    devices = ["cpu" if number == -1 else "cuda" for number in (before, after)]
    first = (output, settings | {"device": devices[0]}, KILLED_BEFORE)
    gpus.run(train_until_killed, *first, directory=tmp_path / "first", num_ranks=ranks[0], killed=True)
    assert len(losses(output)) == KILLED_BEFORE
    second = (output, settings | {"device": devices[1], "resume": True})
    gpus.run(train_small, *second, directory=tmp_path / "second", num_ranks=ranks[1])
    train(small_run(tmp_path / "alone", **settings, device="cpu"))
    assert losses(output) == pytest.approx(losses(tmp_path / "alone"), rel=FLOAT32_TOLERANCE, abs=0)


STEADY = [*product((1, 2, ALL), ("generated", "decoded"))]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_gpus", "images"), STEADY)
def test_a_steady_step_waits_for_nothing(num_gpus: int, images: str, gpus: Gpus, tmp_path: Path) -> None:
    """Steps that log nothing and take no checkpoint; rows enter and leave meanwhile."""
    settings = settings_of(images, tmp_path, log_every=NUM_STEPS, device="cuda")
    given = (tmp_path / "run", settings, 4, NUM_STEPS - 1)
    ranks = number_of(gpus, num_gpus)
    gpus.run(train_without_waiting, *given, directory=tmp_path / "logs", num_ranks=ranks)
    assert len(losses(tmp_path / "run")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [2, ALL])
def test_each_rank_uses_its_own_gpu_alone(num_gpus: int, gpus: Gpus, tmp_path: Path) -> None:
    """No context of rank 1 or later is on GPU 0."""
    ranks = number_of(gpus, num_gpus)
    settings = settings_of("decoded", tmp_path, device="cuda", knn_every=0.5, checkpoint_every=5)
    given = (tmp_path / "run", settings, tmp_path / "told")
    gpus.run(train_and_tell_gpus, *given, directory=tmp_path / "logs", num_ranks=ranks)
    assert [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(ranks)] == [
        [rank] for rank in range(ranks)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("num_gpus", [1, 2, ALL])
def test_deterministic_runs_are_equal_to_the_bit(num_gpus: int, gpus: Gpus, tmp_path: Path) -> None:
    ranks = number_of(gpus, num_gpus)
    settings = settings_of("decoded", tmp_path, device="cuda", deterministic=True)
    settings |= {"encoder": EncoderConfig(in_channels=3, image_size=16, width=8, stem_stride=2, pool_size=3)}
    outputs = [tmp_path / "one", tmp_path / "two"]
    for output in outputs:
        gpus.run(train_small, output, settings, directory=tmp_path / f"logs-{output.name}", num_ranks=ranks)
    one, two = (load_file(output / "encoder.safetensors") for output in outputs)  # files order metadata by chance
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert losses(outputs[0]) == losses(outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_gpus", "accumulate"), [(1, 1), (1, 2), (2, 1)])
def test_a_compiled_encoder_trains_like_another(num_gpus: int, accumulate: int, gpus: Gpus, tmp_path: Path) -> None:
    """Not on pretended GPUs: torch.compile leaves alone what runs in a dispatch mode, as they do."""
    ranks = number_of(gpus, num_gpus)
    settings = settings_of("generated", tmp_path, device="cuda", accumulate=accumulate)
    for compiled in (False, True):
        given = (tmp_path / str(compiled), settings | {"compile": compiled})
        logs = tmp_path / f"logs-{compiled}"
        gpus.run(train_small, *given, directory=logs, num_ranks=ranks, timeout_seconds=400)
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=FLOAT32_TOLERANCE, abs=0)


@pytest.mark.slow
def test_processes_for_real_gpus_train_too(tmp_path: Path) -> None:
    """Started as they are for real GPUs, and given the CPU."""
    settings = settings_of("generated", tmp_path, device="cpu", steps=4)
    start = Gpus(2, pretended=False)
    start.run(train_small, tmp_path / "run", settings, directory=tmp_path / "logs", num_ranks=2)
    train(small_run(tmp_path / "alone", **settings))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=FLOAT32_TOLERANCE, abs=0)
