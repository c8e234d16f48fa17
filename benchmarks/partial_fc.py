"""Partial FC's sampled softmax over a dense matrix beside the same softmax over rows on weight servers.

python -m benchmarks.partial_fc [--classes 100000 1000000 10000000] [--steps 2000] [--output benchmarks/results]

Both train the same encoder (two layers) from the same weights and initial rows on the same batches, in float32 on the
CPU: images are 64 numbers, the mean of their class plus noise, eight to a class. A window slides over the classes;
without one a loader of its own draws images at random, and no sampler tells the head what comes.

- Partial FC (An et al., 2021): weight and momentum of all classes in one process; each step takes the batch's classes
  and uniformly sampled others, K together, computes the softmax over them and applies SGD with momentum to them alone.
- torch.nn.Embedding with sparse gradients and SparseAdam: the same softmax over the same classes, torch's own way to
  update some rows of a matrix only. Adam has another learning rate, so its losses say little.
- Rows on weight servers: `ClassifierHead` with two embedded shards. First with uniform negatives in whole blocks and
  rows that stand still while they are not active, which differs from Partial FC in the blocks alone; then, with uniform
  and with recent negatives, rows that follow momentum and weight decay exactly.

Every measurement runs in a process of its own, whose peak of resident memory is reported; that of the shards apart. A
measurement that exists in results/partial_fc.json is not repeated: after an interruption the same command continues. A
dense matrix that does not fit into the free memory is not tried.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import psutil
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.measure import Timing, at_least, save_results, timing
from weightserver import TableSpec
from weightserver.core.arrays import Float32Array, Int64Array
from weightserver.core.initial import initial_rows
from weightserver.torch import ClassifierHead, Loss

INPUT_DIM, HIDDEN_DIM, IMAGES_PER_CLASS, NOISE = 64, 256, 8, 0.7
TEMPERATURE, RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.02, 0.9, 1e-4
ADAM_RATE = 1e-3
METHODS = {"partial-fc": "-", "sparse-adam": "-", "uniform-uncorrected": "--", "uniform": ":", "recent": "-."}
PEERS = ("partial-fc", "sparse-adam")
"""The peers, and the head: with inactive rows that stand still as the peers' do; exact, with two kinds of negatives.
And the style of each one's line."""
WARM_UP = 20
"""Steps before those that are timed."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement."""

    method: str
    num_classes: int
    dim: int
    num_negatives: int
    batch_size: int
    window: int
    """Images in the window, which moves by a quarter of them; 0 for a loader of its own."""
    steps: int

    @property
    def key(self) -> str:
        return f"{self.method} of {self.num_classes:,} classes"

    @property
    def spec(self) -> TableSpec:
        return TableSpec(num_rows=self.num_classes, dim=self.dim, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


class PartialFC:
    """The sampled softmax of Partial FC: rows float32 [C, D] and their momentum in memory.

    A step uses the batch's classes and uniformly sampled ones, `num_active` together (An et al., 2021, section 3.3).
    """

    def __init__(self, spec: TableSpec, *, num_active: int, temperature: float, seed: int) -> None:
        self.weight = torch.from_numpy(initial_rows(spec, np.arange(spec.num_rows)))
        self._momentum_buffer = torch.zeros_like(self.weight)
        self._spec = spec
        self._num_active = num_active
        self._loss = Loss(temperature=temperature)
        self._generator = np.random.default_rng(seed)
        self._classes = torch.zeros(0, dtype=torch.int64)  # of the step in progress
        self._active = torch.zeros(0)  # their rows

    def __call__(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of embeddings (B, D) with classes int64 (B,)."""
        classes = self._sampled(np.unique(labels.numpy()))
        self._classes = torch.from_numpy(classes)
        self._active = self._rows()
        positions = torch.from_numpy(np.searchsorted(classes, labels.numpy()))
        return self._loss(embeddings, self._active, positions)

    def _rows(self) -> Tensor:
        """The rows of the step's classes, a leaf."""
        return self.weight[self._classes].requires_grad_()

    def _sampled(self, own: Int64Array) -> Int64Array:
        """The own classes and others, uniformly: int64 (K,), ascending. Costs no time per class of the matrix."""
        if self._num_active >= self._spec.num_rows:
            return np.arange(self._spec.num_rows)
        classes = own
        while (missing := self._num_active - len(classes)) > 0:
            drawn = np.setdiff1d(self._generator.integers(0, self._spec.num_rows, missing), classes)
            classes = np.union1d(classes, drawn)
        return classes

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """SGD with momentum of the sampled rows; all others stay as they are."""
        assert self._active.grad is not None
        gradient = self._active.grad + self._spec.weight_decay * self._active
        buffer = self._spec.momentum * self._momentum_buffer[self._classes] + gradient
        self._momentum_buffer[self._classes] = buffer
        self.weight[self._classes] = self._active - learning_rate * buffer


class SparseAdam(PartialFC):
    """Partial FC's classes, as rows of an nn.Embedding with sparse gradients."""

    def __init__(self, spec: TableSpec, *, num_active: int, temperature: float, seed: int) -> None:
        super().__init__(spec, num_active=num_active, temperature=temperature, seed=seed)
        del self._momentum_buffer
        self._embedding = nn.Embedding.from_pretrained(self.weight, freeze=False, sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=ADAM_RATE)

    def _rows(self) -> Tensor:
        rows: Tensor = self._embedding(self._classes)
        return rows

    def step(self, learning_rate: float) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class Images(Dataset[tuple[int, Int64Array]]):
    """Generated images: the mean of their class plus noise. Loads whole batches, by number."""

    def __init__(self, labels: Int64Array) -> None:
        self._labels = labels
        self._means = TableSpec(num_rows=1, dim=INPUT_DIM, init_std=1.0, seed=100)
        self._noise = TableSpec(num_rows=1, dim=INPUT_DIM, init_std=NOISE, seed=101)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, images: list[int]) -> tuple[Tensor, Tensor]:
        chosen = np.asarray(images)
        labels = self._labels[chosen]
        values: Float32Array = initial_rows(self._means, labels) + initial_rows(self._noise, chosen)
        return torch.from_numpy(labels), torch.from_numpy(values)


def run(task: Task, directory: Path) -> dict[str, Any]:
    """Trains; returns losses, seconds and memory."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(INPUT_DIM, HIDDEN_DIM), nn.ReLU(), nn.Linear(HIDDEN_DIM, task.dim))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    labels = np.random.default_rng(1).permutation(np.arange(IMAGES_PER_CLASS * task.num_classes) % task.num_classes)
    with head_of(task, directory) as head:
        peer: PartialFC | None = None
        if task.method in PEERS:
            kind = SparseAdam if task.method == "sparse-adam" else PartialFC
            peer = kind(task.spec, num_active=task.num_negatives, temperature=TEMPERATURE, seed=2)
        coming, losses, seconds = batches_of(task, head, labels), [], []
        started = time.perf_counter()
        for _ in range(task.steps):
            classes, images = next(coming)
            loss = peer(encoder(images), rows_of(head, classes)) if peer else head(encoder(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            (peer or head).step(learning_rate=RATE)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - started)
            started += seconds[-1]
        return {"losses": losses, "step": timing(seconds[WARM_UP:]), **memory(directory)}


def head_of(task: Task, directory: Path) -> ClassifierHead:
    """The head; it starts its shards at its first use, and none for the peer."""
    return ClassifierHead(
        task.num_classes,
        task.dim,
        num_negatives=task.num_negatives,
        negatives="recent" if task.method == "recent" else "uniform",
        correction="none" if task.method == "uniform-uncorrected" else "exact",
        directory=directory,
        num_shards=2,
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        temperature=TEMPERATURE,
    )


def batches_of(task: Task, head: ClassifierHead, labels: Int64Array) -> Iterator[tuple[Tensor, Tensor]]:
    """Classes and images of each step, the same for the head, which has them announced, and for its peers."""
    images = Images(labels)
    drawn: Iterable[list[int]]
    if task.window:
        sampler = drawn = head.sampler(
            batch_size=task.batch_size, window_size=task.window, window_stride=task.window // 4, classes=labels
        )
        if task.method in PEERS:
            drawn = [sampler.images(step, 0).tolist() for step in range(task.steps)]
    else:
        generator, number = torch.Generator().manual_seed(3), task.steps * task.batch_size
        drawn = BatchSampler(RandomSampler(images, True, number, generator), task.batch_size, drop_last=True)
    loader = DataLoader(images, batch_sampler=drawn, collate_fn=lambda batch: batch)
    while True:
        yield from loader if task.method in PEERS else head.announced(loader)


def memory(directory: Path) -> dict[str, int]:
    """Bytes of the trainer at its peak, of its shards now, and of their files."""
    shards = [child for child in psutil.Process().children(recursive=True) if "weightserver" in child.cmdline()]
    return {
        "trainer_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "shards_bytes": sum(shard.memory_full_info().uss for shard in shards),
        "disk_bytes": sum(512 * file.stat().st_blocks for file in directory.rglob("*") if file.is_file()),
    }


def rows_of(head: ClassifierHead, classes: Tensor) -> Tensor:
    """Rows are classes of the peer, so that both methods have the same initial rows."""
    return torch.from_numpy(head.order.rows(classes.numpy()))


def fits(task: Task) -> bool:
    """Whether a peer's weight and what its optimizer keeps leave a fifth of the free memory."""
    return task.method not in PEERS or 1.25 * _peer_bytes(task) < psutil.virtual_memory().available


def _peer_bytes(task: Task) -> int:
    arrays = 3 if task.method == "sparse-adam" else 2
    return 4 * arrays * task.num_classes * task.dim


def measured(task: Task) -> dict[str, Any]:
    """Runs a task in its own process."""
    if not fits(task):
        return {"skipped": f"{_peer_bytes(task) / 2**30:.1f} GiB of weight and momentum do not fit"}
    command = [sys.executable, "-m", "benchmarks.partial_fc", "--task", json.dumps(asdict(task))]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def as_table(results: dict[str, Any], sizes: list[int]) -> str:
    lines = ["| classes | method | step | trainer's memory | shards' memory | disk | loss, last tenth |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for num_classes in sizes:
        for method in METHODS:
            found = results.get(f"{method} of {num_classes:,} classes")
            if found is None:
                continue
            if "skipped" in found:
                lines.append(f"| {num_classes:,} | {method} | {found['skipped']} | | | | |")
                continue
            last = found["losses"][-max(1, len(found["losses"]) // 10) :]
            memory = [f"{found[name] / 2**30:.2f} GiB" for name in ("trainer_peak_bytes", "shards_bytes", "disk_bytes")]
            step = Timing(**found["step"])
            lines.append(f"| {num_classes:,} | {method} | {step} | {' | '.join(memory)} | {np.mean(last):.3f} |")
    return "\n".join([*lines, "", "![Loss curves](partial_fc.png)"])


def draw(file: Path, results: dict[str, Any], sizes: list[int]) -> None:
    """One panel of loss curves for each number of classes, smoothed over a fiftieth of the steps."""
    mpl.use("Agg")
    figure, panels = plt.subplots(1, len(sizes), figsize=(4.5 * len(sizes), 3.2), squeeze=False)
    for axes, num_classes in zip(panels[0], sizes, strict=True):
        for method in METHODS:
            losses = results.get(f"{method} of {num_classes:,} classes", {}).get("losses", [])
            width = max(1, len(losses) // 50)
            if losses:
                axes.plot(np.convolve(losses, np.ones(width) / width, mode="valid"), METHODS[method], label=method)
        axes.set(title=f"{num_classes:,} classes", xlabel="step", ylabel="loss")
        if axes.lines:
            axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--steps", type=at_least(WARM_UP + 2), default=2_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--num-negatives", type=int, default=8_192)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--window", type=int, default=65_536, help="images in the window; 0: a loader of its own")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        with tempfile.TemporaryDirectory(prefix="partial-fc-") as directory:
            print(json.dumps(run(Task(**json.loads(arguments.task)), Path(directory)), default=asdict))
        return
    file = arguments.output / "partial_fc.json"
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    settings = {name: getattr(arguments, name) for name in ("dim", "num_negatives", "batch_size", "window", "steps")}
    if results.get("settings", settings) != settings:
        raise SystemExit(f"{file} has results of other settings, {results['settings']}: remove it, or give these")
    results["settings"] = settings
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
    command = f"python -m benchmarks.partial_fc --classes {' '.join(map(str, arguments.classes))} {options}"
    for num_classes in arguments.classes:
        for method in METHODS:
            task = Task(method=method, num_classes=num_classes, **settings)
            if task.key not in results:
                print(task.key, file=sys.stderr)
                results[task.key] = measured(task)
            arguments.output.mkdir(parents=True, exist_ok=True)
            draw(arguments.output / "partial_fc.png", results, arguments.classes)
            save_results(arguments.output, "partial_fc", command, results, as_table(results, arguments.classes))
    print(as_table(results, arguments.classes))


if __name__ == "__main__":
    main()
