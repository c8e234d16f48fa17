"""Any number of ranks trains like one, with real processes over gloo and real weight servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
import torch.multiprocessing

from tests.helpers.gpus import Gpus
from tests.helpers.small_run import losses
from trainer.distributed import process_group
from trainer.schedule import learning_rates
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.core.sharding import Sharding
from weightserver.torch import (
    ClassifierHead,
    DenseRows,
    LearningRates,
    Ranks,
    RecentRows,
    RemoteRows,
    ResidentRows,
    RowStore,
    VisitSchedule,
    announced,
    cosine_softmax_loss,
)

BATCH_SIZE, DIM, NUM_ROWS, NUM_ACTIVE = 10, 16, 300, 60
SPEC = TableSpec(num_rows=NUM_ROWS, dim=DIM, weight_decay=1e-3, rows_per_block=7)
SCHEDULES = {"sliding": (80, 20, 140), "epoch": (NUM_ROWS, NUM_ROWS, NUM_ROWS)}
"""Window size, stride, resident rows."""
STORES = ("dense", "remote", "resident")
Recorded = dict[str, npt.NDArray[Any]]


def replay(
    rank: int,
    world_size: int,
    port: int,
    addresses: list[str],
    store: str,
    schedule: str,
    steps: int,
    out: str,
    device_name: str,
) -> None:
    """Trains one rank's share of the rows on its slice of features, which are functions of the image and the step."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    window_size, window_stride, capacity = SCHEDULES[schedule]
    rates = learning_rates(num_steps=steps, base=0.5, warmup_steps=steps // 10)
    visits = VisitSchedule(num_rows=NUM_ROWS, window_size=window_size, window_stride=window_stride, seed=5)
    recent = RecentRows(visits, num_active=NUM_ACTIVE, batch_size=BATCH_SIZE)
    sharding = Sharding(SPEC.rows_per_block, world_size)
    centres = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1))
    noise = torch.Generator().manual_seed(2)
    with process_group(torch.device(device_name)) as ranks, WeightClient(addresses) as client:
        device = ranks.device
        if store != "dense":
            client.extend_schedule(0, rates)
        rows = open_store(store, client, rates, capacity, rank, world_size, device)
        step_losses, feature_gradients, held = [], [], 0
        of_steps = (recent.active(step).share(sharding, rank) for step in range(steps))
        shares = announced(of_steps, rows, range(steps))
        for step, active in enumerate(shares):
            batch = torch.from_numpy(visits.visits(step * BATCH_SIZE, (step + 1) * BATCH_SIZE))
            whole = centres[batch] + 0.5 * torch.randn(BATCH_SIZE, DIM, generator=noise)
            features = whole[ranks.share(BATCH_SIZE)].to(device).requires_grad_()
            weight = rows.weights(active.rows, step=step).to(device).requires_grad_()
            labels = torch.from_numpy(active.labels).to(device)
            loss = cosine_softmax_loss(features, weight, labels, temperature=0.2, ranks=ranks)
            loss.backward()
            assert weight.grad is not None
            assert features.grad is not None
            rows.apply_gradients(active.rows, weight.grad, step=step)
            step_losses.append(loss.item())
            feature_gradients.append(features.grad.cpu().numpy() / world_size)  # what averaging over ranks makes of it
            held = max(held, rows.counters.resident_rows)
        rows.flush()
        ranks.barrier()
        mine = sharding.rows_of_shard(rank, NUM_ROWS)
        state = rows.read_state(mine, step=steps)
        np.savez(
            f"{out}-{rank}.npz",
            losses=step_losses,
            feature_gradients=feature_gradients,
            rows=mine,
            weight=state.weight,
            momentum_buffer=state.momentum_buffer,
            held=held,
        )
        rows.close()


