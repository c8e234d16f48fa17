"""Builds the Grafana dashboards of boards.yml: few panels, each of which answers the question in its title.

    python -m deploy.grafana.dashboards

writes dashboards/*.json, which provision Grafana. Every query has a result in a healthy run: the absence of errors is a
line at 0, not an empty panel. What is chosen above a dashboard (cluster, shard, run, rank) is added to each query, and
`cluster` to each grouping, so that no line mixes two clusters. Thresholds are those of deploy/slo.yml. A line leads to
the next cause: from a client's shard to the shard, its stages and its storage.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy import slo

DIRECTORY = Path(__file__).parent / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
"""The source that is chosen above a dashboard."""
BOARDS: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "boards.yml").read_text())
_FAMILY = re.compile(r"\b((?:weightserver|pic_trainer|process)_\w+|pic:\w+:\w+|up(?=\{))(\{[^}]*\})?")
_GROUPS = re.compile(r"\b(by|on) \((?!cluster\b)")
UNSHOWN = {
    "weightserver_build": "says which program runs; it never changes while it does",
    "weightserver_cluster_shards": "never changes; the alert ShardMissing compares it",
    "weightserver_certificate_expiry_timestamp_seconds": "only shards with TLS have it; the alert CertificateExpires",
    "weightserver_generation": "a checkpoint ends it: the annotation `checkpoint`",
    "weightserver_session_epoch": "the annotation `session`",
    "weightserver_newest_checkpoint_step": "the annotation `checkpoint`",
    "weightserver_reader_pid": "a number to look for on the machine, when ReaderHoldsSpace fires",
    "weightserver_reader_age_seconds": "as reader_pid",
    "pic_trainer_run": "fills the choice of runs",
    "process_virtual_memory_bytes": "has the map of a shard, 1 TiB",
    "process_open_fds": "connections, which the shard limits itself",
    "process_max_fds": "never changes",
}
"""Families that no panel shows, and why."""


def build() -> dict[str, dashboard.Dashboard]:
    """Returns file name, without .json, to dashboard."""
    return {name: _dashboard(name, **board) for name, board in BOARDS.items()}


def _dashboard(name: str, title: str, panels: list[dict[str, Any]]) -> dashboard.Dashboard:
    kinds = {"stat": _stat, "heatmap": _heatmap}
    board = (
        dashboard.Dashboard(f"PIC: {title}")
        .uid(f"pic-{name}")
        .tags(["pic"])
        .readonly()
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Dashboards")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["pic"])
            .keep_time(True)
            .include_vars(True)
            .as_dropdown(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable, query in CHOICES.items():
        board = board.with_variable(_choice(variable, query))
    for event, expression in _EVENTS.items():
        board = board.annotation(
            dashboard.AnnotationQuery()
            .name(event)
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(_chosen(expression))
        )
    for panel in panels:
        options = {key: value for key, value in panel.items() if key != "kind"}
        board = board.with_panel(kinds.get(panel.get("kind", ""), _graph)(**options))
    return board


CHOICES = {
    "cluster": 'label_values(up{job=~"weightserver|trainer"}, cluster)',
    "shard": 'label_values(weightserver_cluster_shards{cluster=~"$cluster"}, shard)',
    "run": 'label_values(pic_trainer_run_steps{cluster=~"$cluster"}, run)',
    "rank": 'label_values(pic_trainer_run_steps{cluster=~"$cluster", run=~"$run"}, rank)',
}
"""Variables above each dashboard, and where Grafana finds their values; all are chosen at first."""
_EVENTS = {
    "checkpoint": "max by (cluster) (changes(weightserver_newest_checkpoint_step[$__rate_interval])) > 0",
    "rollback": "max by (cluster) (resets(weightserver_clock_steps[$__rate_interval])) > 0",
    "restart": 'max by (shard) (changes(process_start_time_seconds{job="weightserver"}[$__rate_interval])) > 0',
    "session": "max by (cluster) (changes(weightserver_session_epoch[$__rate_interval])) > 0",
}
"""Annotations: what they mark, and when."""


def _choice(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


def _stat(*, title: str, about: str, unit: str, lines: dict[str, str]) -> stat.Panel:
    """A field for each target, which is up or down."""
    words = {"0": ValueMappingResult(text="down", color="red"), "1": ValueMappingResult(text="up", color="green")}
    ((legend, expression),) = lines.items()
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(_SOURCE)
        .with_target(_query("A", expression, legend).instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .unit(unit)
        .mappings([ValueMap(options=words)])
        .color_mode(BigValueColorMode.BACKGROUND)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.VALUE_AND_NAME)
        .height(8)
        .span(12)
    )


def _heatmap(*, title: str, about: str, unit: str, lines: dict[str, str]) -> heatmap.Panel:
    """A heatmap for each chosen cluster."""
    ((legend, expression),) = lines.items()
    return (
        heatmap.Panel()
        .title(title)
        .description(about)
        .datasource(_SOURCE)
        .with_target(_query("A", expression, legend).format(PromQueryFormat.HEATMAP))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(units.Short))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").exponent(0.5).steps(64))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .unit(unit)
        .repeat("cluster")
        .height(8)
        .span(12)
    )


def _graph(
    *,
    title: str,
    about: str,
    unit: str,
    lines: dict[str, str],
    alert: str = "",
    then: dict[str, str] | None = None,
    min: float = 0,
    is_log: bool = False,
    is_stacked: bool = False,
) -> timeseries.Panel:
    """A graph of lines, legend to expression.

    Args:
        alert: its thresholds are drawn; "late" is the objective of fetches.
        then: the dashboard to which a line leads, to the link's words.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(_SOURCE)
        .unit(unit)
        .min(min)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .height(8)
        .span(12)
    )
    for board, words in (then or {}).items():
        panel = panel.data_links([_link(board, words, lines)])
    for letter, (legend, expression) in zip("ABCDEFGH", lines.items(), strict=False):
        panel = panel.with_target(_query(letter, expression, legend))
    if is_log:
        panel = panel.scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10))
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A")).fill_opacity(40)
    if alert:
        panel = _threshold_lines(panel, slo.thresholds(alert) if alert != "late" else [_late()])
    return panel


