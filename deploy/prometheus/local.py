"""Runs Prometheus and Alertmanager on this machine with this folder's configuration, and a trainer to watch.

Used by tests and by the game day; it needs the programs `prometheus`, `promtool` and for alerts
`prometheus-alertmanager` (Debian's packages prometheus and prometheus-alertmanager).
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
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from weightserver.common.closing import Closing
from weightserver.common.processes import end_process

DIRECTORY = Path(__file__).parent
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


Clusters = dict[str, dict[str, list[str]]]
"""Name of each cluster, and its addresses of metrics by job."""


class _LocalServer(Closing):
    """A program that serves on a free loopback port until it is closed. A context manager.

    Args:
        program: its name, and its arguments besides the address.
        directory: a temporary directory, which is removed in the end.

    Raises:
        FileNotFoundError: the program is missing.
        RuntimeError: it did not start; the message ends with the last line of its log.
    """

    url: str

    def __init__(self, *program: str, directory: tempfile.TemporaryDirectory[str]) -> None:
        if shutil.which(program[0]) is None:
            raise FileNotFoundError(f"the program `{program[0]}` is missing: install Debian's package of that name")
        self._directory, address = directory, _free_address()
        self.url = f"http://{address}"
        log = Path(directory.name) / "log"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*program, f"--web.listen-address={address}"], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready(program[0], log)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, program: str, log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    last = log.read_text().strip().rpartition("\n")[2]
                    raise RuntimeError(f"{program} did not start: {last or 'it said nothing'}") from None
                time.sleep(0.05)

    def close(self) -> None:
        end_process(self._process, seconds=_STOP_SECONDS)
        self._directory.cleanup()


class LocalAlertmanager(_LocalServer):
    """Routes alerts as alertmanager.yml says, but sends all of them to this process.

    Args:
        hurry: groups wait for this fraction of the time that the file says.
    """

    sent: set[tuple[str, str, str]]
    """Receiver, cluster and name of each alert that was sent."""

    def __init__(self, *, hurry: float = 1) -> None:
        self.sent = set()
        self._receiver = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Receiver, self.sent))
        threading.Thread(target=self._receiver.serve_forever, daemon=True).start()
        config = yaml.safe_load((DIRECTORY / "alertmanager.yml").read_text())
        for receiver in config["receivers"]:
            receiver["webhook_configs"][0]["url"] = f"http://127.0.0.1:{self._receiver.server_port}"
        for route in (config["route"], *config["route"]["routes"]):
            route |= {key: hurried(route[key], hurry) for key in ("group_wait", "group_interval") if key in route}
        directory = tempfile.TemporaryDirectory(prefix="alertmanager-")
        file = Path(directory.name) / "alertmanager.yml"
        file.write_text(yaml.safe_dump(config))
        storage = f"--storage.path={directory.name}/data"
        super().__init__(
            *("prometheus-alertmanager", f"--config.file={file}", storage, "--cluster.listen-address="),
            directory=directory,
        )

    def muted(self) -> set[tuple[str, str]]:
        """Cluster and name of each alert that another one inhibits now."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=30) as answer:
            alerts = json.load(answer)
        return {
            (alert["labels"].get("cluster", ""), alert["labels"]["alertname"])
            for alert in alerts
            if alert["status"]["inhibitedBy"]
        }

    def close(self) -> None:
        super().close()
        self._receiver.shutdown()
        self._receiver.server_close()


class _Receiver(BaseHTTPRequestHandler):
    """Takes what Alertmanager posts to a webhook."""

    def __init__(self, sent: set[tuple[str, str, str]], *connection: Any) -> None:
        self._sent = sent
        super().__init__(*connection)

    def do_POST(self) -> None:
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in posted["alerts"]:
            self._sent.add((posted["receiver"], alert["labels"].get("cluster", ""), alert["labels"]["alertname"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class LocalPrometheus(_LocalServer):
    """Scrapes clusters with the rules of rules.yml.

    Args:
        scrape, evaluation: time between two scrapes, and two evaluations of rules.
        hurry: alerts wait for this fraction of the time that their rules say.
        alertmanager: where alerts are sent; nowhere by default.
    """

    def __init__(
        self,
        clusters: Clusters,
        *,
        scrape: str = "500ms",
        evaluation: str = "500ms",
        hurry: float = 1,
        alertmanager: LocalAlertmanager | None = None,
    ) -> None:
        directory = tempfile.TemporaryDirectory(prefix="prometheus-")
        self._intervals = {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": evaluation}
        self._config_file, self._hurry = Path(directory.name) / "prometheus.yml", hurry
        self._alertmanagers = [alertmanager.url.removeprefix("http://")] if alertmanager else []
        self._write_config(clusters)
        storage = f"--storage.tsdb.path={directory.name}/data"
        super().__init__("prometheus", f"--config.file={self._config_file}", storage, directory=directory)

    def watch(self, clusters: Clusters) -> None:
        """Scrapes these clusters from now on."""
        self._write_config(clusters)
        self._process.send_signal(signal.SIGHUP)

    def _write_config(self, clusters: Clusters) -> None:
        config = yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())
        config["global"] |= self._intervals
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = self._alertmanagers
        rule_files = []
        for name in config["rule_files"]:
            rules = yaml.safe_load((DIRECTORY / name).read_text())
            for rule in itertools.chain(*(group["rules"] for group in rules["groups"])):
                if "for" in rule:
                    rule["for"] = hurried(rule["for"], self._hurry)
            rule_files.append(self._config_file.with_name(name))
            rule_files[-1].write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(file) for file in rule_files]
        for job in config["scrape_configs"]:
            job["static_configs"] = [
                {"labels": {"cluster": name}, "targets": jobs.get(job["job_name"], [])}
                for name, jobs in clusters.items()
            ]
        self._config_file.write_text(yaml.safe_dump(config))

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


def seconds_of(duration: str) -> float:
    """Seconds of a duration as Prometheus writes it, such as 1h30m or 500ms."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h|d)", duration))


def hurried(duration: str, hurry: float) -> str:
    """A fraction of a duration as Prometheus writes it."""
    return f"{round(1000 * hurry * seconds_of(duration))}ms"


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
