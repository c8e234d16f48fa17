"""Breaks clusters in the ways that happen, beside real Prometheus servers, and checks which alerts fire after how long.

    python -m deploy.game_day                    # twenty minutes, as root; writes docs/game-day.md
    python -m deploy.game_day --short            # four faults in a minute, with alerts that wait less long

Each fault has a cluster of its own: two shards and a client or a trainer. Prometheus scrapes all of them, once every
5 and once every 60 s, and Alertmanager sends its alerts to this process. Then the panels of the dashboards are asked
which shard it is, and the commands that the runbook has for these alerts are run. It needs prometheus, prometheus-
alertmanager and a C compiler (Debian's packages), and the right to mount a file system. Exit status 0 if everything
is as `faults` says, else 1 with a line for each difference.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

from deploy.bring_up.report import say, title, wait_until
from deploy.bring_up.settings import ROOT
from deploy.game_day.faults import FAULTS
from deploy.game_day.place import BROKEN, WHOLE, Place, place
from deploy.game_day.report import Outcome, differences, page
from deploy.prometheus.local import LocalAlertmanager, LocalPrometheus, seconds_of
from deploy.runbook import CHANGES_OR_NEEDS_MORE, COMMANDS, run

_HURRY = 0.1
"""What the short form leaves of the times that alerts wait."""
_OUTAGE_SECONDS = 11.0
_QUIET_SECONDS = {False: 780.0, True: 20.0}
"""How long no alert may fire that must not, in a whole day and in the short form: some wait ten minutes."""
_COMMAND_SECONDS = _READY_SECONDS = 30.0
_SEND_SECONDS = 90.0
PANELS: dict[str, list[str]] = {
    panel["title"]: [target["expr"] for target in panel["targets"]]
    for board in (ROOT / "deploy/grafana/dashboards").glob("*.json")
    for panel in json.loads(board.read_text())["panels"]
}
"""The dashboards' panels, and their queries."""


def game_day(directory: Path, names: list[str], scrapes: dict[str, str], *, is_short: bool) -> list[Outcome]:
    """Tries faults, all at once. The short form hurries, and runs no commands.

    Args:
        scrapes: time between two scrapes of each Prometheus, and between two evaluations of its rules.
    """
    hurry = _HURRY if is_short else 1.0
    faults = {name: FAULTS[name] for name in names}
    with ExitStack() as stack:
        title("clusters")
        places = {name: stack.enter_context(place(directory / name, fault.kind)) for name, fault in faults.items()}
        for one in places.values():
            one.outage_seconds = hurry * _OUTAGE_SECONDS

        def targets() -> dict[str, dict[str, list[str]]]:
            return {name: one.targets for name, one in places.items()}

        senders = {scrape: stack.enter_context(LocalAlertmanager(hurry=hurry)) for scrape in scrapes}
        servers = {
            scrape: stack.enter_context(
                LocalPrometheus(
                    targets(), scrape=scrape, evaluation=evaluation, hurry=hurry, alertmanager=senders[scrape]
                )
            )
            for scrape, evaluation in scrapes.items()
        }
        known = sum(len(addresses) for one in places.values() for addresses in one.targets.values())
        for server in servers.values():
            wait_until(partial(_all_up, server, known), "all are scraped", seconds=200)
        for one in places.values():
            one.until_scrape = partial(_until_scrape, list(servers.values())[-1], one)
        title("faults")
        stop, begun = threading.Event(), time.monotonic()
        outcomes = {name: Outcome(name, fault) for name, fault in faults.items()}
        threads = [
            threading.Thread(target=fault.breaks, args=(places[name], stop, stack), name=name, daemon=True)
            for name, fault in faults.items()
        ]
        for thread in threads:
            thread.start()
        time.sleep(1)
        for server in servers.values():
            server.watch(targets())
        _watch(servers, outcomes, begun, _QUIET_SECONDS[is_short])
        _receive(senders, outcomes)
        for name, outcome in outcomes.items():
            _look_at_panels(outcome, places[name], servers)
        stop.set()
        for thread in threads:
            thread.join(120)
        title("what the shards say, and the runbook")
        for name, outcome in outcomes.items():
            outcome.whole = places[name].cluster.metrics_addresses[WHOLE]
            outcome.ready = _readiness(places[name], outcome.fault.ready)
            if not is_short:
                _run_commands(outcome, places[name], next(iter(servers.values())))
    return list(outcomes.values())


def _all_up(server: LocalPrometheus, known: int) -> bool:
    return len(server.query("up == 1")) == known


def _until_scrape(server: LocalPrometheus, broken: Place) -> float:
    """Seconds until a Prometheus scrapes the shard that breaks."""
    address = broken.cluster.metrics_addresses[BROKEN]
    (found,) = (one for one in server.api("targets")["activeTargets"] if one["labels"]["instance"] == address)
    last = datetime.fromisoformat(found["lastScrape"]).timestamp()
    return last + seconds_of(found["scrapeInterval"]) - time.time()


