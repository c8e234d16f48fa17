"""Builds the Grafana dashboards: few panels, each of which answers the question in its title.

    python -m deploy.grafana.dashboards

writes dashboards/*.json, which provision Grafana. One test compares the files with this code, another runs every query
while shards and a trainer run. Every query has a result in a healthy run: the absence of errors is a line at 0, not an
empty panel.
"""

from __future__ import annotations

import re
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
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
    DataSourceRef,
    Panel,
    Threshold,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DIRECTORY = Path(__file__).parent / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
"""The source in provisioning/datasources/prometheus.yml."""
_WINDOW = "[$__rate_interval]"
_RUN = "* on (cluster, instance) group_left (run) pic_trainer_run_info"
_METRIC = re.compile(r"\b((?:weightserver|pic_trainer)_\w+|pic:\w+:\w+|(?:up|process_start_time_seconds)(?=\{))(\{)?")
_FETCHES = '{method="Fetch", outcome="ok"}'
_OBJECTIVE_SECONDS = 0.1
"""The objective of the alert FetchSlow: 99 % of fetches take at most this long."""


def build() -> dict[str, dashboard.Dashboard]:
    """Returns file name, without .json, to dashboard."""
    return {
        "service": _dashboard(
            "service", "Weight servers", _up(), _requests(), _failures(), _durations(), _refused_writes(), _restarts()
        ),
        "fetches": _dashboard(
            "fetches",
            "Row fetches",
            _fetch_heatmap(),
            _objective(),
            _stages(),
            _both_sides(),
            _waiting(),
            _client_calls(),
        ),
        "storage": _dashboard("storage", "Storage", _file(), _volume(), _commits(), _groups()),
        "training": _dashboard(
            "training",
            "Training run",
            _loss(),
            _speed(),
            _step_parts(),
            _row_wait(),
            _checkpoint_age(),
            _clocks(),
        ),
        "embeddings": _dashboard("embeddings", "Embeddings", _recognised(), _dimensions(), _collapse(), _norms()),
    }


# ---- weight servers


def _up() -> stat.Panel:
    words = {"0": ValueMappingResult(text="down", color="red"), "1": ValueMappingResult(text="up", color="green")}
    return (
        stat.Panel()
        .title("Is every shard up?")
        .description("Whether each shard answered the last scrape.")
        .datasource(_SOURCE)
        .with_target(_query("A", 'up{job="weightserver"}', "{{instance}}").instant())
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .unit(units.NoUnit)
        .mappings([ValueMap(options=words)])
        .color_mode(BigValueColorMode.BACKGROUND)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.VALUE_AND_NAME)
        .height(8)
        .span(12)
    )


def _requests() -> timeseries.Panel:
    return _lines(
        "How many requests does each shard answer?",
        "All methods, including calls that fail. The lines of the shards coincide: rows are spread evenly.",
        units.RequestsPerSecond,
        (f"sum by (shard) (rate(weightserver_request_seconds_count{_WINDOW}))", "shard {{shard}}"),
    )


def _failures() -> timeseries.Panel:
    requests = "weightserver_requests_total"
    return _lines(
        "Which requests fail or are refused?",
        "Errors by gRPC status, and a line at 0 for each shard. Calls that have no token or stall end before a method "
        "runs.",
        units.RequestsPerSecond,
        (
            f'sum by (shard, status) (rate({requests}{{status!="OK"}}{_WINDOW}))'
            f" or sum by (shard) (0 * rate({requests}{_WINDOW}))",
            "shard {{shard}} {{status}}",
        ),
        (f"sum(rate(weightserver_cut_off_calls_total{_WINDOW}))", "cut off: silent caller"),
        (f"sum(rate(weightserver_unauthenticated_calls_total{_WINDOW}))", "refused: no token"),
    )


def _durations() -> timeseries.Panel:
    series = 'weightserver_request_seconds_bucket{method=~"Fetch|PushGradients|WriteState", outcome="ok"}'
    return _lines(
        "How long do a shard's slowest requests take?",
        "99th percentile of fetches and writes, from a request's arrival to the end of its answer.",
        units.Seconds,
        (_quantile(0.99, series, "shard, method"), "shard {{shard}} {{method}}"),
    )


def _refused_writes() -> timeseries.Panel:
    refused = "weightserver_requests_total"
    kinds = 'method=~"PushGradients|WriteState|Checkpoint", status=~"FAILED_PRECONDITION|DATA_LOSS|INTERNAL"'
    return _threshold_line(
        _lines(
            "Does any shard refuse writes?",
            "Writes that failed for good in ten minutes; above 0 the alert WritesFail fires. A fenced writer is none.",
            units.Short,
            (f"sum by (shard) (increase({refused}{{{kinds}}}[10m]))", "shard {{shard}}"),
        ),
        0.5,
    )


