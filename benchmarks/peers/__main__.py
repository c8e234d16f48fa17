"""Compares one of our shards with what else could hold the rows: the same rows and accesses, in turn, in one run.

python -m benchmarks.peers [--quick] [--rows 1000000] [--peers redis lmdb ...] [--output benchmarks/results]

Redis, RocksDB, LMDB (embedded, and behind a minimal gRPC service), torch.distributed.rpc and PostgreSQL, each for real.
They are no dependencies of this project: one whose package (pip install '.[peers]') or server (apt-get
install redis-server postgresql) is missing is left out. Servers listen on loopback, keep their data in a temporary
folder and end with the benchmark.

Rows of D = 128 float32 values; fetches, writes, and fetches followed by writes of the same rows: contiguous, a random
half of a window, and scattered over the table, other rows in each call. Ours is asked for a new step in each fetch, so
all rows are corrected; its writes are durable pushes of gradients. Every row is fetched once before the first case,
which takes as many rounds as fit into --case-seconds, at least 5. Each case is kept in peers.partial.json until all are
measured: after an interruption, or --stop-after, the same command continues. --quick prints its table, and keeps it
with --output only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measure import save_results
from benchmarks.peers.embedded import DurableRocksDb, Lmdb, RocksDb
from benchmarks.peers.lmdb_service import LmdbService
from benchmarks.peers.ours import MAX_WRITES, Ours
from benchmarks.peers.peer import Peer, PeerError
from benchmarks.peers.postgres import Postgres
from benchmarks.peers.redis_rows import DurableRedis, Redis
from benchmarks.peers.report import Measured, Results, as_table, draw
from benchmarks.peers.torch_rpc import TorchRpc
from benchmarks.peers.worker import OPERATIONS, PATTERNS, Case, Worker
from weightserver.common.atomic_files import atomic_write

PEERS: list[type[Peer]] = [
    Ours,
    LmdbService,
    Lmdb,
    DurableRedis,
    Redis,
    DurableRocksDb,
    RocksDb,
    Postgres,
    TorchRpc,
]
MIN_ROUNDS, MAX_ROUNDS = 5, 30
_PARTIAL = "peers.partial.json"


def measure(workers: list[Worker], case: Case, seconds: float) -> dict[str, Measured]:
    """Calls every peer once a round, each round in another order; as many rounds as fit into `seconds`."""
    os.sync()  # what former cases wrote without waiting
    before = [worker.processor_seconds() for worker in workers]
    for worker in workers:
        worker.server_bytes = worker.client_bytes = 0
    taken: dict[str, list[float]] = {worker.peer.key: [] for worker in workers}
    number, rounds, warm_up = 0, MAX_ROUNDS, 2
    while number < warm_up + rounds:
        started = time.perf_counter()
        for worker in workers[number % len(workers) :] + workers[: number % len(workers)]:
            one = worker.perform(case, number)
            if number >= warm_up:
                taken[worker.peer.key].append(one)
        if number == 0:
            a_round = time.perf_counter() - started
            rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / a_round)))
            warm_up = 2 if rounds > MIN_ROUNDS else 1
        number += 1
    results = {}
    for worker, start in zip(workers, before, strict=True):
        used = sum(end - start.get(pid, 0.0) for pid, end in worker.processor_seconds().items())
        results[worker.peer.key] = Measured.of(
            taken[worker.peer.key], used / number, worker.server_bytes, worker.client_bytes
        )
    return results


def started_workers(
    stack: ExitStack, directory: Path, peers: list[type[Peer]], num_rows: int, most_rows: int
) -> tuple[list[Worker], dict[str, float], dict[str, str]]:
    """The peers that start, filled, the seconds that each fill took, and why others are left out."""
    workers, fills, left_out = [], {}, {}
    for peer in peers:
        reason = peer.missing()
        if reason is None:
            worker = stack.enter_context(closing(Worker(peer, directory / peer.key, num_rows, most_rows)))
            try:
                worker.start()
                fills[peer.key] = worker.fill()
                worker.check()
                worker.read()
                workers.append(worker)
            except PeerError as error:
                reason = str(error)
                worker.close()
        if reason is not None:
            left_out[peer.name] = reason
            _say(f"{peer.name} is left out: {reason}")
    return workers, fills, left_out


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The cases that an interrupted run with the same settings has measured."""
    if path.exists():
        found = json.loads(path.read_text())
        if found["settings"] == settings:
            return found["cases"]
        _say(f"{path} is of other settings: all cases are measured anew")
    return {}


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    keys = [peer.key for peer in PEERS[1:]]
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, in a minute")
    parser.add_argument("--rows", type=_number, help="rows of the table (default 1,000,000; quick: 140,000)")
    parser.add_argument("--fetches", type=_number, nargs="+", help="rows of a fetch (default 512 65536)")
    parser.add_argument(
        "--writes", type=_number, nargs="+", help="rows of a write (default 512 4096 65536; quick: 512 4096)"
    )
    parser.add_argument("--peers", nargs="*", choices=keys, default=keys, metavar="PEER", help=", ".join(keys))
    parser.add_argument("--case-seconds", type=float, help="of each case, about (default 10; quick: 0.5)")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no case later than this")
    parser.add_argument("--output", type=Path, help="folder of results (default benchmarks/results; quick: none)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = _parser()
    given = parser.parse_args(arguments)
    quick = given.quick
    num_rows = given.rows or (140_000 if quick else 1_000_000)
    fetches = given.fetches or [512, 65_536]
    writes = given.writes or ([512, 4_096] if quick else [512, 4_096, 65_536])
    case_seconds = given.case_seconds or (0.5 if quick else 10.0)
    if 2 * max(*fetches, *writes) > num_rows:
        parser.error(f"a window of {2 * max(*fetches, *writes):,} rows needs a table of as many, got {num_rows:,}")
    cases = [
        Case(operation, pattern, count)
        for operation in OPERATIONS
        for count in (fetches if operation == "fetch" else writes)
        for pattern in PATTERNS
    ]
    if 2 * len(PATTERNS) * len(writes) * (MAX_ROUNDS + 2) > MAX_WRITES:
        parser.error(f"--writes takes at most {MAX_WRITES // (2 * len(PATTERNS) * (MAX_ROUNDS + 2))} numbers")
    peers = [peer for peer in PEERS if peer is Ours or peer.key in given.peers]
    output = given.output or (None if quick else Path("benchmarks/results"))
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        directory.chmod(0o711)  # a server may run as another user
        workers, fills, left_out = started_workers(stack, directory, peers, num_rows, max(writes))
        if Ours.name in left_out:
            sys.exit(f"benchmarks.peers compares with our shard, which is left out: {left_out[Ours.name]}")
        peers = [worker.peer for worker in workers]
        settings = {
            "rows": num_rows,
            "case_seconds": case_seconds,
            "peers": [peer.key for peer in peers],
            "cases": [str(case) for case in cases],
        }
        partial = (output or directory) / _PARTIAL
        kept = _kept(partial, settings)
        for case in cases:
            if str(case) in kept:
                continue
            if given.stop_after is not None and time.monotonic() - began > given.stop_after:
                _say(f"{len(kept)} of {len(cases)} cases are measured; the same command continues")
                return
            _say(str(case))
            kept[str(case)] = {key: asdict(value) for key, value in measure(workers, case, case_seconds).items()}
            partial.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"settings": settings, "cases": kept})
            atomic_write(partial, lambda path, text=text: path.write_text(text))
    results: Results = {
        name: {key: Measured(**value) for key, value in of_case.items()} for name, of_case in kept.items()
    }
    table = f"{num_rows:,} rows of 128 float32 values. " + as_table(peers, fills, left_out, cases, results)
    print(table)
    if output is not None:
        command = "python -m benchmarks.peers" + (" --quick" if quick else "")
        command += f" --rows {num_rows}" if given.rows else ""
        document = {
            "settings": settings,
            "cases": results,
            "fill_seconds": fills,
            "left_out": left_out,
            "does_not": {peer.key: peer.does_not for peer in peers},
        }
        save_results(output, "peers", command, document, table)
        draw(output / "peers.png", peers, cases, results)
        partial.unlink()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers and their files go too
    main()
