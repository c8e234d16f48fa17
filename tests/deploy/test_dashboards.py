"""The dashboards that Grafana is given: what the code makes, whole and readable. Their queries run in
test_live_queries.py."""

from __future__ import annotations

import json
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
