"""The sections of the GPU benchmark: what each measures, and its table.

A section fills the dictionary that it is given as it goes, so that what was measured before a failure is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu.runs import Run, RunFailedError, Runner

RESIDENT_GOAL = 0.98
PAPER: dict[str, dict[str, tuple[int, int | None]]] = {
    "ImageNet-1K": {"all N": (8690, 558), "K": (5460, 538)},
    "ImageNet-11K": {"all N": (17_675, None), "K": (5460, 3140)},
}
"""MiB per GPU and seconds per epoch on eight V100 in the paper (Section 4, appendix; 17.26 G did not fit)."""
_MIB, _GIB = 2**20, 2**30
_TINY = ("--encoder.name", "small", "--encoder.width", "8", "--encoder.blocks", "1")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The amount of work."""

    steps: int
    """Steps of a run; logged ten times less often."""
    log_every: int = 10
    warm_up: int = 2
    """Logged intervals omitted as warm-up."""
    rounds: int
    """Runs of each compared case."""
    encoder: tuple[str, ...] = ("--encoder.name", "resnet50", "--view-size", "224")
    generated_side: int = 64
    """Side in pixels of generated images, from which views are cropped: small ones cost the processor little."""
    batch_size: int = 512
    dim: int = 128
    num_negatives: int = 65_536
    window_size: int = 131_072
    window_stride: int = 16_384
    all_rows: tuple[tuple[str, int], ...] = (("ImageNet-1K", 1_281_167), ("ImageNet-11K", 7_470_000), ("any", 10**9))
    """Names and numbers of images of the paper's Section 4."""
    batches_per_gpu: tuple[int, ...] = (64, 128, 256, 512)
    num_shards: int = 2


SIZES = {
    "full": Size(steps=121, rounds=3),
    "quick": Size(steps=61, rounds=1, batches_per_gpu=(64, 512)),
    # What shows that the code runs, in seconds on a CPU.
    "toy": Size(
        steps=9,
        log_every=2,
        num_shards=1,
        warm_up=1,
        rounds=1,
        encoder=(*_TINY, "--view-size", "24"),
        generated_side=16,
        batch_size=8,
        dim=16,
        num_negatives=32,
        window_size=48,
        window_stride=8,
        all_rows=(("tiny", 200), ("any", 10**9)),
        batches_per_gpu=(4, 8),
    ),
}


@dataclass
class Bench:
    """The tools that the sections share."""

    runner: Runner
    size: Size
    num_gpus: tuple[int, ...]
    """Numbers of GPUs to measure with, ascending."""
    gpu_bytes: int
    """Memory of one GPU in bytes."""

    def options(self, **changes: Any) -> list[str]:
        """The trainer's arguments that all runs share; changes are fields of `Size`."""
        size = replace(self.size, **changes)
        return [
            *("--batch-size", str(size.batch_size), "--steps", str(size.steps), "--log-every", str(size.log_every)),
            *("--num-negatives", str(size.num_negatives), "--window-size", str(size.window_size)),
            *("--window-stride", str(size.window_stride), "--dim", str(size.dim), "--checkpoint-every", "0"),
            *("--precision", "bfloat16", "--no-evaluate", "--encoder.in-channels", "3"),
            *("--num-shards", str(size.num_shards)),
        ]

    def arguments(self, images: str, *, num_images: int | None = None, **changes: Any) -> list[str]:
        """The arguments of a run on generated images without an encoder ("none") or with one ("generated")."""
        number = num_images or self.size.all_rows[0][1]
        encoder = ("--encoder.name", "none") if images == "none" else self.size.encoder
        side = 8 if images == "none" else self.size.generated_side
        shown = ["synthetic", "--num-images", str(number), *encoder, "--encoder.image-size", str(side)]
        return [*shown, *self.options(**changes)]

    def resident(self, images: str, *, num_gpus: int = 1, again: int = 0, **changes: Any) -> Run:
        return self.runner.train("trainer", self.arguments(images, **changes), num_gpus, again=again)

    def plain(self, images: str, *, num_gpus: int = 1, again: int = 0, **changes: Any) -> Run:
        return self.runner.train("benchmarks.gpu.plain", self.arguments(images, **changes), num_gpus, again=again)

    def plain_bytes(self, num_rows: int) -> int:
        """The least size of the tensors that a step with all `num_rows` rows on each GPU holds at once.

        float32: rows with gradient and momentum, normalised once more; logits of this GPU's images and their gradient.
        """
        images = self.size.batch_size // self.num_gpus[-1]
        return 4 * (4 * num_rows * self.size.dim + 2 * images * num_rows)


