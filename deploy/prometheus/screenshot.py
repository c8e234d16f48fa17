"""Takes a screenshot of Prometheus' graph of fetch latency during a run: docs/images/fetch-latency.png.

python -m deploy.prometheus.screenshot [--seconds 120] [--output docs/images/fetch-latency.png]

Runs two shards and a trainer, whose fetches are short. In the middle third of the time a second client reads 32 MiB at
a time from the same shards. Needs Debian's packages prometheus and chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np

from deploy.prometheus.local import LocalPrometheus, running_trainer
from weightserver import LocalCluster, WeightClient

NUM_ROWS = 262_144
TRAINER = (
    f"synthetic --num-images {NUM_ROWS} --steps 1000000 --batch-size 64 --num-negatives 1024 --window-size 4096 "
    "--window-stride 256 --log-every 5 --checkpoint-every 500 --encoder.name none --no-evaluate"
)
GRAPHS = (
    'histogram_quantile(0.99, sum by (le, instance) (rate(weightserver_request_seconds_bucket{method="Fetch"}[15s])))',
    "histogram_quantile(0.99, sum by (le, stage) (rate(weightserver_fetch_stage_seconds_bucket[15s])))",
)
"""99th percentile of fetches: end to end for each shard, and for each stage."""


def photograph(url: str, output: Path) -> None:
    """Loads the page in headless Chromium, waits for its scripts, and writes it as PNG."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",  # Chromium refuses to run as root otherwise; the page is local
                "--hide-scrollbars",
                "--disable-gpu",
                f"--user-data-dir={profile}",
                "--window-size=1500,1640",
                "--virtual-time-budget=20000",
                f"--screenshot={output.resolve()}",
                url,
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def graph_url(prometheus: str, seconds: int) -> str:
    """The URL of GRAPHS over the last `seconds`."""
    with urllib.request.urlopen(prometheus, timeout=30) as answer:
        page = answer.url  # the path of the graphs depends on the version
    options = {
        f"g{number}.{key}": value
        for number, expression in enumerate(GRAPHS)
        for key, value in {"expr": expression, "tab": "0", "stacked": "0", "range_input": f"{seconds}s"}.items()
    }
    return f"{page}?{urllib.parse.urlencode(options)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120, help="how long to watch (default 120)")
    parser.add_argument("--output", type=Path, default=Path("docs/images/fetch-latency.png"))
    arguments = parser.parse_args()
    if shutil.which("chromium") is None:
        parser.exit(1, "the program `chromium` is missing: install it, on Debian the package of that name\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, LocalCluster(2) as cluster:
        shards = cluster.metrics_addresses
        run = ["--servers", ",".join(cluster.addresses), "--output", f"{directory}/run"]
        with (
            running_trainer([*TRAINER.split(), *run]) as (trainer, _),
            LocalPrometheus({"default": {"weightserver": shards, "trainer": [trainer]}}, scrape="1s") as prometheus,
            WeightClient(cluster.addresses) as reader,
        ):
            started = time.monotonic()
            while (elapsed := time.monotonic() - started) < arguments.seconds:
                if 1 / 3 < elapsed / arguments.seconds < 2 / 3:
                    reader.fetch_state(np.arange(32_768))  # 32 MiB as stored: only the trainer knows the rates
                time.sleep(0.5)
            photograph(graph_url(prometheus.url, arguments.seconds), arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