def _restarts() -> timeseries.Panel:
    return _threshold_line(
        _lines(
            "Does any shard restart, or does not serve?",
            "Restarts within an hour, of which more than two raise ShardRestarts; 1 while the database of a shard "
            "cannot be used (DatabaseDamaged); and calls since its start that met damaged records, any of which raises "
            "RowsDamaged.",
            units.Short,
            (
                'sum by (shard) (changes(process_start_time_seconds{job="weightserver"}[1h]))',
                "shard {{shard}} restarts",
            ),
            ("sum by (shard) ((1 - weightserver_serving))", "shard {{shard}} does not serve"),
            ("sum by (shard) (weightserver_damaged_reads_total)", "shard {{shard}} met damaged records"),
        ),
        2.5,
    )


# ---- row fetches


def _fetch_heatmap() -> heatmap.Panel:
    expression = f"sum by (le) (increase(weightserver_request_seconds_bucket{_FETCHES}{_WINDOW}))"
    return (
        heatmap.Panel()
        .title("How long do all fetches take?")
        .description("Fetches of all shards by their duration; the objective is 99 % within 100 ms.")
        .datasource(_SOURCE)
        .with_target(_query("A", expression, "{{le}}").format(PromQueryFormat.HEATMAP))
        .y_axis(heatmap.YAxisConfig().unit(units.Seconds))
        .cell_values(heatmap.CellValues().unit(units.Short))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Turbo").exponent(0.5).steps(64))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .unit(units.Seconds)
        .height(8)
        .span(12)
    )


def _objective() -> timeseries.Panel:
    return _threshold_line(
        _lines(
            "Do 99 % of fetches take at most 100 ms?",
            "Share of five minutes' fetches that took longer, as each shard and each trainer measures them; above the "
            "line for ten minutes, the alert FetchSlow fires.",
            units.PercentUnit,
            ("pic:slow_fetches:ratio_rate5m", "{{side}} {{instance}}"),
        ),
        0.01,
    )


def _stages() -> timeseries.Panel:
    return _lines(
        "Which stage do the slowest fetches and writes wait for, and on which shard?",
        "99 % of answered calls spent less in the stage. Fetches: waiting for a thread (queue), for the client's "
        "request (receive), reading and verifying blocks, correcting rows, framing them, and waiting until they were "
        "received. Writes: waiting for a thread, for the client's messages (receive), checking them, and until they "
        "are on disk.",
        units.Seconds,
        *(
            (
                _quantile(0.99, f"weightserver_{kind}_stage_seconds_bucket", "shard, stage"),
                f"shard {{{{shard}}}} {kind} {{{{stage}}}}",
            )
            for kind in ("fetch", "write")
        ),
    )


def _both_sides() -> timeseries.Panel:
    sides = (
        ("weightserver_client_fetch_seconds_bucket", "client"),
        ("weightserver_client_slowest_shard_seconds_bucket", "its slowest shard"),
    )
    return _threshold_line(
        _lines(
            "How much longer do clients wait than their slowest shard works?",
            "The same fetches on both sides: all shards together as clients measure them, retries included, and what "
            "the slowest shard of each says it took. What lies between is the network, a shard that did not answer, "
            "or the client's own threads.",
            units.Seconds,
            *((_quantile(q, series, ""), f"{name} {q:.0%}") for series, name in sides for q in (0.5, 0.99)),
        )
        .min(0.0001)
        .scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)),
        _OBJECTIVE_SECONDS,
    )


def _waiting() -> timeseries.Panel:
    return _threshold_line(
        _lines(
            "Which shard do clients wait for now?",
            "Age of the oldest call of each shard that a client waits for, retries per second, and answers per second "
            "by another shard or program at its address; above the line for half a minute, the alert FetchStuck fires.",
            units.Seconds,
            ("max by (instance, shard) (weightserver_client_oldest_call_seconds)", "{{instance}} shard {{shard}}"),
            (
                f"sum by (instance, shard) (rate(weightserver_client_retries_total{_WINDOW}))",
                "{{instance}} shard {{shard}} retries",
            ),
            (
                f"sum by (instance, expected, answered) (rate(weightserver_client_wrong_answers_total{_WINDOW}))",
                "{{instance}} shard {{expected}}: {{answered}} answers",
            ),
        ),
        15,
    )


