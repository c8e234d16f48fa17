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

from deploy.prometheus.local import DIRECTORY

ROOT = Path(__file__).parent.parent.parent
RULES = yaml.safe_load((DIRECTORY / "rules.yml").read_text())
CASES = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus has it"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=180)


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    checked = promtool("check", "config", "--lint-fatal", DIRECTORY / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    checked = promtool("check", "rules", "--lint-fatal", DIRECTORY / "rules.yml")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.guard
@needs_promtool
def test_alerts_fire_when_they_must_and_only_then() -> None:
    tested = promtool("test", "rules", DIRECTORY / "rules_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_case_that_fires_and_one_that_must_not() -> None:
    expected: dict[str, set[bool]] = {name: set() for name in ALERTS}
    for case in CASES["tests"]:
        for check in case["alert_rule_test"]:
            expected[check["alertname"]].add(bool(check["exp_alerts"]))
    assert expected == {name: {True, False} for name in ALERTS}


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
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    shutil.copy(DIRECTORY / "rules_test.yml", tmp_path)
    tested = promtool("test", "rules", tmp_path / "rules_test.yml")
    assert tested.returncode != 0
    noticed = set(re.findall(r"alertname: (\w+)", tested.stdout + tested.stderr))
    assert noticed == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_a_paragraph_for_each_alert(name: str) -> None:
    document, _, anchor = ALERTS[name]["annotations"]["runbook"].partition("#")
    assert anchor == name.lower()
    paragraphs = (ROOT / document).read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Users see**", "**Do**"):
        assert part in paragraphs, f"{name} has no {part}"


def test_the_runbook_has_no_other_alerts() -> None:
    assert re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE) == list(ALERTS)
