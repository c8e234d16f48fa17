"""Runs Prometheus on this machine with this folder's configuration, and a trainer for it to watch.

Used by tests and by the screenshot; it needs the programs `prometheus` and `promtool` (Debian's package prometheus).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from weightserver.common.processes import end_process

DIRECTORY = Path(__file__).parent
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


Clusters = dict[str, dict[str, list[str]]]
"""Name of each cluster, and its addresses of metrics by job."""


class LocalPrometheus:
    """Scrapes clusters with the rules of rules.yml until it is closed. A context manager.

    Args:
        scrape, evaluation: time between two scrapes, and two evaluations of rules.
        hurry: alerts wait for this fraction of the time that their rules say.

    Raises:
        FileNotFoundError: the program `prometheus` is missing.
        RuntimeError: Prometheus did not start; the message ends with the last line of its log.
    """

    url: str

    def __init__(
        self, clusters: Clusters, *, scrape: str = "500ms", evaluation: str = "500ms", hurry: float = 1
    ) -> None:
        if shutil.which("prometheus") is None:
            raise FileNotFoundError("the program `prometheus` is missing: install Debian's package of that name")
        self._temporary = tempfile.TemporaryDirectory(prefix="prometheus-")
        directory = Path(self._temporary.name)
        self._intervals = {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": evaluation}
        self._config_file, self._hurry = directory / "prometheus.yml", hurry
        self._write_config(clusters)
        address = _free_address()
        self.url = f"http://{address}"
        self._log = directory / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._config_file}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def watch(self, clusters: Clusters) -> None:
        """Scrapes these clusters from now on."""
        self._write_config(clusters)
        self._process.send_signal(signal.SIGHUP)

    def _write_config(self, clusters: Clusters) -> None:
        config = yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())
        config["global"] |= self._intervals
        del config["alerting"]  # no Alertmanager runs here
        rule_files = []
        for name in config["rule_files"]:
            rules = yaml.safe_load((DIRECTORY / name).read_text())
            for rule in itertools.chain(*(group["rules"] for group in rules["groups"])):
                if "for" in rule:
                    rule["for"] = f"{round(1000 * self._hurry * seconds_of(rule['for']))}ms"
            rule_files.append(self._config_file.with_name(name))
            rule_files[-1].write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(file) for file in rule_files]
        for job in config["scrape_configs"]:
            job["static_configs"] = [
                {"labels": {"cluster": name}, "targets": jobs.get(job["job_name"], [])}
                for name, jobs in clusters.items()
            ]
        self._config_file.write_text(yaml.safe_dump(config))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    last = self._log.read_text().strip().rpartition("\n")[2]
                    raise RuntimeError(f"prometheus did not start: {last or 'it said nothing'}") from None
                time.sleep(0.05)

    def api(self, path: str, **parameters: str) -> Any:
        """Returns the data of /api/v1/`path`. Raises ValueError with Prometheus' own message."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {json.load(error)['error']}") from None

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Returns the labels and current value of every series of the expression."""
        data = self.api("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def close(self) -> None:
        end_process(self._process, seconds=_STOP_SECONDS)
        self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def seconds_of(duration: str) -> float:
    """Seconds of a duration as Prometheus writes it, such as 1h30m or 500ms."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h|d)", duration))


@contextmanager
def running_trainer(options: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Runs `python -m trainer OPTIONS` until the context ends (SIGTERM); yields host:port of its metrics, and it."""
    command = [sys.executable, "-m", "trainer", *options, "--metrics-port", "0"]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not (found := re.search(r"metrics on http://(\S+)/metrics\n", said := Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the trainer did not start: {said.strip().rpartition(chr(10))[2]}")
                time.sleep(0.05)
            yield found[1], process
        finally:
            end_process(process, seconds=_STOP_SECONDS)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