def _client_calls() -> timeseries.Panel:
    series = 'weightserver_client_call_seconds_bucket{method="Fetch"}'
    return _threshold_line(
        _lines(
            "Which shard is slow for clients?",
            "99th percentile of fetches from one shard, as clients measure them, by the largest number of rows in one.",
            units.Seconds,
            (_quantile(0.99, series, "shard, size_class"), "shard {{shard}}, {{size_class}} rows"),
        ),
        _OBJECTIVE_SECONDS,
    )


# ---- storage


def _file() -> timeseries.Panel:
    return _stacked(
        _lines(
            "What fills the data files?",
            "Pages of all shards by content; free pages are reused before a file grows.",
            units.BytesIEC,
            ("sum by (pages) (weightserver_lmdb_bytes)", "{{pages}}"),
        )
    )


def _volume() -> timeseries.Panel:
    free = "weightserver_volume_free_bytes"
    panel = _lines(
        "How much space is left, now and in four hours?",
        "Free space on each shard's volume, now and if the last hour's trend continues; below 1 GB the alert DiskFull "
        "fires.",
        units.BytesIEC,
        (f"sum by (shard) ({free})", "shard {{shard}}"),
        (f"sum by (shard) (predict_linear({free}[1h], 4 * 3600))", "shard {{shard}} in 4 h"),
    )
    return _threshold_line(panel, 1e9, below=True)


def _commits() -> timeseries.Panel:
    panel = _lines(
        "How long until a write is on disk?",
        "99th percentiles of the time that a write waits for its transaction and that the transaction takes; if "
        "that is above the line for ten minutes, the alert CommitsSlow fires.",
        units.Seconds,
        (_quantile(0.99, "weightserver_commit_wait_seconds_bucket", "shard"), "shard {{shard}} wait"),
        (_quantile(0.99, "weightserver_commit_seconds_bucket", "shard"), "shard {{shard}} transaction"),
    )
    return _threshold_line(panel, 1.0)


def _groups() -> timeseries.Panel:
    writes = "weightserver_commit_writes"
    return _lines(
        "Do writes queue, and share transactions?",
        "Average number of writes per transaction, and writes that wait for one: a slow disk makes both grow.",
        units.Short,
        (
            f"sum by (shard) (rate({writes}_sum{_WINDOW})) / sum by (shard) (rate({writes}_count{_WINDOW}))",
            "shard {{shard}} in a transaction",
        ),
        ("sum by (shard) (weightserver_commit_queue_writes)", "shard {{shard}} waiting"),
    )


# ---- a training run


def _loss() -> timeseries.Panel:
    return _lines(
        "Does it learn?",
        "Loss of the last logged step in nats, and the loss of chance, the logarithm of the number of classes.",
        units.Short,
        (f"max by (run) (pic_trainer_loss {_RUN})", "{{run}}"),
        (f"ln(sum by (run) (pic_trainer_active_rows {_RUN}))", "{{run}} chance"),
    )


def _speed() -> timeseries.Panel:
    return _lines(
        "How many images does it train on per second?",
        "All ranks of a run count the whole batch; at 0 for ten minutes, the alert TrainerStalled fires.",
        units.CountsPerSecond,
        (f"max by (run) (rate(pic_trainer_images_total{_WINDOW}) {_RUN})", "{{run}}"),
    )


def _step_parts() -> timeseries.Panel:
    return _stacked(
        _lines(
            "What does a step spend its time on?",
            "Seconds of a step by what the trainer does, on average over ranks; a GPU's are seen where its results are "
            "waited for.",
            units.Seconds,
            (
                f"sum by (stage) (rate(pic_trainer_stage_seconds_total{_WINDOW}))"
                f" / on () group_left () sum(rate(pic_trainer_steps_total{_WINDOW}))",
                "{{stage}}",
            ),
        )
    )


def _row_wait() -> timeseries.Panel:
    panel = _lines(
        "How much of the time does it wait for rows?",
        "The share of its time that a rank waits because rows have not arrived; above the line for ten minutes, the "
        "alert TrainerWaits fires.",
        units.PercentUnit,
        (f"rate(pic_trainer_row_wait_seconds_total{_WINDOW})", "{{instance}}"),
    )
    return _threshold_line(panel, 0.5)


def _checkpoint_age() -> timeseries.Panel:
    saved = "pic_trainer_last_checkpoint_timestamp_seconds"
    return _threshold_line(
        _lines(
            "How much training would a crash lose?",
            "Time since the newest checkpoint was completed; above the line the alert CheckpointTooOld fires.",
            units.Seconds,
            (f"time() - max by (run) ({saved} {_RUN})", "{{run}}"),
        ),
        3600,
    )