def _link(board: str, words: str, lines: dict[str, str]) -> dashboard.DashboardLink:
    """From a line to a dashboard of what the line is of; what its legend does not tell remains as it is chosen."""
    told = {"cluster"}.union(set.intersection(*(set(re.findall(r"{{(\w+)}}", legend)) for legend in lines)))
    of_line, chosen = "var-{0}=${{__field.labels.{0}}}", "${{{0}:queryparam}}"
    choices = ((of_line if name in told else chosen).format(name) for name in CHOICES)
    url = "&".join((f"/d/pic-{board}?${{datasource:queryparam}}", *choices, "${__url_time_range}"))
    return dashboard.DashboardLink(words).url(url)


def _query(letter: str, expression: str, legend: str) -> prometheus.Dataquery:
    named = legend if legend == "{{le}}" else f"{{{{cluster}}}} {legend}"
    return prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(_chosen(expression)).legend_format(named)


def _chosen(expression: str) -> str:
    """The expression, of what is chosen above the dashboard, with clusters apart."""
    return _FAMILY.sub(_of_choice, _GROUPS.sub(r"\1 (cluster, ", expression))


def _of_choice(found: re.Match[str]) -> str:
    name, braces = found[1], (found[2] or "").strip("{}")
    of_runs = ("pic_trainer_", "weightserver_client_fetch_", "weightserver_client_slowest_")
    if name.startswith(of_runs) or 'job="trainer"' in braces:
        labels = ["run", "rank"]
    elif name.startswith("weightserver_client_"):
        labels = ["shard", "run", "rank"]
    else:
        labels = [] if name == "up" else ["shard"]
    chosen = [f'{label}=~"${label}"' for label in ("cluster", *labels) if f"{label}=" not in braces]
    return f"{name}{{{', '.join([*chosen, *([braces] if braces else [])])}}}"


def _late() -> slo.Threshold:
    """From when on a fetch is late, unless it has very many rows."""
    seconds = min(slo.SLO["objectives"]["FetchSlow"]["late_seconds"].values())
    return slo.Threshold("warning", seconds, is_lower=False)


def _threshold_lines(panel: timeseries.Panel, thresholds: list[slo.Threshold]) -> timeseries.Panel:
    colours = {"warning": "orange", "critical": "red"}
    if thresholds[0].is_lower:
        above = ["green", *(colours[threshold.severity] for threshold in thresholds)]
        values = sorted(threshold.value for threshold in thresholds)
        steps = [Threshold(value=None, color=above.pop())]
        steps += [Threshold(value=value, color=above.pop()) for value in values]
    else:
        steps = [Threshold(value=None, color="green")]
        steps += [Threshold(value=threshold.value, color=colours[threshold.severity]) for threshold in thresholds]
    return panel.thresholds(dashboard.ThresholdsConfig().steps(steps)).thresholds_style(
        common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
    )


def to_json(built: dashboard.Dashboard) -> str:
    """Returns the file's text, with panels numbered in order."""
    model = built.build()
    for number, panel in enumerate(model.panels or [], start=1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(model) + "\n"


def write(directory: Path = DIRECTORY) -> None:
    for name, built in build().items():
        (directory / f"{name}.json").write_text(to_json(built))


if __name__ == "__main__":
    write()
