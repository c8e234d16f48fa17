"""Tests the alert rules with promtool, and their links to one another with a real Alertmanager."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deploy import slo
from deploy.prometheus.local import DIRECTORY, LocalAlertmanager
from weightserver.common.metrics import LATE_SECONDS

RULES = yaml.safe_load(slo.RULES.read_text())
CASES = yaml.safe_load((DIRECTORY / "rules_test.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: Debian's package prometheus has it"
)
needs_alertmanager = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None, reason="it is Debian's package of that name"
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    checked = promtool("check", "config", "--lint-fatal", DIRECTORY / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    checked = promtool("check", "rules", "--lint-fatal", DIRECTORY / "rules.yml")
    assert checked.returncode == 0, checked.stderr


def test_the_documented_line_makes_a_rule_of_the_prometheus_operator() -> None:
    root = Path(__file__).parents[2]
    _, _, rest = (root / "docs/deployment.md").read_text().partition("    { printf ")
    lines = rest.partition(" | kubectl apply -f -\n")[0]
    made = subprocess.run(f"{{ printf {lines}", shell=True, cwd=root, capture_output=True, text=True, check=True).stdout
    names = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "pic"}}
    assert yaml.safe_load(made) == {**names, "spec": RULES}
    fields = {name for group in RULES["groups"] for rule in group["rules"] for name in rule}
    assert fields <= {"record", "alert", "expr", "for", "labels", "annotations"}  # of its schema, since version 0.50
    assert all(group.keys() <= {"name", "interval", "rules"} for group in RULES["groups"])


def run_cases(rules: dict[str, Any], directory: Path) -> tuple[bool, str]:
    """Whether rules pass the cases, with the links to the runbook that all alerts have, and what promtool says.

    Cases of one scrape interval run together, as rules need not be evaluated more often.
    """
    (directory / "rules.yml").write_text(yaml.safe_dump(rules))
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in copy.deepcopy(CASES["tests"]):
        cases.setdefault(case["interval"], []).append(case)
        case["external_labels"] = {"docs": "https://docs.example"}
        for check in case["alert_rule_test"]:
            for alert in check["exp_alerts"]:
                url = f"https://docs.example/runbook/#{check['alertname'].lower()}"
                alert["exp_annotations"]["runbook_url"] = url
    passed, said = True, ""
    for interval, some in cases.items():
        (file := directory / "cases.yml").write_text(
            yaml.safe_dump(CASES | {"evaluation_interval": interval, "tests": some})
        )
        done = promtool("test", "rules", file)
        passed, said = passed and done.returncode == 0, said + done.stdout + done.stderr
    return passed, said


@pytest.mark.guard
@needs_promtool
def test_alerts_fire_when_they_must_and_only_then(tmp_path: Path) -> None:
    passed, said = run_cases(RULES, tmp_path)
    assert passed, said


def test_each_alert_has_a_case_that_fires_and_one_that_must_not() -> None:
    expected: dict[str, set[bool]] = {name: set() for name in ALERTS}
    for case in CASES["tests"]:
        for check in case["alert_rule_test"]:
            expected[check["alertname"]].add(bool(check["exp_alerts"]))
    assert expected == {name: {True, False} for name in ALERTS} | {"Watchdog": {True}}


@needs_promtool
@pytest.mark.parametrize("every", [0.2, 60.0], ids=["fast", "slow"])
@pytest.mark.parametrize("scrape", [5, 60])
def test_one_restart_pages_nobody(scrape: int, every: float, tmp_path: Path) -> None:
    """A shard is away for 11 s, four minutes after a client began to fetch and to write once in `every` seconds."""
    away, back, end = 240.0, 251.0, 1800
    begun, retried = np.arange(0, end, every), np.arange(away + 1, back)  # what waits is tried again each second
    begun = begun[(begun <= away) | (begun >= back)]
    moments = {
        "attempts_total{": np.append(begun, retried),
        "retries_total{": retried,
        'errors_total{status="UNAVAILABLE", outcome="failed", ': np.append(away, retried),
        "late_calls_total{": np.array([away + 0.1]),
        "failed_calls_total{": np.array([]),
    }
    at = np.arange(0, end, scrape)
    series = {'up{job="weightserver", instance="shard-0:9101"}': np.where((away <= at) & (at < back), 0, 1)}
    for name, when in moments.items():
        for method in ("Fetch", "PushGradients"):
            labels = f'instance="trainer:9200", shard="0", method="{method}"}}'
            series[f"weightserver_client_{name}{labels}"] = np.searchsorted(np.sort(when), at, side="right")
    case = {
        "interval": f"{scrape}s",
        "input_series": [
            {"series": name, "values": " ".join(str(int(value)) for value in values)} for name, values in series.items()
        ],
        "promql_expr_test": [
            {"expr": 'count_over_time(ALERTS{severity="critical", alertstate="firing"}[1h])', "eval_time": "29m"},
            {
                "expr": "count(rate(weightserver_client_errors_total[10m]) > 0)",
                "eval_time": "9m",
                "exp_samples": [{"labels": "{}", "value": 2}],
            },
        ],
    }
    (tmp_path / "rules.yml").write_text(slo.RULES.read_text())
    cases = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [case]}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("calls", [2, 3])
def test_three_calls_without_the_token_are_told_and_two_are_not(calls: int, tmp_path: Path) -> None:
    """Where scrapes and rules have times of their own."""
    name = 'weightserver_unauthenticated_calls_total{instance="shard-0:9101", reason="wrong"}'
    number = [{"labels": "{}", "value": 1}] if calls == 3 else []
    alert = 'count(ALERTS{alertname="TokensRefused", alertstate="firing"})'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"0x12 1x4 2x5 {calls}x40"}],
        "promql_expr_test": [{"expr": alert, "eval_time": "2314s", "exp_samples": number}],
    }
    (tmp_path / "rules.yml").write_text(slo.RULES.read_text())
    cases = {"rule_files": ["rules.yml"], "evaluation_interval": "13s", "tests": [case]}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yml")
    assert done.returncode == 0, done.stdout + done.stderr


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


@needs_alertmanager
def test_a_shard_that_is_down_mutes_what_waits_for_it_and_nothing_else() -> None:
    def alert(name: str, severity: str = "critical", **labels: str) -> dict[str, str]:
        return {"alertname": name, "severity": severity, "cluster": "a"} | labels

    down = alert("ShardDown", instance="shard-0:9101", shard="0")
    newest = alert("CheckpointTooOld", run="slow")
    muted = [
        alert("FetchStuck", instance="trainer:9200", shard="0"),
        alert("FetchSlow", instance="trainer:9200", shard="0", side="client"),
        alert("WritesUnavailable", instance="trainer:9200", shard="0"),
        alert("ClockBehind", "warning", instance="shard-0:9101", shard="0"),
        alert("TrainerStalled", run="one"),
        alert("TrainerWaits", "warning", instance="trainer:9200", run="one"),
        alert("CheckpointTooOld", "warning", run="slow"),
    ]
    told = [
        alert("FetchStuck", instance="trainer:9200", shard="1"),
        alert("FetchStuck", instance="trainer:9200", shard="0") | {"cluster": "b"},
        alert("DiskFull", instance="shard-0:9101", shard="0"),
        alert("CheckpointTooOld", "warning", run="other"),
    ]
    sent = [{"labels": labels} for labels in (down, newest, *muted, *told)]
    with LocalAlertmanager() as alertmanager:
        url = f"{alertmanager.url}/api/v2/alerts"
        post = urllib.request.Request(url, json.dumps(sent).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(post, timeout=30).close()
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
    silent = [one["labels"] for one in found if one["status"]["inhibitedBy"]]
    assert len(found) == len(sent)
    assert sorted(silent, key=str) == sorted(muted, key=str)
    receivers = {(one["labels"]["severity"], receiver["name"]) for one in found for receiver in one["receivers"]}
    assert receivers == {("critical", "pager"), ("warning", "tickets")}