def _clocks() -> timeseries.Panel:
    clock = "weightserver_clock_steps"
    return _lines(
        "Does any shard fall behind?",
        "Steps that each shard's clock is behind the furthest one of two minutes ago, for shards are scraped apart; "
        "above twice those of a window (2·W/B) the alert ClockBehind fires.",
        units.Short,
        (
            f"sum by (shard) (clamp_min(max by (cluster) ({clock} offset 2m)"
            f" - on (cluster) group_right () {clock}, 0))",
            "shard {{shard}}",
        ),
        ("2 * max(pic_trainer_window_size_rows / pic_trainer_batch_size)", "2·W/B"),
    )


# ---- what a run learns


def _recognised() -> timeseries.Panel:
    return _lines(
        "Does it recognise its images?",
        "Percent of the last logged batch whose own class has the highest logit of all active rows.",
        units.Percent,
        (f"max by (run) (pic_trainer_instance_top1 {_RUN})", "{{run}}"),
    )


def _dimensions() -> timeseries.Panel:
    return _lines(
        "How many dimensions do its embeddings use?",
        "RankMe of the newest 2,048 embeddings, at most the length of an embedding; a fall to a few is a collapse.",
        units.Short,
        (f"max by (run) (pic_trainer_rankme {_RUN})", "{{run}}"),
    )


def _collapse() -> timeseries.Panel:
    return _lines(
        "Do all images look the same to it?",
        "Mean cosine of two images' embeddings, 1 if they have collapsed, and the standard deviation of a normalised "
        "dimension, which is then 0.",
        units.Short,
        (f"max by (run) (pic_trainer_mean_cosine {_RUN})", "{{run}} mean cosine"),
        (f"max by (run) (pic_trainer_feature_std {_RUN})", "{{run}} standard deviation"),
    ).min(-1)


def _norms() -> timeseries.Panel:
    return _lines(
        "Do gradients or rows blow up?",
        "L2 norms of the encoder's gradient and, on average, of the active rows.",
        units.Short,
        (f"max by (run) (pic_trainer_gradient_norm {_RUN})", "{{run}} gradient"),
        (f"max by (run) (pic_trainer_row_norm {_RUN})", "{{run}} row"),
    )


# ---- what all share


def _dashboard(name: str, title: str, *panels: Builder[Panel]) -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard(f"PIC: {title}")
        .uid(f"pic-{name}")
        .tags(["pic"])
        .readonly()
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(_clusters())
    )
    for panel in panels:
        board = board.with_panel(panel)
    return board


def _clusters() -> dashboard.QueryVariable:
    """The choice of clusters, of those that one Prometheus watches; all at first."""
    return (
        dashboard.QueryVariable("cluster")
        .label("Cluster")
        .datasource(_SOURCE)
        .query('label_values(up{job=~"weightserver|trainer"}, cluster)')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(VariableOption(text="All", value="$__all", selected=True))
    )


def _lines(title: str, description: str, unit: str, *queries: tuple[str, str], span: int = 12) -> timeseries.Panel:
    """A graph, from zero, of (expression, legend) pairs."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(_SOURCE)
        .unit(unit)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .height(8)
        .span(span)
    )
    for letter, (expression, legend) in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(_query(letter, expression, legend))
    return panel


def _query(letter: str, expression: str, legend: str) -> prometheus.Dataquery:
    expression = _METRIC.sub(lambda found: f'{found[1]}{{cluster=~"$cluster"' + (", " if found[2] else "}"), expression)
    # At least a minute a point: resident rows are fetched and written some times a minute only.
    return (
        prometheus.Dataquery().ref_id(letter).datasource(_SOURCE).expr(expression).legend_format(legend).interval("1m")
    )


def _quantile(quantile: float, buckets: str, by: str) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({quantile}, sum by ({labels}) (rate({buckets}{_WINDOW})))"


def _stacked(panel: timeseries.Panel) -> timeseries.Panel:
    return panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A")).fill_opacity(40)


def _threshold_line(panel: timeseries.Panel, value: float, *, below: bool = False) -> timeseries.Panel:
    """Draws the threshold of an alert that fires above `value`, or `below` it."""
    colours = ("red", "green") if below else ("green", "red")
    steps = [Threshold(value=None, color=colours[0]), Threshold(value=value, color=colours[1])]
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
