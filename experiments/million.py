"""A million real images end to end on one machine: glyphs of Debian's Chinese, Japanese and Korean fonts.

    make million        # or python -m experiments.million --images 20000 --epochs 2 --output build/some

Renders every Han character of the training fonts once a face, a million images of 32 × 32 pixels labelled by their
character, and 20,000 of other fonts. Packs them with Ray on all cores, trains with K of N rows on local weight servers,
whose rows leave the window and come back in each pass, and classifies the held-out fonts by nearest neighbours, with
the trained encoder and with an untrained one. Each step is left out if its result is there: repeat the command to
resume. What was measured goes to experiments/results/million.json, from which `python -m experiments page` writes a
section of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from experiments.han import PACKAGES, SIDE, write_images
from experiments.icons import download_packages
from experiments.run_cell import processor
from trainer.data.manifest import Manifest
from trainer.run.directory import METRICS_FILE, read_metrics, read_settings, read_summary
from trainer.stopping import exit_on_error
from weightserver.common.atomic_files import atomic_directory, atomic_write, to_path

IMAGES, HELD_OUT = 1_000_000, 20_000
RESULTS = Path(__file__).parent / "results" / "million.json"
_KNOWN = "BabelStoneHan.ttf"
"""A font of test images. Two training fonts are made from the same fonts as it is."""
_BY_FONT = "fonts.json"
_SETTINGS = ("batch_size", "num_negatives", "window_size", "window_stride")


def _train_command(data: Path, output: Path, number: int, *extent: str) -> list[str]:
    """Trains with a rank for each core. A window holds a hundredth of the images and moves by half of it: the rows
    of all others wait at the servers until the next pass. With a larger one, images came back so late that the
    encoder had changed, and it learned nothing from six visits."""
    window = 1 << max(10, (number // 100).bit_length() - 1)
    settings: dict[str, object] = {
        "data-dir": data,
        "output": output,
        "batch-size": 256,
        "learning-rate": 0.12,
        "warmup-fraction": 0.025,
        "weight-decay": 3e-4,
        "window-size": window,
        "window-stride": window // 2,
        "num-negatives": max(512, window // 8),
        "embedding-norm": "batch",
        "num-shards": 2,
        "precision": "float32",
        "encoder.name": "small",
        "encoder.in-channels": 3,
        "encoder.image-size": SIDE,
        "encoder.width": 16,
        "augmentation.flip-probability": 0,
        "augmentation.blur-probability": 0,
        "augmentation.min-scale": 0.5,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    ranks = ["torchrun", "--standalone", f"--nproc-per-node={os.cpu_count()}", "-m", "trainer"]
    return [*ranks, "imagenet-11k", *options, *extent, "--encoder.blocks", "1", "1", "1", "--resume", "auto"]


def _run(command: Sequence[str], memory: Path | None = None) -> None:
    """Runs a command. With `memory`, what its processes use is appended there every ten seconds.

    Raises ValueError if it fails.
    """
    print("$", *command, file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} if command[0] == "torchrun" else dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(command, env=environment)
    ended = threading.Event()
    if memory is not None:
        threading.Thread(target=_sample_memory, args=(psutil.Process(process.pid), memory, ended), daemon=True).start()
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        ended.set()
    if status:
        raise ValueError(f"{' '.join(command[:4])} … ended with status {status}: see above, and repeat this command")


def _sample_memory(process: psutil.Process, path: Path, ended: threading.Event) -> None:
    while True:
        sizes = {"trainer": 0, "servers": 0}
        with suppress(psutil.Error):  # it has ended
            for child in process.children(recursive=True):
                kind = "servers" if "weightserver" in child.cmdline() else "trainer"
                sizes[kind] += child.memory_info().rss - child.memory_info().shared  # without the rows' file
        with path.open("a") as lines:
            lines.write(json.dumps({"time": time.time(), **sizes}) + "\n")
        if ended.wait(10):
            return


def make(output: Path, fonts: Path | None, sizes: dict[str, int], epochs: float) -> dict[str, Any]:
    """Makes all that is not in `output` yet, and returns what was measured.

    Raises:
        ValueError: fonts cannot be downloaded, or a command failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    images, packed, run, untrained = (output / name for name in ("images", "packed", "run", "untrained"))
    python = [sys.executable, "-m"]
    if not images.exists():
        unpacked = fonts or output / "fonts"
        if not unpacked.exists():
            with atomic_directory(unpacked) as partial:
                download_packages(partial, [package for split in PACKAGES.values() for package in split])
        with atomic_directory(images) as partial:
            by_font = write_images(partial, unpacked, sizes)
            atomic_write(output / _BY_FONT, lambda path: path.write_text(json.dumps(by_font)))
    _run([*python, "trainer.data", "pack", str(images), str(packed), "--engine", "ray"])
    for split, pack in (("train", packed), ("test", packed / "test")):
        if (there := Manifest.load(pack).num_images) != sizes[split]:
            raise ValueError(f"{pack} has {there:,} images, not {sizes[split]:,}: give another --output")
    number = sizes["train"]
    if not (run / "summary.json").exists():
        _run(_train_command(packed, run, number, f"--epochs={epochs}"), output / "memory.jsonl")
    if not (untrained / "summary.json").exists():  # one step at a rate that changes nothing
        _run(_train_command(packed, untrained, number, "--steps=1", "--learning-rate=1e-9"))
    for encoder in (run, untrained):
        if not (encoder / "evaluation" / "knn.json").exists():
            _run([*python, "trainer.evaluate", "knn", "--run", str(encoder), "--k", "5"])
    return _measured(output, sizes)


