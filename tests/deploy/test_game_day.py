"""Clusters break as `deploy.game_day` says: the alerts that it expects fire in time, and one restart pages nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.game_day.__main__ import PANELS
from deploy.game_day.faults import FAULTS, Fault
from deploy.game_day.report import Outcome, differences, page
from deploy.runbook import Done

ROOT = Path(__file__).parent.parent.parent


def held(*options: str) -> None:
    done = subprocess.run([sys.executable, "-m", "deploy.game_day", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guard
@pytest.mark.skipif(
    None in (shutil.which("prometheus"), shutil.which("prometheus-alertmanager")),
    reason="there is no prometheus or prometheus-alertmanager: see Debian's packages",
)
def test_the_short_form() -> None:
    held("--short")


@pytest.mark.docker  # as the other rehearsal, it is asked for
@pytest.mark.timeout(3600)
def test_the_whole_day(tmp_path: Path) -> None:
    if None in (shutil.which("prometheus"), shutil.which("prometheus-alertmanager")) or os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system, and Debian's prometheus and prometheus-alertmanager")
    held("--output", str(tmp_path / "game-day.md"))


def outcome(alerts: dict[str, tuple[float, float]], fired: dict[str, float], **named: str) -> Outcome:
    fault = Fault("a fault", "plain", lambda *_: None, alerts)
    found = Outcome("fault", fault, whole="a:2", ready="SERVING")
    found.sent = {(scrape, "pager", alert) for scrape in ("5s", "60s") for alert in fired}
    for alert, seconds in fired.items():
        labels = {"alertname": alert, "severity": "critical", "instance": "a:1", "shard": "0"} | named
        assert [found.note(scrape, labels, seconds) for scrape in ("5s", "60s", "60s")] == [True, True, False]
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (outcome({"ShardDown": (90, 180)}, {"ShardDown": 80}), None),
        (outcome({"ShardDown": (90, 180)}, {"ShardDown": 99}), "ShardDown fired after 99 s, scraped every 5s: it must"),
        (outcome({"ShardDown": (90, 180)}, {}), "ShardDown did not fire, scraped every 5s: it must within 90 s"),
        (outcome({"ShardDown": (90, 180)}, {"ShardDown": 9}, instance="a:2"), "ShardDown names shard 1, which did not"),
        (outcome({"FetchStuck": (90, 180)}, {"FetchStuck": 9}, shard="1"), "FetchStuck names shard 1, which did not"),
        (outcome({}, {"FetchSlow": 9}), "FetchSlow fired after 9 s, scraped every 5s: it must not"),
    ],
)
def test_what_differs_is_told(found: Outcome, message: str | None) -> None:
    lines = differences([found], ["5s", "60s"])
    assert bool(lines) is (message is not None)
    assert message is None or message in lines[0]
    assert "| a fault |" in page([found], ["5s", "60s"])


def test_readiness_and_commands_differ_too() -> None:
    found = outcome({}, {})
    found.ready = "NOT_READY: why"
    found.commands = [Done("ok", 1, 1, 0, "", ""), Done("slow", 0, None, 30, "", ""), Done("bad", 1, 127, 1, "", "no")]
    told = differences([found], ["5s"])
    assert [line.rpartition(": ")[2] for line in told] == ["it must say 'SERVING'", "slow", "bad"]
    assert "must end with status 1, not 127: no" in told[-1]


def test_what_is_sent_muted_and_shown_differs_too() -> None:
    """Alertmanager sends an alert to its receiver, or mutes it; panels name the shard."""
    found = outcome({"ShardDown": (90, 180)}, {"ShardDown": 80})
    found.fault = replace(found.fault, muted=frozenset({"FetchStuck"}))
    found.muted = {("5s", "FetchStuck"), ("60s", "FetchStuck")}
    found.panels = {("5s", "a panel"): True}
    assert differences([found], ["5s", "60s"]) == []
    found.sent = {("5s", "tickets", "ShardDown"), ("60s", "pager", "ShardDown"), ("60s", "pager", "TrainerWaits")}
    found.muted = {("60s", "FetchStuck")}
    found.panels = {("5s", "a panel"): False}
    assert differences([found], ["5s", "60s"]) == [
        "fault: ShardDown was not sent to pager, scraped every 5s",
        "fault: FetchStuck is not muted, scraped every 5s",
        "fault: TrainerWaits was sent to the pager, scraped every 60s: it must not",
        "fault: the panel 'a panel' does not name the shard that broke, scraped every 5s",
    ]
    assert all(PANELS[panel.title][panel.query] for fault in FAULTS.values() for panel in fault.panels)


def test_the_page_is_of_these_faults_and_alerts() -> None:
    """Those of the last whole day, whose times the page has."""

    def rows(text: str) -> list[list[str]]:
        return [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]

    made = page([Outcome(name, fault) for name, fault in FAULTS.items()], ["5s", "60s"])
    assert rows((ROOT / "docs/game-day.md").read_text()) == rows(made), "python -m deploy.game_day"
