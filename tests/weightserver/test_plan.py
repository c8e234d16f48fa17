"""Planned figures compared with measured ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.head import tensor_bytes
from trainer.data.pack_files import SEGMENT_BYTES
from trainer.optimization import OptimizationConfig
from weightserver.cli import main
from weightserver.core.correction import MAX_STEPS
from weightserver.operations import backup
from weightserver.operations import plan as planning
from weightserver.operations.plan import Workload, plan
from weightserver.torch import windows
from weightserver.torch.ranks import Ranks
from weightserver.torch.sampler import WindowSampler

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"


def measured(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return results


def planned(part: str, name: str, **load: Any) -> float:
    (value,) = (figure.value for figure in plan(Workload(**load))[part] if figure.name == name)
    return value


IMAGENET: dict[str, Any] = {"num_rows": 1_281_167, "num_negatives": 65_536, "batch_size": 512}
IMAGENET |= {"window_size": 131_072, "window_stride": 16_384}


def test_a_plan_counts_with_what_runs_have() -> None:
    """Its own module loads neither torch nor the clients, whose constants these are."""
    groups = (planning._LARGEST_GROUP, planning._GROUPS_OF_NODE)
    assert planning._SHARDS_AT_ONCE == backup._SHARDS_AT_ONCE
    assert planning._SEGMENT_BYTES == SEGMENT_BYTES
    assert groups == (windows._LARGEST_GROUP, windows._GROUPS_OF_NODE)


@pytest.mark.parametrize("rows", ["resident", "remote"])
def test_bytes_on_the_wire_are_as_measured(rows: str) -> None:
    expected = measured("wire")[rows]["bytes_per_step"]
    assert planned("on the wire", f"{rows}: bytes both ways", **IMAGENET) == pytest.approx(expected, rel=0.05)


def test_rows_on_the_wire_are_as_measured() -> None:
    moved = planned("on the wire", "resident: rows fetched, and as many written", **IMAGENET)
    assert 2 * moved == pytest.approx(measured("wire")["resident"]["rows_per_step"], rel=0.05)


def test_bytes_on_disk_are_as_measured() -> None:
    """Ten million rows written once; and passes over a small table, three checkpoints kept: the window of 32,768 rows
    moves by 8,192 a write, and at every fourth there is a checkpoint, at which the window is written too; or not."""
    stored = planned("rows on disk, all shards", "all N rows, expected", num_rows=10_000_000, checkpoint_every=0)
    assert stored == pytest.approx(measured("checkpoints")["sizes"]["10000000"]["disk_bytes"], rel=0.05)
    load = {
        "num_rows": 300_000,
        "window_size": 32_768,
        "window_stride": 8_192,
        "num_negatives": 32_768,
        "batch_size": 32_768,
    }
    runs = measured("checkpoints")["long_runs"]
    for name, checkpoint_every in (("rows leave, window flushed", 4), ("rows leave", 10**9)):
        stored = planned("rows on disk, all shards", "all N rows, expected", **load, checkpoint_every=checkpoint_every)
        assert stored == pytest.approx(max(runs[name]["disk_bytes"]), rel=0.05)
        most = planned("rows on disk, all shards", "all N rows, at most", **load, checkpoint_every=checkpoint_every)
        assert most > max(runs[name]["disk_bytes"])


def test_bfloat16_halves_disk_and_wire() -> None:
    for part, name in (
        ("rows on disk, all shards", "all N rows, expected"),
        ("on the wire", "resident: bytes both ways"),
        ("on the wire", "remote: bytes both ways"),
        ("a shard's work", "memory: page cache for the window"),
    ):
        whole, halved = planned(part, name, **IMAGENET), {"dtype": "bfloat16", "rows_per_block": 125}
        assert planned(part, name, **IMAGENET, **halved) / whole == pytest.approx(0.5, abs=0.01)
    wide = planned("rows on disk, all shards", "all N rows, expected", **IMAGENET, dtype="bfloat16")
    assert wide / planned("rows on disk, all shards", "all N rows, expected", **IMAGENET) == pytest.approx(9 / 16)


def test_bytes_of_the_head_are_those_that_the_benchmark_counts() -> None:
    planned_bytes = planned("a trainer's memory, per rank", "the head's tensors", **IMAGENET)
    assert planned_bytes == tensor_bytes(IMAGENET["num_negatives"])


def test_a_shard_starts_in_the_time_that_its_blocks_take() -> None:
    assert planned("time", "starting a shard", num_rows=32_000_000) == pytest.approx(3.3, rel=0.01)
    assert planned("time", "starting a shard", num_rows=10**9) > 60


def test_shards_and_ranks_share() -> None:
    for part, figures in plan(Workload(**IMAGENET)).items():
        for figure in figures:
            shared = planned(part, figure.name, **IMAGENET, num_shards=4, num_ranks=4)
            divided = part == "a trainer's memory, per rank" or "shards" in figure.formula
            if figure.name in ("resident rows", "memory: products of the schedule"):
                divided = False
            alone = 1.0 if figure.name == "starting a shard" else 0.0  # s, which its process takes without rows
            whole = figure.value - alone
            assert shared - alone == pytest.approx(whole / 4 if divided else whole), figure.name


BAD = {
    "--num-rows=0": "--num-rows must be at least 1, got 0",
    "--window-stride=131073": "--window-size must be in S..N, got 131072",
    "--num-negatives=2000000": "--num-negatives must be in B..N, got 2000000",
    "--num-negatives=511": "--num-negatives must be in B..N, got 511",
    "--num-ranks=513": "--num-ranks must be in 1..B, got 513",
    "--num-nodes=2": "--num-nodes must be in 1..ranks, got 2",
    "--copy-mb-per-second=0": "--copy-mb-per-second must be in 1e-9..1e9, got 0.0",
    "--disk-price=-1": "--disk-price must be in 0..1e9, got -1.0",
    "--steps=33554433": "--steps must be in 1..33554432, got 33554433",
    "--steps-per-second=nan": "--steps-per-second must be in 1e-9..1e9, got nan",
    "--rows-per-block=0": "rows_per_block must lie in 1..2048, got 0",
    "--checkpoint-every=-1": "--checkpoint-every must be 0 or more, got -1",
    f"--steps=1{'0' * 310}": f"--steps must be at most {2**48}, got 1{'0' * 310}",
}


@pytest.mark.parametrize("option", BAD)
def test_plan_rejects_invalid_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--num-rows", "1000000", option])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"weightserver plan: {BAD[option]}\n"


def test_the_largest_plans_are_numbers() -> None:
    """JSON has no infinity."""
    largest, rate = 2**48, 1e9
    many = {"num_rows": largest, "window_size": largest, "num_negatives": largest, "dim": 65_536, "rows_per_block": 1}
    for more in (
        {"batch_size": largest, "window_stride": largest, "steps_per_second": rate, "keep_checkpoints": largest},
        {"batch_size": 1, "window_stride": 1, "steps_per_second": 1 / rate, "checkpoint_every": 1, "steps": MAX_STEPS},
        {"batch_size": largest, "num_shards": largest, "num_ranks": largest, "num_nodes": largest, "steps": 1},
        {"steps": MAX_STEPS, "image_bytes": largest, "node_price": rate, "shard_price": rate, "disk_price": rate},
    ):
        for figures in plan(Workload(**many | more)).values():
            assert all(math.isfinite(figure.value) and "inf" not in str(figure).split("   ")[0] for figure in figures)


@pytest.mark.parametrize("num_rows", [2_000_000_000, 10_000_000_000])
def test_plan_refuses_the_length_that_the_trainer_refuses(num_rows: int) -> None:
    """A pass is N · (W/S) / B steps: W/S epochs. The batch that the message names is the least that both take."""
    epochs = 131_072 / 16_384

    def both(batch_size: int) -> None:
        plan(Workload(num_rows=num_rows, batch_size=batch_size))
        OptimizationConfig(epochs=epochs, batch_size=batch_size).num_steps(num_rows)

    steps = round(epochs * num_rows / 256)
    with pytest.raises(ValueError, match=f"one pass takes {steps:,} steps, a run at most 33,554,432") as refused:
        Workload(num_rows=num_rows, batch_size=256)
    with pytest.raises(ValueError, match="at most 33,554,432 are possible"):
        OptimizationConfig(epochs=epochs, batch_size=256).num_steps(num_rows)
    (least,) = map(int, re.findall(r"--batch-size of at least (\d+)", str(refused.value)))
    both(least)
    with pytest.raises(ValueError, match="at most"):
        both(least - 1)


@pytest.mark.parametrize(("num_nodes", "window_stride"), [(1, 2_048), (4, 2_048), (8, 2_048), (8, 8_192)])
def test_nodes_read_the_share_of_the_images_that_batches_deal_them(num_nodes: int, window_stride: int) -> None:
    load: dict[str, Any] = {"batch_size": 1_024, "window_size": 8_192, "window_stride": window_stride}
    num_rows = 65_536
    sampler = WindowSampler(num_rows, **load, seed=3, ranks=Ranks(world_size=8, num_nodes=num_nodes))
    steps = range(num_rows // window_stride * 8_192 // 1_024)
    batches = np.stack([sampler.classes_of_step(step) for step in steps])  # in the order of the ranks
    read = [len(np.unique(part)) / num_rows for part in np.split(batches, num_nodes, axis=1)]
    load |= {"num_rows": num_rows, "num_negatives": 1_024}
    share = planned("images", "share of the images that a node reads", **load, num_ranks=8, num_nodes=num_nodes)
    assert np.mean(read) == pytest.approx(share, rel=0.1)


def test_money_is_the_sum_of_machines_and_disks() -> None:
    """A run of ten hours on two nodes and four shards."""
    load = IMAGENET | {"steps": 36_000, "num_ranks": 2, "num_nodes": 2, "num_shards": 4, "image_bytes": 1000}
    assert "money" not in plan(Workload(**load))
    prices: dict[str, Any] = {"node_price": 20.0, "shard_price": 1.0, "disk_price": 0.1}
    figures = {figure.name: figure.value for figure in plan(Workload(**load, **prices))["money"]}
    rows = planned("rows on disk, all shards", "all N rows, expected", **load)
    disk = (rows / 1e9 + 1.281167) * 0.1 * 10 / 730
    assert list(figures.values()) == pytest.approx([400, 40, disk, 440 + disk])


def test_the_table_of_sizes_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (RESULTS.parents[1] / "docs/scale.md").read_text().split("\n## ")[0]
    commands = re.findall(r"(?m)^    weightserver plan (.*)$", text.replace("\\\n", ""))
    columns = [planned_by_command(capsys, *command.split()) for command in commands]
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.count(" | ") == 5][1:]
    assert (len(columns), len(rows)) == (4, 27)
    for part, name, *cells in rows:
        for cell, column in zip(cells, columns, strict=True):
            (found,) = re.findall(
                rf"(?m)^{re.escape(part)}\n(?:  .*\n)*?  {re.escape(name)} +(\S+(?: \S+)?) *   ", column
            )
            assert found == cell, (part, name)


def test_pages_have_as_many_versions_of_rows_as_a_plan() -> None:
    assert 1 + Workload(num_rows=10**6).keep_checkpoints == 4
    servers, runbook = ((RESULTS.parents[1] / f"docs/{name}.md").read_text() for name in ("servers", "runbook"))
    assert "at most four times" in servers
    assert "to four times with three checkpoints kept" in runbook


def test_a_plan_says_what_other_sources_take_to_be_listed() -> None:
    """docs/scale.md has what each was measured to take."""
    (kinds,) = re.findall(r"anything else on one\. (.*?), of which", (RESULTS.parents[1] / "docs/scale.md").read_text())
    times = [int(number) / (80 + planning._LISTED_MORE) for number in re.findall(r"\d+", kinds)]
    (figure,) = (one for one in plan(Workload(num_rows=10**6))["images"] if one.name.startswith("memory"))
    assert len(times) == 6
    assert f"; {min(times):.0f} to {max(times):.0f} times as much" in figure.formula


def planned_by_command(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *options])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def test_the_command_line_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults that ImageNet's size allows are limited to what fits; what is given is not."""
    for num_rows, name, value in (
        ("1281167", "remote: bytes both ways", 2 * 65_536 * (4 * 128 + 8)),
        ("3648", "resident rows", 3648),
    ):
        parts = json.loads(planned_by_command(capsys, "--num-rows", num_rows, "--json")).values()
        assert {figure["name"]: figure["value"] for part in parts for figure in part}[name] == value
    small = planned_by_command(capsys, "--num-rows", "10000", "--window-size", "1000")
    assert re.search(r"steps of a pass over all rows +156\.2 steps", small), "the window moves by an eighth"
    with pytest.raises(SystemExit):
        main(["plan", "--num-rows", "300", "--batch-size", "512"])
    assert capsys.readouterr().err == "weightserver plan: --batch-size must be at most N, got 512\n"