def _rate(run: Run, size: Size) -> dict[str, Any]:
    seconds = sum(record["seconds"] for record in run.records)
    stages = {name: sum(record[f"{name}_seconds"] for record in run.records) / seconds for name in ("data", "rows")}
    return {
        "step": run.step,
        "images_per_second": size.batch_size / run.step.p50,
        "row_wait_share": sum(record["row_wait_seconds"] for record in run.records) / seconds,
        "data_share": stages["data"],
        "rows_share": stages["rows"],
    }


def rates(bench: Bench, found: dict[str, Any]) -> Iterator[None]:
    """Images a second at 1 … all GPUs, of generated images, with and without an encoder."""
    for num_gpus in bench.num_gpus:
        for images in ("generated", "none"):
            found.setdefault(images, {})[str(num_gpus)] = _rate(bench.resident(images, num_gpus=num_gpus), bench.size)
            yield


def rates_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| images | GPUs | images/s | time of a step | × one GPU | waiting for rows |",
        "|---|---|---|---|---|---|",
    ]
    for images, by_number in found.items():
        one = by_number.get("1", {}).get("images_per_second")
        for number, rate in by_number.items():
            ratio = f"{rate['images_per_second'] / one:.2f}" if one else ""
            lines.append(
                f"| {_IMAGES[images]} | {number} | {rate['images_per_second']:,.0f} | {rate['step']} | {ratio} | "
                f"{rate['row_wait_share']:.2%} |"
            )
    return lines


_IMAGES = {"none": "without an encoder", "generated": "encoder"}


def resident(bench: Bench, found: dict[str, Any]) -> Iterator[None]:
    """Resident rows against K rows in plain GPU memory by the encoder's own SGD, in turn; the first is of `rates`."""
    for images in ("generated", "none"):
        seconds: dict[str, list[float]] = {"resident": [], "plain": []}
        for again in range(bench.size.rounds):
            seconds["resident"] += bench.resident(images, again=again).step_seconds
            seconds["plain"] += bench.plain(images, again=again).step_seconds
            ours, theirs = (Run(values, [], {}).step for values in seconds.values())
            found[images] = {"resident": ours, "plain": theirs, "ratio": theirs.p50 / ours.p50}
            yield


def resident_table(found: dict[str, Any]) -> list[str]:
    lines = [f"Goal: {RESIDENT_GOAL} × the images a second of K rows in plain GPU memory, with the encoder.", ""]
    lines += ["| images | resident rows | plain rows | × plain's images/s |", "|---|---|---|---|"]
    return lines + [
        f"| {_IMAGES[images]} | {result['resident']} | {result['plain']} | {result['ratio']:.3f} |"
        for images, result in found.items()
    ]


def all_rows(bench: Bench, found: dict[str, Any]) -> Iterator[None]:
    """The paper's Section 4: memory and time of an epoch with all N rows on each GPU, and with K of them."""
    num_gpus, size = bench.num_gpus[-1], bench.size
    found |= {"gpus": num_gpus, "batch_size": size.batch_size, "gpu_bytes": bench.gpu_bytes, "cases": []}
    for name, num_rows in size.all_rows:
        steps = num_rows / size.batch_size
        needed = bench.plain_bytes(num_rows)
        case: dict[str, Any] = {"images": name, "num_images": num_rows}
        dense = case | {"rows": "all N", "needed_bytes": needed}
        if needed > bench.gpu_bytes:
            dense["refused"] = "its tensors alone are larger than a GPU's memory"
        else:
            try:
                run = bench.plain("generated", num_gpus=num_gpus, num_images=num_rows, num_negatives=num_rows)
                dense |= _epoch(run, steps)
            except RunFailedError as error:
                if "out of memory" not in str(error):
                    raise
                dense["refused"] = "ran out of memory"
        found["cases"].append(dense)
        yield
        run = bench.resident("generated", num_gpus=num_gpus, num_images=num_rows)
        found["cases"].append(case | {"rows": "K"} | _epoch(run, steps))
        yield


