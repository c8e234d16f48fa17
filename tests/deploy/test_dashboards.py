"""The dashboards that Grafana is given: what the code makes, whole and readable. Their queries run in
test_panels.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import slo
from deploy.grafana.dashboards import BOARDS, CHOICES, DIRECTORY, UNSHOWN, build, to_json
from tests.deploy.test_rules import needs_promtool, promtool
from tests.helpers.watching import metric, metric_on, page
from trainer.run.prometheus import TrainerMetrics
from weightserver import LocalCluster, TableSpec, WeightClient
from weightserver.common.metrics import page as metrics_page
from weightserver.common.processes import usable_memory
from weightserver.server.metrics import ShardMetrics

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in DIRECTORY.glob("*.json")}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
]
RECORDED = [rule for objective in slo.SLO["objectives"].values() for rule in objective["sides"].values()]
"""What the recorded ratios on panels are made of."""
PROVISIONING = DIRECTORY.parent / "provisioning"


def families(expression: str) -> list[str]:
    """Names of the metrics in an expression, each time that they are there."""
    return re.findall(r"\b(?:(?:weightserver|pic_trainer|process)_\w+|pic:\w+:\w+|up(?=\{))", expression)


def test_the_dashboards_are_those_of_the_code() -> None:
    files = {path.stem: path.read_text() for path in DIRECTORY.iterdir()}
    for _ in range(2):  # a second time it makes the same
        assert files == {name: to_json(dashboard) for name, dashboard in build().items()}, "make dashboards"


def test_dashboards_are_few_and_small() -> None:
    assert set(DASHBOARDS) == {"service", "fetches", "storage", "training", "embeddings"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 5
    for dashboard in DASHBOARDS.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert ids == list(range(1, len(ids) + 1))
        assert len(ids) <= 12
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
        assert len(places) == len(ids), "panels lie on each other"


def test_panels_ask_the_chosen_source_at_its_own_interval() -> None:
    """A query's own interval would make Grafana's window four times as long, whatever the scrape interval is."""
    for dashboard in DASHBOARDS.values():
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", *CHOICES]
        for panel in dashboard["panels"]:
            for part in (panel, *panel["targets"]):
                assert part["datasource"] == {"type": "prometheus", "uid": "$datasource"}
                assert "interval" not in part
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    scrape = yaml.safe_load((DIRECTORY.parent.parent / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"], "$__rate_interval is made of it"


@pytest.mark.parametrize("panel", PANELS)
def test_no_line_mixes_clusters_and_each_choice_counts(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = target["expr"]
        groups = re.findall(
            r"\b(?:sum|max|min|avg|count)\b ?(by \([^)]*\))?", re.sub(r"\w*_(sum|count)\b", "", expression)
        )
        groups += re.findall(r"\bon (\([^)]*\))", expression)
        assert all("(cluster" in group for group in groups), expression
        assert expression.count('cluster=~"$cluster"') == len(families(expression)) >= 1
        assert "{{cluster}}" in target["legendFormat"] or panel.get("repeat") == "cluster"
        of_runs = re.search(r"\b(pic_trainer|weightserver_client)_", expression)
        assert (of_runs is None and 'job="trainer"' not in expression) or 'run=~"$run"' in expression


def test_a_slow_fetch_leads_to_its_cause_in_two_clicks() -> None:
    """From the shard that clients wait for to the shard, its stages, or its storage, of the clicked line."""
    titles = {
        panel["title"]: (name, panel["fieldConfig"]["defaults"].get("links", []))
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
    }
    way = {}
    for title, (board, links) in titles.items():
        for link in links:
            way[title] = (board, re.match(r"/d/pic-(\w+)\?", link["url"])[1])  # type: ignore[index]
            assert way[title][1] in DASHBOARDS
    assert way["How much of the time does it wait for rows?"] == ("training", "fetches")
    assert way["Which shard is slow for clients?"] == ("fetches", "service")
    assert way["How long do a shard's slowest requests take?"] == ("service", "fetches")
    assert way["Which stage do the slowest fetches and writes wait for, and on which shard?"] == ("fetches", "storage")
    for (title, (board, _)), panels in ((pair, DASHBOARDS[pair[1][0]]["panels"]) for pair in way.items()):
        shown = next(panel for panel in panels if panel["title"] == title)
        assert all("shard" in target["expr"] for target in shown["targets"]) or board == "training"


@pytest.mark.parametrize("panel", PANELS)
def test_a_link_chooses_what_each_of_its_lines_is_of(panel: dict[str, Any]) -> None:
    """An empty choice would show nothing."""
    for link in panel["fieldConfig"]["defaults"].get("links", []):
        told = dict(re.findall(r"var-(\w+)=\$\{__field\.labels\.(\w+)\}", link["url"]))
        kept = re.findall(r"[?&]\$\{(\w+):queryparam\}", link["url"])
        assert sorted([*told, *kept]) == sorted(["datasource", *CHOICES])
        for name, label in told.items():
            assert name == label
            assert all(f"{{{{{label}}}}}" in target["legendFormat"] for target in panel["targets"])


def test_thresholds_are_those_of_the_alerts() -> None:
    panels = {panel["title"]: panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]}
    for board in BOARDS.values():
        for panel in board["panels"]:
            alert = panel.get("alert", "late")
            if alert != "late":
                steps = panels[panel["title"]]["fieldConfig"]["defaults"]["thresholds"]["steps"]
                assert sorted(step["value"] for step in steps[1:]) == sorted(t.value for t in slo.thresholds(alert))
                assert alert in panel["about"], "it says which alert"


def test_events_are_annotations() -> None:
    for dashboard in DASHBOARDS.values():
        events = {event["name"]: event["expr"] for event in dashboard["annotations"]["list"]}
        assert set(events) == {"checkpoint", "rollback", "restart", "session"}
        assert all('cluster=~"$cluster"' in expression for expression in events.values())


def test_every_family_is_on_a_panel_or_has_a_reason_why_not(cluster: LocalCluster, client: WeightClient) -> None:
    client.create_table(TableSpec(num_rows=40, dim=8, rows_per_block=10))
    trainer = TrainerMetrics(run="a", rank=0, window_size=9, batch_size=3, num_steps=9, device=torch.device("cpu"))
    pages = page(cluster.metrics_addresses[0]), metrics_page(trainer.registry).decode()
    exported = {family.name.removesuffix("_info") for text in pages for family in text_string_to_metric_families(text)}
    shown = {
        re.sub(r"_(total|bucket|count|sum|info)$", "", name)
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in families(target["expr"])
    }
    shown |= {re.sub(r"_(total|bucket|count|sum)$", "", name) for record in RECORDED for name in families(record)}
    assert exported - shown == set(UNSHOWN) & exported - shown, "neither shown nor in UNSHOWN"
    assert shown & set(UNSHOWN) == set(), "shown after all"
    assert {name for name in shown if not name.startswith("pic:")} - {"up"} <= exported, "shown, but never exported"
    assert set(UNSHOWN) <= exported | {"weightserver_certificate_expiry_timestamp_seconds"}, "no longer exported"


def test_a_shard_counts_rows_bytes_and_repeated_writes(cluster: LocalCluster, client: WeightClient) -> None:
    """What panels divide by one another; a repeated write moves nothing."""
    address = cluster.metrics_addresses[0]

    names = [
        f'weightserver_{name}{{operation="{operation}"}}'
        for operation in ("fetch", "push", "write_state")
        for name in ("rows_total", "row_bytes_total")
    ]
    client.create_table(TableSpec(num_rows=40, dim=8, rows_per_block=10))
    client.extend_schedule(0, np.full(9, 0.1, np.float32))
    client.open_session("run")
    before = [metric(address, name) for name in names]
    client.push_gradients(np.arange(10), np.ones((10, 8), np.float32), step=0)  # shard 0 has the first block
    client.fetch(np.arange(5), step=1)
    client.write_state([3], np.ones((1, 8), np.float32), np.ones((1, 8), np.float32), 2)
    moved = [metric(address, name) - had for name, had in zip(names, before, strict=True)]
    framed = pytest.approx(5 * 8 * 4, rel=0.1)
    assert moved == [5, framed, 10, 10 * 8 * 4, 1, 2 * 8 * 4]
    assert metric(address, "weightserver_stored_rows") == 10
    assert metric(address, "weightserver_memory_limit_bytes") == usable_memory()
    metrics = ShardMetrics(shard=0, num_shards=1, version="0")
    metrics.wrote("push", 5, 160, {}, duplicate=True)
    text = metrics_page(metrics.registry).decode()
    of_a_repeated_one = {"duplicate_writes_total": 1, "requested_rows_total": 5, "rows_total": 0, "row_bytes_total": 0}
    assert {name: metric_on(text, f"weightserver_{name}") for name in of_a_repeated_one} == of_a_repeated_one


def series_of(query: str) -> Iterator[tuple[str, int]]:
    """Yields a series of each metric of a query, for each of two clusters, and by how much it grows in a second."""
    groups = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    for name, braces in re.findall(r"\b(\w+){([^}]*)}", query):
        wanted = {label: value.split("|")[0] for label, value in re.findall(r'(\w+)=~?"([^$"]+)"', braces)}
        labels = {label: label for label in groups} | {"shard": "0", "run": "run", "rank": "0"} | wanted
        for cluster, growth in (("a", 1), ("b", 10)):
            for bound, share in (("1.0", 1), ("2.0", 2), ("+Inf", 4)) if "_bucket" in name else (("", 1),):
                own = labels | {"cluster": cluster} | ({"le": bound} if bound else {})
                inside = ", ".join(f'{label}="{value}"' for label, value in sorted(own.items()))
                yield f"{name}{{{inside}}}", growth * share


@needs_promtool
@pytest.mark.parametrize("scrape", [5, 15, 60])
def test_rates_are_true_at_each_scrape_interval(scrape: int, tmp_path: Path) -> None:
    """In Grafana's own window, $__rate_interval: at least four scrapes and a step's width more than one."""
    interval = max(scrape, 3600 / 1000)  # of a point: an hour on a thousand pixels, at least a scrape
    window = f"{round(max(interval + scrape, 4 * scrape))}s"
    targets = [target for board in DASHBOARDS.values() for panel in board["panels"] for target in panel["targets"]]
    asked = [target["expr"] for target in targets if "$__rate_interval" in target["expr"]]
    cases = []
    for query in asked:
        rates = re.sub(r"\$(cluster|shard|run|rank)", ".*", query.replace("increase(", "rate("))
        own, of_an_hour = (rates.replace("$__rate_interval", length) for length in (window, "1h"))
        num_lines = 2 * (3 if query.startswith("sum by (cluster, le)") else 1)
        grown = dict(series_of(query))
        checks = {f"count(abs(({own}) / ({of_an_hour}) - 1) < 0.001)": num_lines}
        if re.fullmatch(r"\w+ by \([^)]*\) \(rate\([^()]*\)\)", own):
            checks[f"round(sum({own}), 0.001)"] = sum(grown.values())
        cases.append(
            {
                "interval": f"{scrape}s",
                "input_series": [
                    {"series": series, "values": f"0+{growth * scrape}x{4000 // scrape}"}
                    for series, growth in grown.items()
                ],
                "promql_expr_test": [
                    {"expr": check, "eval_time": "1h5m3s", "exp_samples": [{"labels": "{}", "value": value}]}
                    for check, value in checks.items()
                ],
            }
        )
    assert len(cases) > 30
    (tmp_path / "case.yml").write_text(yaml.safe_dump({"evaluation_interval": f"{scrape}s", "tests": cases}))
    done = promtool("test", "rules", tmp_path / "case.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboards_are_found_where_they_are_mounted() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/pic.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).name == DIRECTORY.name