def open_store(
    store: str,
    client: WeightClient,
    rates: npt.NDArray[np.float32],
    capacity: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> RowStore:
    if store == "dense":
        sharding = Sharding(SPEC.rows_per_block, world_size)
        return DenseRows(SPEC, LearningRates(SPEC, rates), device=device, sharding=sharding, shard=rank)
    client.open_session("ranks", join=client.describe().epoch)
    if store == "remote":
        return RemoteRows(client)
    sharding = Sharding(SPEC.rows_per_block, world_size)
    share = len(sharding.rows_of_shard(0, min(NUM_ROWS, capacity + SPEC.rows_per_block * world_size)))
    return ResidentRows(
        client, SPEC, LearningRates(SPEC, rates), capacity=share, prefetch_steps=3, write_back_rows=10, device=device
    )


def replay_on_gpu(*arguments: Any) -> None:
    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    replay(rank, world_size, port, *arguments, device_name="cuda")


def train(
    cluster: LocalCluster,
    world_size: int,
    store: str,
    schedule: str,
    steps: int,
    directory: Path,
    gpus: Gpus | None = None,
) -> Recorded:
    """The records of all ranks together, with rows in the order of their ids."""
    with WeightClient(cluster.addresses) as client:
        client.drop_table()
        client.create_table(SPEC)
        client.extend_schedule(0, learning_rates(num_steps=steps, base=0.5, warmup_steps=steps // 10))
        client.open_session("ranks")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = directory / f"{store}-{schedule}-{world_size}"
    arguments = (cluster.addresses, store, schedule, steps, str(out))
    if gpus:
        gpus.run(replay_on_gpu, *arguments, directory=Path(f"{out}-logs"), num_ranks=world_size)
    else:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            replay, (world_size, port, *arguments, "cpu"), nprocs=world_size
        )
    parts = [dict(np.load(f"{out}-{rank}.npz")) for rank in range(world_size)]
    order = np.argsort(np.concatenate([part["rows"] for part in parts]))
    assert all(np.array_equal(part["losses"], parts[0]["losses"]) for part in parts), "ranks saw different losses"
    return {
        "losses": parts[0]["losses"],
        "feature_gradients": np.concatenate([part["feature_gradients"] for part in parts], axis=1),
        "weight": np.concatenate([part["weight"] for part in parts])[order],
        "momentum_buffer": np.concatenate([part["momentum_buffer"] for part in parts])[order],
        "held": np.array([part["held"] for part in parts]),
    }


def relative(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest ‖Δ‖/‖row‖."""
    difference = np.linalg.norm(actual.astype(np.float64) - expected, axis=-1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=-1)).max())


def assert_equal_over_ranks(
    cluster: LocalCluster,
    directory: Path,
    cases: list[tuple[int, str, str]],
    steps: int,
    *,
    gpus: Gpus | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Compares each case (world size, store, schedule) on GPUs or the CPU with dense rows on one rank and the CPU."""
    alone = {
        schedule: train(cluster, 1, "dense", schedule, steps, directory) for schedule in {case[2] for case in cases}
    }
    for world_size, store, schedule in cases:
        recorded = train(cluster, world_size, store, schedule, steps, directory, gpus)
        expected = alone[schedule]
        case = f"{store}, {schedule} schedule, {world_size} ranks"
        assert np.abs(recorded["losses"] / expected["losses"] - 1).max() <= tolerance, case
        for name in ("feature_gradients", "weight", "momentum_buffer"):
            assert relative(recorded[name], expected[name]) <= tolerance, f"{name}: {case}"
        even = NUM_ROWS if store == "dense" else SCHEDULES[schedule][2]
        if store != "remote":
            assert recorded["held"].max() <= even / world_size + 2 * SPEC.rows_per_block, case


@pytest.mark.guard
def test_ranks_train_like_one(cluster: LocalCluster, tmp_path: Path) -> None:
    """Batches of 10 do not divide evenly over three ranks."""
    assert_equal_over_ranks(cluster, tmp_path, [(3, "resident", "epoch")], steps=100)


@pytest.mark.parametrize(
    ("numbers", "stores", "steps"),
    [
        pytest.param(None, STORES, 150, id="GPUs", marks=pytest.mark.gpu),
        pytest.param([2], ["resident"], 30, id="pretended", marks=pytest.mark.guard),
    ],
)
def test_gpus_train_like_a_cpu(
    numbers: list[int] | None, stores: list[str], steps: int, gpus: Gpus, cluster: LocalCluster, tmp_path: Path
) -> None:
    """One rank per GPU, over NCCL if there are several. A GPU sums in another order: 1e-4."""
    numbers = numbers or list(range(1, gpus.number + 1))
    cases = [(number, store, "sliding") for number in numbers for store in stores]
    assert_equal_over_ranks(cluster, tmp_path, cases, steps, gpus=gpus, tolerance=1e-4)


def test_several_machines_need_servers_that_all_can_reach(tmp_path: Path) -> None:
    with ClassifierHead(NUM_ROWS, DIM, num_negatives=8, directory=tmp_path) as head:
        head._table.ranks = Ranks(local_world_size=0)
        with pytest.raises(ValueError, match=r"several machines .* give servers"):
            head.connect()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_stores_and_schedules_over_ranks_train_like_one(cluster: LocalCluster, tmp_path: Path) -> None:
    cases = [(n, store, schedule) for n in (1, 2, 3) for store in STORES for schedule in SCHEDULES]
    assert_equal_over_ranks(cluster, tmp_path, cases, steps=2_000)


def launch(num_ranks: int, output: Path, *more: str, kill_after_steps: int | None = None) -> None:
    """Starts a run as users do, including weight servers; optionally kills torchrun and all ranks with -9.

    GroupNorm: with BatchNorm a rank's statistics are its slice's.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "trainer", "synthetic", "--num-images", "500", "--output", str(output), "--steps", "50"]
    command += ["--batch-size", "16", "--num-negatives", "64", "--window-size", "96", "--window-stride", "24"]
    command += ["--rows-per-block", "5", "--dim", "16", "--log-every", "1", "--learning-rate", "0.3"]
    command += ["--encoder.image-size", "16", "--encoder.width", "8", "--encoder.norm", "group", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        if kill_after_steps is not None:
            while num_steps(output) < kill_after_steps:
                assert process.poll() is None, "it ended by itself"
                time.sleep(0.01)
            ranks = psutil.Process(process.pid).children(recursive=True)
            for one in [process, *(rank for rank in ranks if "weightserver" not in rank.cmdline())]:
                one.kill()
        errors = process.communicate(timeout=120)[1]
    assert (process.returncode != 0) == (kill_after_steps is not None), errors


def num_steps(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "resumed_on", "options"),
    [
        pytest.param(2, 1, "", id="2 ranks, then 1"),
        pytest.param(3, None, "", id="3 ranks"),
        pytest.param(2, 1, "--label-smoothing 0.1 --row-momentum 0.5", id="2 with our options"),
        pytest.param(1, 3, "--small-crops 2 --small-crop-size 12", id="1, then 3"),
    ],
)
def test_a_whole_run_is_the_same_on_any_number_of_ranks(
    num_ranks: int, resumed_on: int | None, options: str, tmp_path: Path
) -> None:
    """Even if it is killed and resumes with another number of ranks."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    launch(1, alone, *options.split())
    if resumed_on is None:
        launch(num_ranks, together, *options.split())
    else:
        launch(num_ranks, together, *options.split(), "--checkpoint-every", "19", kill_after_steps=25)
        launch(resumed_on, together, *options.split(), "--resume")
    for output in (alone, together):
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        assert {record["active_rows"] for record in records} == {64}
        assert all(1 <= record["active_rows_share"] < 1.5 for record in records)
        with LocalCluster(2, output / "servers") as cluster, WeightClient(cluster.addresses) as client:
            assert client.describe().clock == 50  # every rank's rows reached the servers
    one, many = (np.array(losses(output)) for output in (alone, together))
    assert one[-5:].mean() < one[:5].mean() - 0.05, "nothing was learned: this shows nothing"
    assert np.abs(many / one - 1).max() <= 1e-4


@pytest.mark.slow
def test_a_run_of_shared_classes_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    """With recent and sampled negatives, and a margin."""
    np.save(tmp_path / "labels.npy", np.random.default_rng(0).permutation(np.arange(500) % 80))
    options = ["--labels", str(tmp_path / "labels.npy"), "--negatives", "both", "--margin", "arcface"]
    for num_ranks in (1, 2):
        launch(num_ranks, tmp_path / str(num_ranks), *options)
    one, two = (np.array(losses(tmp_path / name)) for name in "12")
    assert len(one) == 50
    assert np.abs(two / one - 1).max() <= 1e-4