def _watch(servers: dict[str, LocalPrometheus], outcomes: dict[str, Outcome], begun: float, quiet: float) -> None:
    """Notes when alerts fire, until all have that must, and long enough for those that must not."""
    last = max([quiet, *(limit for outcome in outcomes.values() for limit in outcome.limits(list(servers)).values())])
    while (now := time.monotonic() - begun) < last:
        for scrape, server in servers.items():
            for alert in server.api("alerts")["alerts"]:
                outcome = outcomes.get(alert["labels"].get("cluster", ""))
                if outcome is not None and alert["state"] == "firing" and outcome.note(scrape, alert["labels"], now):
                    say(f"{now:.0f} s, every {scrape}: {outcome.name}: {alert['annotations']['summary']}")
        if now > quiet and all(outcome.has_fired(servers) for outcome in outcomes.values()):
            break
        time.sleep(0.5)


def _receive(senders: dict[str, LocalAlertmanager], outcomes: dict[str, Outcome]) -> None:
    """Notes what was sent and what is muted, when all has been sent that must or after some time."""
    deadline = time.monotonic() + _SEND_SECONDS
    while True:
        for name, outcome in outcomes.items():
            outcome.sent = {
                (scrape, receiver, alert)
                for scrape, sender in senders.items()
                for receiver, cluster, alert in sender.sent.copy()
                if cluster == name
            }
            outcome.muted = {
                (scrape, alert)
                for scrape, sender in senders.items()
                for cluster, alert in sender.muted()
                if cluster == name
            }
        if not any(outcome.unsent() for outcome in outcomes.values()) or time.monotonic() > deadline:
            return
        time.sleep(0.5)


def _look_at_panels(outcome: Outcome, broken: Place, servers: dict[str, LocalPrometheus]) -> None:
    """Asks the panels' queries as Grafana does, with the cluster chosen."""
    address = broken.cluster.metrics_addresses[BROKEN]
    for scrape, server in servers.items():
        for panel in outcome.fault.panels:
            query = PANELS[panel.title][panel.query].replace("$cluster", outcome.name)
            query = query.replace("$__rate_interval", f"{4 * seconds_of(scrape):g}s")
            values = [
                (value, labels)
                for labels, value in server.query(re.sub(r"\$\w+", ".*", query))
                if not math.isnan(value)
            ]
            _, labels = panel.extreme(values, key=lambda each: each[0], default=(0.0, {}))
            is_named = labels.get("shard") == str(BROKEN) or labels.get("instance") == address
            outcome.panels[scrape, panel.title] = is_named


def _readiness(broken: Place, wanted: str) -> str:
    """What /readyz says, when it says what is wanted or after some time."""
    deadline = time.monotonic() + _READY_SECONDS
    while not re.match(wanted, said := broken.page("/readyz")) and time.monotonic() < deadline:
        time.sleep(0.5)
    return said


def _run_commands(outcome: Outcome, broken: Place, server: LocalPrometheus) -> None:
    addresses, metrics = broken.cluster.addresses, broken.cluster.metrics_addresses
    here = {
        "127.0.0.1:50051": addresses[0],
        "127.0.0.1:50052": addresses[1],
        "127.0.0.1:9101": metrics[0],
        "127.0.0.1:9102": metrics[1],
        "127.0.0.1:9200": broken.client,
        "http://127.0.0.1:9090": server.url,
        "/data/ws0": str(broken.data),
        "certs/": f"{broken.directory}/certificates/",
    }
    for alert in outcome.fault.alerts:
        for command, expected in COMMANDS[alert].items():
            if not command.startswith(CHANGES_OR_NEEDS_MORE):
                done = run(command, here, expected=expected, security=broken.security, seconds=_COMMAND_SECONDS)
                outcome.commands.append(done)
                say(f"{outcome.name}: {done.seconds:.1f} s, status {done.status}: {command}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="deploy.game_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="four faults in a minute")
    parser.add_argument("--only", nargs="+", choices=FAULTS, help="these faults alone; writes no page")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/game-day.md", help="the page of a whole day")
    arguments = parser.parse_args()
    names = arguments.only or [name for name, fault in FAULTS.items() if fault.is_short or not arguments.short]
    scrapes = {"500ms": "500ms"} if arguments.short else {"5s": "15s", "60s": "15s"}
    with tempfile.TemporaryDirectory(prefix="game-day-") as directory:
        outcomes = game_day(Path(directory), names, scrapes, is_short=arguments.short)
    found = differences(outcomes, list(scrapes))
    if not arguments.short and not arguments.only:
        arguments.output.write_text(page(outcomes, list(scrapes)))
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
