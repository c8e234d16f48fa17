"""The dashboards that Grafana is given: what the code makes, whole and readable. Their queries run in
test_live_queries.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.dashboards import DIRECTORY, build, to_json

DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in DIRECTORY.glob("*.json")}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
]
PROVISIONING = DIRECTORY.parent / "provisioning"


def test_the_dashboards_are_those_of_the_code() -> None:
    made = {name: to_json(dashboard) for name, dashboard in build().items()}
    files = {path.stem: path.read_text() for path in DIRECTORY.iterdir()}
    assert files == made, "make dashboards"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_answers_a_question(panel: dict[str, Any]) -> None:
    assert panel["title"].endswith("?")
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["legendFormat"], "a line without a name"
        assert target["expr"].count("(") == target["expr"].count(")")


def test_dashboards_are_few_and_small() -> None:
    assert set(DASHBOARDS) == {"service", "fetches", "storage", "training", "embeddings"}
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 5
    for dashboard in DASHBOARDS.values():
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert ids == list(range(1, len(ids) + 1))
        assert len(ids) <= 6
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
        assert len(places) == len(ids), "panels lie on each other"


def test_panels_ask_the_source_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    asked = {
        (part["datasource"]["type"], part["datasource"]["uid"])
        for dashboard in DASHBOARDS.values()
        for panel in dashboard["panels"]
        for part in (panel, *panel["targets"])
    }
    assert asked == {(source["type"], source["uid"])}
    scrape = yaml.safe_load((DIRECTORY.parent.parent / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"], "$__rate_interval is made of it"


def test_the_dashboards_are_found_where_they_are_mounted() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/pic.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert Path(provider["options"]["path"]).name == DIRECTORY.name


def queries(question: str) -> list[str]:
    """The queries of the one panel whose title begins like this."""
    panels = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]]
    (panel,) = [panel for panel in panels if panel["title"].startswith(question)]
    return [target["expr"] for target in panel["targets"]]


def test_stages_and_clients_are_shown_by_shard() -> None:
    """A stage of one slow shard must not disappear among the others, nor its slow clients among small fetches."""
    for kind, query in zip(("fetch", "write"), queries("Which stage do"), strict=True):
        assert f"weightserver_{kind}_stage_seconds_bucket" in query
        assert re.search(r"sum by \((le, )?shard, stage(, le)?\)", query)
    (calls,) = queries("Which shard is slow for clients")
    assert re.search(r"sum by \((le, )?shard, size_class(, le)?\)", calls)


def test_clients_are_compared_with_the_slowest_shard_of_the_same_fetches() -> None:
    """With all shards' own times, the slowest of sixteen would look like the network's fault."""
    whole, whole_99, slowest, slowest_99 = queries("How much longer do clients wait")
    ours, theirs = "weightserver_client_fetch_seconds_bucket", "weightserver_client_slowest_shard_seconds_bucket"
    assert ours in whole
    assert (whole.replace(ours, theirs), whole_99.replace(ours, theirs)) == (slowest, slowest_99)
