"""What came of each fault: what differs from what must, and docs/game-day.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from deploy.game_day.faults import Fault
from deploy.game_day.place import WHOLE
from deploy.runbook import Done

_OF_WINDOWS = {"FetchSlow"}
"""Alerts on shares of the calls of minutes and hours, which have only begun in the short form."""
_SHORT_SECONDS = 45.0
"""Within which an alert must fire in the short form."""


@dataclass
class Outcome:
    """One fault, and what came of it."""

    name: str
    fault: Fault
    whole: str = ""
    """The metrics' address of the shard that did not break."""
    fired: dict[tuple[str, str], tuple[float, dict[str, str]]] = field(default_factory=dict)
    """Seconds after which an alert fired first, and its labels, by scrape interval and alert."""
    sent: set[tuple[str, str, str]] = field(default_factory=set)
    """Scrape interval, receiver and name of each alert that Alertmanager sent."""
    muted: set[tuple[str, str]] = field(default_factory=set)
    """Scrape interval and name of each alert that Alertmanager mutes at the end."""
    panels: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Whether a panel names the broken shard, by scrape interval and panel."""
    ready: str = ""
    """What /readyz said at the end."""
    commands: list[Done] = field(default_factory=list)

    def note(self, scrape: str, labels: dict[str, str], seconds: float) -> bool:
        """Notes that an alert fires; returns whether it is new."""
        key = scrape, labels["alertname"]
        is_new = key not in self.fired
        if is_new:
            self.fired[key] = seconds, labels
        return is_new

    def has_fired(self, scrapes: Iterable[str]) -> bool:
        return all((scrape, alert) in self.fired for scrape in scrapes for alert in self.fault.alerts)

    def unsent(self) -> list[str]:
        """A line for each alert that must be sent or muted, and is neither."""
        lines = []
        for (scrape, alert), (_, labels) in self.fired.items():
            to = "pager" if labels["severity"] == "critical" else "tickets"
            is_told = (scrape, to, alert) in self.sent or (scrape, alert) in self.muted
            if alert in self.fault.alerts and not is_told:
                lines.append(f"{alert} was not sent to {to}, scraped every {scrape}")
        return lines

    def limits(self, scrapes: list[str]) -> dict[tuple[str, str], float]:
        """Within how many seconds each alert must fire, by scrape interval and alert."""
        return {
            (scrape, alert): limits[number] if len(scrapes) > 1 else _SHORT_SECONDS
            for number, scrape in enumerate(scrapes)
            for alert, limits in self.fault.alerts.items()
        }


def differences(outcomes: list[Outcome], scrapes: list[str]) -> list[str]:
    """A line for each thing that is not as it must be."""
    return [f"{outcome.name}: {line}" for outcome in outcomes for line in _differences(outcome, scrapes)]


def _differences(outcome: Outcome, scrapes: list[str]) -> Iterable[str]:
    fault, is_short = outcome.fault, len(scrapes) == 1
    for (scrape, alert), limit in outcome.limits(scrapes).items():
        seconds, labels = outcome.fired.get((scrape, alert), (None, {}))
        if seconds is None or seconds > limit:
            after = "did not fire" if seconds is None else f"fired after {seconds:.0f} s"
            yield f"{alert} {after}, scraped every {scrape}: it must within {limit:.0f} s"
        elif fault.names_shard and (labels.get("instance") == outcome.whole or labels.get("shard") == str(WHOLE)):
            yield f"{alert} names shard {WHOLE}, which did not break, scraped every {scrape}"
    may_page = {*fault.alerts, *fault.also, *(_OF_WINDOWS if is_short else ())}
    for (scrape, alert), (seconds, labels) in outcome.fired.items():
        if labels["severity"] == "critical" and alert not in may_page:
            yield f"{alert} fired after {seconds:.0f} s, scraped every {scrape}: it must not"
    yield from outcome.unsent()
    for scrape in scrapes:
        for alert in sorted(fault.muted - {alert for at, alert in outcome.muted if at == scrape}):
            yield f"{alert} is not muted, scraped every {scrape}"
    for scrape, receiver, alert in sorted(outcome.sent):
        if receiver == "pager" and alert not in may_page:
            yield f"{alert} was sent to the pager, scraped every {scrape}: it must not"
    for (scrape, panel), is_named in outcome.panels.items():
        if not is_named:
            yield f"the panel {panel!r} does not name the shard that broke, scraped every {scrape}"
    if not re.match(fault.ready, outcome.ready):
        yield f"/readyz says {outcome.ready!r}: it must say {fault.ready!r}"
    for done in outcome.commands:
        if done.status != done.expected:
            status = f"none in {done.seconds:.0f} s" if done.status is None else f"{done.status}: {done.errors.strip()}"
            yield f"the runbook's command must end with status {done.expected}, not {status}: {done.command}"


def page(outcomes: list[Outcome], scrapes: list[str]) -> str:
    """docs/game-day.md."""
    intervals = " | ".join(f"every {scrape}" for scrape in scrapes)
    lines = [
        "# Game day",
        "",
        "`python -m deploy.game_day` breaks clusters in the ways that happen, each a cluster of its own of two shards",
        "and a client, beside two real Prometheus servers with the rules of",
        "[rules.yml](../deploy/prometheus/rules.yml) and two Alertmanagers with",
        "[alertmanager.yml](../deploy/prometheus/alertmanager.yml), and writes this page. It fails when an alert does",
        "not fire in time, names another shard, is sent to the wrong receiver, or pages for what needs nobody; when",
        "`/readyz` says something else; when a panel names another shard; and when a command that",
        "[the runbook](runbook.md) has for the alert has another exit status. This is the day of",
        f"{datetime.now(UTC):%Y-%m-%d}. Times count from the fault, in seconds, scraped at two intervals.",
        "",
        f"| what happens | alert | {intervals} | sent to | panels that name the shard | `/readyz` of that shard "
        "| the runbook's commands, slowest |",
        "|---|---|" + "---|" * (len(scrapes) + 4),
    ]
    for outcome in outcomes:
        alerts = outcome.fault.alerts
        names = "<br>".join(f"[{alert}](runbook.md#{alert.lower()})" for alert in alerts) or "none"
        after = [
            "<br>".join(
                f"{outcome.fired[scrape, alert][0]:.0f}" if (scrape, alert) in outcome.fired else "never"
                for alert in alerts
            )
            for scrape in scrapes
        ]
        sent = "<br>".join(
            "/".join(sorted({to for _, to, name in outcome.sent if name == alert})) or "muted" for alert in alerts
        )
        panels = "<br>".join(f"*{panel.title}*" for panel in outcome.fault.panels)
        slowest = max((done.seconds for done in outcome.commands), default=0)
        commands = f"{len(outcome.commands)}, {slowest:.1f} s" if outcome.commands else ""
        ready = re.sub(r"\S*/(?=\S)|\d[\d.-]*", "…", outcome.ready.partition(";")[0])[:100]
        lines.append(f"| {' | '.join((outcome.fault.what, names, *after, sent, panels, ready, commands))} |")
    return "\n".join(lines) + "\n"