def _measured(output: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """What the page shows; at most 200 points of each curve."""
    run = output / "run"
    settings = read_settings(run)
    records = [record for record in read_metrics(run / METRICS_FILE) if "loss" in record]
    memory = [json.loads(line) for line in (output / "memory.jsonl").read_text().splitlines()]
    waits, seconds = (sum(record[name] for record in records) for name in ("row_wait_seconds", "seconds"))
    return {
        "images": sizes["train"],
        "held_out": sizes["test"],
        "held_out_by_font": json.loads((output / _BY_FONT).read_text())["test"],
        "classes": len(json.loads((output / "packed" / "manifest.json").read_text())["classes"]),
        "settings": {name: settings[name] for name in _SETTINGS},
        "summary": {name: value for name, value in read_summary(run).items() if isinstance(value, int | float)},
        "row_wait_share": waits / seconds,
        "knn_top1": {name: _knn_top1(output / name) for name in ("run", "untrained")},
        "loss": [(record["step"], record["loss"]) for record in _thinned(records)],
        "memory": [(line["trainer"], line["servers"]) for line in _thinned(memory)],
        "cores": os.cpu_count(),
        "processor": processor(),
    }


def _knn_top1(run: Path) -> float:
    return float(json.loads((run / "evaluation" / "knn.json").read_text())["top1"])


def _thinned(records: Sequence[Any]) -> Sequence[Any]:
    return records[:: max(1, -(-len(records) // 200))]


def section(results: Path, picture: Path, link: str) -> Iterator[str]:
    """The page's section, from what was measured; draws the picture to which it links. Nothing without results."""
    if not results.exists():
        return
    found = json.loads(results.read_text())
    summary, settings, knn = found["summary"], found["settings"], found["knn_top1"]
    visits = f"{summary['epochs']:.3g}"
    passes = summary["epochs"] * settings["window_stride"] / settings["window_size"]
    memory = np.array(found["memory"]) / 2**30
    middle = len(memory) // 2
    halves = [np.median(half, axis=0) for half in (memory[: middle + 1], memory[middle:])]
    known = found["held_out_by_font"].get(_KNOWN, 0) / found["held_out"]
    others = 100 * max(0.0, (knn["run"] / 100 - known) / (1 - known))
    _draw(found, picture)
    yield f"## {found['images']:,} images, end to end\n"
    yield (
        f"`make million` renders {found['images']:,} glyphs of {found['classes']:,} Han characters of Debian's fonts,\n"
        f"packs them with Ray, and trains on {found['cores']} cores ({found['processor']}) with K = "
        f"{settings['num_negatives']:,},\nB = {settings['batch_size']}, W = {settings['window_size']:,} and S = "
        f"{settings['window_stride']:,}. Test images are of fonts that no training\nimage has, and their labels are "
        f"characters; kNN has k = 5. One of these fonts, BabelStone Han with\n{100 * known:.0f} % of the images, is "
        "made from Arphic's Mingti and Sungti, as two of the training fonts are: if all of its images\nwere told, "
        f"{others:.1f} % of the others were, which is the least possible. {visits} visits to each image are not the "
        "paper's\nproportions: W was chosen by the losses of shorter runs, of which those with W = 65,536 collapsed.\n"
    )
    rows = {
        "kNN top-1, trained": f"{knn['run']:.2f} %",
        "kNN top-1, untrained (its BatchNorm not calibrated)": f"{knn['untrained']:.2f} %",
        "passes over the images": f"{passes:.3g}",
        "visits to each image": visits,
        "rows fetched": f"{summary['fetched_rows']:,.0f}",
        "rows corrected when they came back, most of them within the window": f"{summary['corrected_rows']:,.0f}",
        "steps that these had missed, mean and most": f"{summary['missed_steps'] / summary['corrected_rows']:,.0f} and "
        f"{summary['largest_gap']:,.0f}",
        "share of time waiting for rows": f"{100 * found['row_wait_share']:.2f} %",
        "memory of the trainer, median of first and second half": " and ".join(f"{half[0]:.2f}" for half in halves)
        + " GiB",
        "memory of the servers, the same": " and ".join(f"{half[1]:.2f}" for half in halves) + " GiB",
        "time of training": f"{summary['train_seconds'] / 3600:.1f} h",
    }
    yield from ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    yield f"![{found['images']:,} images, end to end]({link})\n"


def _draw(found: dict[str, Any], path: Path) -> None:
    """Loss over steps, memory over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    memory = np.array(found["memory"]) / 2**30
    hours = np.linspace(0, found["summary"]["train_seconds"] / 3600, len(memory))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "million", "font.size": 9}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
        left.plot(*np.array(found["loss"]).T)
        left.set(xlabel="step", ylabel="loss")
        right.plot(hours, memory, label=("trainer", "servers"))
        right.set(xlabel="hours", ylabel="GiB", ylim=(0, None))
        right.legend()
        atomic_write(path, lambda partial: figure.savefig(partial, format="svg", metadata={"Date": None}))
        plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns 0, or exits as `exit_on_error` does."""
    parser = argparse.ArgumentParser(prog="python -m experiments.million", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=to_path, default=Path("build/million"), help="folder (build/million)")
    parser.add_argument("--packages", type=to_path, help="folder with the unpacked packages (default: download them)")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"training images ({IMAGES:,})")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"test images ({HELD_OUT:,})")
    parser.add_argument("--epochs", type=float, default=6.0, help="visits to each image; two are a pass (6)")
    options = parser.parse_args(arguments)
    sizes = {"train": options.images, "test": options.held_out}
    with exit_on_error("million"):
        found = make(options.output, options.packages, sizes, options.epochs)
        results = RESULTS if sizes == {"train": IMAGES, "test": HELD_OUT} else options.output / RESULTS.name
        atomic_write(results, lambda path: path.write_text(json.dumps(found, indent=1) + "\n"))
    print(f"kNN on held-out fonts {found['knn_top1']['run']:.2f} %, untrained {found['knn_top1']['untrained']:.2f} %")
    print(f"{results}: python -m experiments page shows it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