def _epoch(run: Run, steps: float) -> dict[str, Any]:
    return {
        "step": run.step,
        "measured_intervals": len(run.step_seconds),
        "epoch_seconds": run.step.p50 * steps,
        "peak_bytes": run.summary["peak_memory_bytes"],
    }


def all_rows_table(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['gpus']} GPU(s), {found['batch_size']} images a step.",
        "The time of an epoch is not measured: it is that of a step times N/B. Memory is the most that torch's tensors",
        "took, without CUDA's own half GB.",
        "",
        "| images | N | rows on each GPU | peak memory | time of a step | an epoch | paper (8 V100, 64 images each) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        memory, seconds = PAPER.get(case["images"], {}).get(case["rows"], (None, None))
        paper = ", ".join([*([f"{memory:,} MiB"] if memory else []), *([f"{seconds:,} s"] if seconds else [])])
        name = f"| {case['images']} | {case['num_images']:,} | {case['rows']} | "
        if "refused" in case:
            lines.append(f"{name}at least {case['needed_bytes'] / _GIB:,.0f} GiB | {case['refused']} | | {paper} |")
        else:
            peak, epoch = case["peak_bytes"] / _MIB, case["epoch_seconds"]
            lines.append(f"{name}{peak:,.0f} MiB | {case['step']} | {epoch:,.0f} s | {paper} |")
    return lines


def idle(bench: Bench, found: dict[str, Any]) -> Iterator[None]:
    """How much of a step the GPU is idle, its launches, and how often the program waits for it."""
    for num_gpus in sorted({bench.num_gpus[0], bench.num_gpus[-1]}):
        for images in ("generated", "none"):
            run = bench.runner.train("benchmarks.gpu.profiled", bench.arguments(images), num_gpus)
            step = bench.resident(images, num_gpus=num_gpus).step  # which nobody watches
            busy = run.extra["busy_seconds"]
            found.setdefault(images, {})[str(num_gpus)] = run.extra | {
                "step": step,
                "idle_share": max(0.0, 1 - busy / step.p50),
            }
            yield


def idle_table(found: dict[str, Any]) -> list[str]:
    lines = [
        "| images | GPUs | idle | busy a step | kernels | copies | host waits | collectives, of that alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for images, by_number in found.items():
        for number, seen in by_number.items():
            lines.append(
                f"| {_IMAGES[images]} | {number} | {seen['idle_share']:.1%} | {1e3 * seen['busy_seconds']:.2f} ms | "
                f"{seen['kernels']:,.0f} | {seen['copies']:.1f} | {seen['waits']:.1f} | "
                f"{1e3 * seen['collective_seconds']:.2f}, {1e3 * seen['collective_seconds_alone']:.2f} ms |"
            )
    waits = {
        line: times
        for by_number in found.values()
        for seen in by_number.values()
        for line, times in seen["waits_by_line"].items()
    }
    traced = {seen["traced"] for by_number in found.values() for seen in by_number.values()}
    lines += [
        "",
        "Waits a step: " + (", ".join(f"{line} {times:.1f}" for line, times in waits.items()) or "none") + ".",
    ]
    return lines + (["", "No GPU could be traced: kernels are the processor's operations."] if "CPU" in traced else [])


def memory(bench: Bench, found: dict[str, Any]) -> Iterator[None]:
    """Peak memory by the number of images a GPU."""
    for batch_size in bench.size.batches_per_gpu:
        run = bench.resident("generated", batch_size=batch_size)
        found[str(batch_size)] = {
            "peak_bytes": run.summary["peak_memory_bytes"],
            "images_per_second": batch_size / run.step.p50,
        }
        yield


def memory_table(found: dict[str, Any]) -> list[str]:
    lines = ["| images on the GPU | peak memory | images/s |", "|---|---|---|"]
    return lines + [
        f"| {number} | {seen['peak_bytes'] / _MIB:,.0f} MiB | {seen['images_per_second']:,.0f} |"
        for number, seen in found.items()
    ]


Section = tuple[Callable[[Bench, dict[str, Any]], Iterator[None]], Callable[[dict[str, Any]], list[str]]]
SECTIONS: dict[str, Section] = {
    "rates": (rates, rates_table),
    "resident": (resident, resident_table),
    "all-rows": (all_rows, all_rows_table),
    "idle": (idle, idle_table),
    "memory": (memory, memory_table),
}
"""What measures a section, handing over after each part of it, and what makes a table of the results."""
