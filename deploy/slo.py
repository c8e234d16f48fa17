"""Generates alert rules and the runbook's sections of slo.yml.

    python -m deploy.slo

writes prometheus/rules.yml and, after its introduction, docs/runbook.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
RULES = ROOT / "deploy/prometheus/rules.yml"
RUNBOOK = ROOT / "docs/runbook.md"
SLO: dict[str, Any] = yaml.safe_load((ROOT / "deploy/slo.yml").read_text())
SECTIONS: dict[str, dict[str, Any]] = SLO["objectives"] | SLO["alerts"]
"""Objectives and alerts by the name of their alert, in the runbook's order."""


@dataclass(frozen=True)
class Threshold:
    """Where an alert begins to count time: above `value`, or below it."""

    severity: str
    value: float
    is_lower: bool


def thresholds(name: str) -> list[Threshold]:
    """The thresholds of an alert's stages, or of an objective's burn rates."""
    section = SECTIONS[name]
    if name in SLO["objectives"]:
        return [Threshold(rate["severity"], _burnt(section, rate), is_lower=False) for rate in SLO["burn_rates"]]
    is_lower = "< $threshold" in section["expr"]
    return [
        Threshold(stage["severity"], float(stage["threshold"]), is_lower)
        for stage in section["stages"]
        if "threshold" in stage
    ]


def rules() -> str:
    """The text of rules.yml."""
    groups = [
        {"name": "objectives", "rules": list(_records())},
        {"name": "alerts", "rules": [*_objective_alerts(), *_alerts()]},
    ]
    text: str = yaml.safe_dump({"groups": groups}, sort_keys=False, width=110, allow_unicode=True)
    return "# deploy/slo.py makes this of slo.yml.\n" + text


def _records() -> Iterator[dict[str, Any]]:
    for objective in SLO["objectives"].values():
        for window in sorted({rate[length] for rate in SLO["burn_rates"] for length in ("short", "long")}):
            for side, ratio in objective["sides"].items():
                yield {
                    "record": _recorded(objective, window),
                    "labels": {"side": side},
                    "expr": " ".join(Template(ratio).substitute(window=window).split()),
                }
    for name, expression in SLO["records"].items():
        yield {"record": name, "expr": expression}


def _objective_alerts() -> Iterator[dict[str, Any]]:
    for name, objective in SLO["objectives"].items():
        for rate in SLO["burn_rates"]:
            long, short = (f"{_recorded(objective, rate[w])} > {_burnt(objective, rate):g}" for w in ("long", "short"))
            yield _alert(name, f"{short} and {long}", rate["for"], {"severity": rate["severity"]})


def _alerts() -> Iterator[dict[str, Any]]:
    for name, alert in SLO["alerts"].items():
        for stage in alert["stages"]:
            expression = Template(alert["expr"]).safe_substitute({key: str(value) for key, value in stage.items()})
            labels = {key: stage[key] for key in ("severity", "within") if key in stage}
            yield _alert(name, " ".join(expression.split()), stage["for"], labels)


def _alert(name: str, expression: str, wait: str, labels: dict[str, str]) -> dict[str, Any]:
    annotations = {
        "summary": SECTIONS[name]["summary"],
        "runbook_url": f"{{{{ $externalLabels.docs }}}}/runbook/#{name.lower()}",
    }
    return {"alert": name, "expr": expression, "for": wait, "labels": labels, "annotations": annotations}


def _recorded(objective: dict[str, Any], window: str) -> str:
    return f"{objective['ratio']}:ratio_rate{window}"


def _burnt(objective: dict[str, Any], rate: dict[str, Any]) -> float:
    """The share of bad calls that uses up the objective's budget at this rate."""
    return round(float(rate["factor"]) * (1 - float(objective["objective"])), 6)


def runbook(text: str) -> str:
    """A runbook of the same introduction as `text`, which ends at its first section, with a section for each alert."""
    introduction = text.partition("\n## ")[0].rstrip("\n")
    return "\n\n".join([introduction, *(_section(name, **section) for name, section in SECTIONS.items())]) + "\n"


def _section(name: str, *, means: str, users_see: str, commands: str, do: str = "", then: str = "", **_: Any) -> str:
    pasted = "\n".join(f"    {command}" for command in commands.splitlines())
    parts = [f"## {name}", f"**Means**: {means}", f"**Users see**: {users_see}", f"**Do**: {do}", pasted, then]
    return "\n\n".join(part.strip("\n ") if part is not pasted else part for part in parts if part)


def main() -> None:
    RULES.write_text(rules())
    RUNBOOK.write_text(runbook(RUNBOOK.read_text()))


if __name__ == "__main__":
    main()
