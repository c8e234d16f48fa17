"""Tests the alert rules with promtool, and these tests with rules that are broken on purpose."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import slo
from deploy.prometheus.local import DIRECTORY
from weightserver.common.metrics import LATE_SECONDS

RULES = yaml.safe_load(slo.RULES.read_text())
CASES = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus has it"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    checked = promtool("check", "config", "--lint-fatal", DIRECTORY / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    checked = promtool("check", "rules", "--lint-fatal", DIRECTORY / "rules.yml")
    assert checked.returncode == 0, checked.stderr


def run_cases(rules: dict[str, Any], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs the cases on rules, with the links to the runbook that all alerts have."""
    cases = copy.deepcopy(CASES)
    for case in cases["tests"]:
        case["external_labels"] = {"docs": "https://docs.example"}
        for check in case["alert_rule_test"]:
            for alert in check["exp_alerts"]:
                url = f"https://docs.example/runbook/#{check['alertname'].lower()}"
                alert["exp_annotations"]["runbook_url"] = url
    (directory / "rules.yml").write_text(yaml.safe_dump(rules))
    (directory / "rules_test.yml").write_text(yaml.safe_dump(cases))
    return promtool("test", "rules", directory / "rules_test.yml")


@pytest.mark.guard
@needs_promtool
def test_alerts_fire_when_they_must_and_only_then(tmp_path: Path) -> None:
    done = run_cases(RULES, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_that_fires_and_one_that_must_not() -> None:
    expected: dict[str, set[bool]] = {name: set() for name in ALERTS}
    for case in CASES["tests"]:
        for check in case["alert_rule_test"]:
            expected[check["alertname"]].add(bool(check["exp_alerts"]))
    assert expected == {name: {True, False} for name in ALERTS} | {"Watchdog": {True}}


def never(rule: dict[str, Any]) -> None:
    rule["expr"] = f"({rule['expr']}) and on () vector(1) > 2"


def always(rule: dict[str, Any]) -> None:
    """Makes comparisons return 0 or 1 instead of filtering, so that everything they compare has a result."""
    rule["expr"] = with_bool(rule["expr"])


def at_once(rule: dict[str, Any]) -> None:
    del rule["for"]


def with_bool(expression: str) -> str:
    return re.sub(r" (>|<|==) ", r" \1 bool ", expression)


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("broken", [never, always, at_once])
def test_the_cases_notice_broken_rules(broken: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    rules = copy.deepcopy(RULES)
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                broken(rule)
    done = run_cases(rules, tmp_path)
    assert done.returncode != 0
    noticed = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert noticed >= set(ALERTS) - {"Watchdog"}


def test_rules_and_runbook_are_those_of_the_objectives() -> None:
    assert slo.RULES.read_text() == slo.rules(), "make dashboards"
    assert slo.RUNBOOK.read_text() == slo.runbook(slo.RUNBOOK.read_text()), "make dashboards"


def test_a_call_is_late_for_clients_when_it_is_for_shards() -> None:
    objective = slo.SLO["objectives"]["FetchSlow"]
    assert objective["late_seconds"] == LATE_SECONDS
    for seconds in LATE_SECONDS.values():
        assert f'le="{float(seconds)}"' in objective["sides"]["shard"]


def test_stages_become_more_severe() -> None:
    """A page comes when a warning was not heard, so its threshold is further away, in one direction."""
    severities = ["warning", "critical"]
    for name in slo.SECTIONS:
        stages = slo.thresholds(name)
        assert [stage.severity for stage in stages] == sorted((s.severity for s in stages), key=severities.index)
        values = [stage.value for stage in stages]
        assert values == sorted(set(values), reverse=any(stage.is_lower for stage in stages)), name
