"""Compares kNN and linear evaluation with lightly's, faiss and bare matrix products, on the same made features.

python -m benchmarks.evaluate [--rounds 5] [--bank 65536] [--queries 1024] [--output benchmarks/results]
python -m benchmarks.evaluate --imagenet DIRECTORY    # 1,281,167 × 2,048 features against 50,000: an hour of two cores

lightly and faiss are not dependencies of this project: a peer that is not installed is named and left out. Features
have 2,048 values and 1,000 classes, as ResNet-50's of ImageNet-1K. kNN: 200 neighbours, votes and the five best classes
of each query. linear: a step of the classifier by SGD on 256 features, for one learning rate and for eight.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Timing, at_least, in_turn, save_results, write_results
from trainer.data import Dataset
from trainer.evaluate.classifiers import Classifiers
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.features import Frozen
from trainer.evaluate.knn import SEARCHED_ROWS
from trainer.evaluate.neighbours import nearest, predict
from trainer.evaluate.settings import LinearConfig
from trainer.evaluate.stored_features import BLOCK_ROWS, StoredFeatures, block_file, write_array
from trainer.evaluate.subjects import Subject
from trainer.torchvision_schemas import import_module

DIM, NUM_CLASSES, K, TEMPERATURE, BATCH_SIZE = 2_048, 1_000, 200, 0.07, 256
IMAGENET_BANK, IMAGENET_QUERIES = 1_281_167, 50_000


def features(num_rows: int, seed: int) -> Tensor:
    """Unit vectors float16 [num_rows, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(num_rows, DIM, generator=generator)).half()


def labels(num_rows: int) -> Tensor:
    return torch.randint(0, NUM_CLASSES, (num_rows,), generator=torch.Generator().manual_seed(9))


def knn_calls(bank: Tensor, queries: Tensor) -> dict[str, Callable[[], object]]:
    """Each returns the best classes of the queries, int64 [M, ≥ 5], except for the bare product."""
    of_bank = labels(len(bank))

    def ours() -> Tensor:
        similarity, index = nearest(bank, queries, K)
        return predict(similarity, of_bank[index], NUM_CLASSES, k=K, temperature=TEMPERATURE)

    in_float32, queries_in_float32 = bank.float(), queries.float()
    calls: dict[str, Callable[[], object]] = {"bare product": lambda: queries_in_float32 @ in_float32.T, "ours": ours}
    transposed = in_float32.T.contiguous()
    if (lightly := _peer("lightly.utils.benchmarking")) is not None:

        def theirs() -> Tensor:
            parts = torch.split(queries_in_float32, BATCH_SIZE)
            found = [
                lightly.knn_predict(part, transposed, of_bank, NUM_CLASSES, knn_k=K, knn_t=TEMPERATURE)
                for part in parts
            ]
            return torch.cat(found)

        calls["lightly"] = theirs
    if (faiss := _peer("faiss")) is not None:
        faiss.omp_set_num_threads(torch.get_num_threads())
        searched = faiss.IndexFlatIP(DIM)
        searched.add(in_float32.numpy())

        def by_faiss() -> Tensor:
            similarity, index = map(torch.from_numpy, searched.search(queries_in_float32.numpy(), K))
            return predict(similarity, of_bank[index], NUM_CLASSES, k=K, temperature=TEMPERATURE)

        calls["faiss, our votes"] = by_faiss
    return calls


def linear_calls() -> dict[str, Callable[[], object]]:
    """Each makes one step on the same 256 features."""
    batch, wanted = features(BATCH_SIZE, 3).float(), labels(BATCH_SIZE)
    made = Dataset(
        train_images=torch.zeros(BATCH_SIZE, DIM, 1, 1, dtype=torch.uint8),
        train_labels=wanted,
        test_images=torch.zeros(1, DIM, 1, 1, dtype=torch.uint8),
        test_labels=wanted[:1],
    )

    def heads(num_rates: int) -> Callable[[], object]:
        pixels = Subject(name="features", encoder=None, config=None)
        evaluation = Evaluation(subject=pixels, dataset=made, state=Path())
        frozen = Frozen(pixels.network, pixels.pixels, torch.device("cpu"))
        training = Classifiers(
            evaluation, torch.arange(BATCH_SIZE), LinearConfig(), (30.0,) * num_rates, epochs=1, frozen=frozen
        ).training
        return lambda: training.step((batch[:, :, None, None], wanted), 0)

    weight = torch.zeros(NUM_CLASSES, DIM)
    gradient = torch.zeros(BATCH_SIZE, NUM_CLASSES)
    calls: dict[str, Callable[[], object]] = {
        "bare products": lambda: (batch @ weight.T, gradient.T @ batch),
        "ours": heads(1),
        "ours, 8 learning rates": heads(8),
    }
    if (lightly := _peer("lightly.utils.benchmarking")) is not None:
        classifier = lightly.LinearClassifier(nn.Identity(), BATCH_SIZE, feature_dim=DIM, num_classes=NUM_CLASSES)
        optimizer = torch.optim.SGD(classifier.get_trainable_parameters(), lr=30.0, momentum=0.9)

        def theirs() -> None:
            loss = F.cross_entropy(classifier(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        calls["lightly"] = theirs
    return calls


def _peer(name: str) -> Any | None:
    try:
        return import_module(name)
    except ImportError:
        print(f"{name} is not installed and is left out")
        return None


def as_table(times: dict[str, Timing], num_items: int, item: str) -> list[str]:
    lines = [f"| | time | microseconds {item} | relative to ours |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {time} | {1e6 * time.p50 / num_items:,.1f} | {time.p50 / times['ours'].p50:.2f} |"
        for name, time in times.items()
    ]
    return lines


def imagenet(directory: Path, output: Path) -> None:
    """Searches the neighbours of 50,000 queries among features of ImageNet's size, from files; writes the results.

    Repeat the command after an interruption: finished parts of the queries are kept in `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for block in range(-(-IMAGENET_BANK // BLOCK_ROWS)):
        if not (file := block_file(directory, block)).exists():
            rows = min(BLOCK_ROWS, IMAGENET_BANK - block * BLOCK_ROWS)
            write_array(file, features(rows, block).numpy())
    bank, of_bank = StoredFeatures(directory, IMAGENET_BANK), labels(IMAGENET_BANK)
    parts = []
    for number, part in enumerate(torch.split(features(IMAGENET_QUERIES, 10**6), SEARCHED_ROWS)):
        if not (file := directory / f"part-{number}.json").exists():
            file.write_text(json.dumps(_searched(bank, of_bank, part)))
        parts.append(json.loads(file.read_text()))
        print(f"{number + 1} parts: {sum(found['seconds'] for found in parts):,.0f} s", flush=True)
    results = {name: sum(found[name] for found in parts) for name in ("seconds", "processor_seconds")}
    results |= {"peak_memory_gib": max(found["peak_memory_gib"] for found in parts)}
    table = "\n".join(
        [
            f"{IMAGENET_QUERIES:,} queries among {IMAGENET_BANK:,} features of {DIM} values in files, k = {K}.",
            "",
            "| seconds | processor seconds | peak memory | milliseconds a query |",
            "|---|---|---|---|",
            f"| {results['seconds']:,.0f} | {results['processor_seconds']:,.0f} | {results['peak_memory_gib']:.2f} GiB "
            f"| {1e3 * results['seconds'] / IMAGENET_QUERIES:.1f} |",
        ]
    )
    save_results(output, "knn_imagenet", "python -m benchmarks.evaluate --imagenet DIRECTORY", results, table)
    print(table)


def _searched(bank: StoredFeatures, of_bank: Tensor, queries: Tensor) -> dict[str, float]:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    similarity, index = nearest(bank, queries, K)
    predict(similarity, of_bank[index], NUM_CLASSES, k=K, temperature=TEMPERATURE)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.perf_counter() - started,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_memory_gib": after.ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(2), default=5)
    parser.add_argument("--bank", type=int, default=65_536)
    parser.add_argument("--queries", type=int, default=1_024)
    parser.add_argument("--imagenet", type=Path, metavar="DIRECTORY", help="where to make 5.3 GB of features")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.imagenet is not None:
        imagenet(arguments.imagenet, arguments.output)
        return
    knn = in_turn(
        knn_calls(features(arguments.bank, 1), features(arguments.queries, 2)), rounds=arguments.rounds, warm_up=1
    )
    linear = in_turn(linear_calls(), rounds=40 * arguments.rounds)
    table = [f"kNN: {arguments.queries:,} queries among {arguments.bank:,} features of {DIM} values, k = {K}.", ""]
    table += [*as_table(knn, arguments.queries, "a query"), "", f"linear: a step on {BATCH_SIZE} features.", ""]
    table += as_table(linear, BATCH_SIZE, "an image")
    write_results(
        arguments.output,
        "evaluate",
        f"python -m benchmarks.evaluate --rounds {arguments.rounds} --bank {arguments.bank} --queries "
        f"{arguments.queries}",
        {"knn": knn, "linear": linear},
        "\n".join(table),
    )


if __name__ == "__main__":
    main()
