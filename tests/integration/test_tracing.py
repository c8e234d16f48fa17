"""Spans of a head's steps, its calls and the shards' answers, as a collector receives them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from weightserver import LocalCluster
from weightserver.common import tracing

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry: pip install '.[otel]'")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weightserver.torch import ClassifierHead


class Collector:
    """What arrived, by the name of the program; one event for each arrival."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Any]] = {}
        self.arrived = threading.Condition()

    def add(self, content: bytes) -> None:
        with self.arrived:
            for part in ExportTraceServiceRequest.FromString(content).resource_spans:
                (service,) = (one.value.string_value for one in part.resource.attributes if one.key == "service.name")
                self.spans.setdefault(service, []).extend(span for scope in part.scope_spans for span in scope.spans)
            self.arrived.notify_all()


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.add(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def values(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.fixture
def fresh() -> Iterator[None]:
    tracing._opened.clear()
    yield
    if found := tracing.spans(tracing.CLIENT):
        found.close()
    tracing._opened.clear()


@pytest.mark.usefixtures("fresh")
def test_a_step_its_calls_and_their_answers_are_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (found, address):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with LocalCluster(2, tmp_path) as cluster:
            with ClassifierHead(200, 8, num_negatives=32, servers=cluster.addresses, run="a", rows="remote") as head:
                for first in (0, 8, 16):
                    embeddings = torch.ones(8, 8).normal_().requires_grad_()
                    head(embeddings, torch.arange(first, first + 8)).backward()
                    head.step(learning_rate=0.1)
                head.flush()

            def complete() -> bool:
                methods = {span.name for span in found.spans.get(tracing.SHARD, [])}
                steps = [span for span in found.spans.get(tracing.CLIENT, []) if span.name.startswith("step ")]
                return {"Fetch", "PushGradients"} <= methods and len(steps) == 3

            with found.arrived:
                assert found.arrived.wait_for(complete, 60), found.spans.keys()
        of_head, of_shards = found.spans[tracing.CLIENT], found.spans[tracing.SHARD]
    by_id = {span.span_id: span for span in of_head}
    steps = {span.span_id: span for span in of_head if span.name.startswith("step ")}
    assert [values(span)["step"] for span in steps.values()] == [0, 1, 2]
    joined = [span for span in of_shards if span.parent_span_id in by_id]
    assert {"Fetch", "PushGradients"} <= {span.name for span in joined}
    for answer in joined:
        call = by_id[answer.parent_span_id]
        assert (call.name, call.trace_id) == (answer.name, answer.trace_id)
        assert values(call)["shard"] in (str(values(answer)["shard"]), "unknown")
        if call.parent_span_id in steps:
            assert steps[call.parent_span_id].trace_id == call.trace_id
    pushed = next(span for span in joined if span.name == "PushGradients")
    assert values(pushed)["status"] == "OK"
    assert 0 < values(pushed)["stage.commit_seconds"] <= (pushed.end_time_unix_nano - pushed.start_time_unix_nano) / 1e9
    in_steps = {by_id[span.parent_span_id].parent_span_id for span in joined} & steps.keys()
    assert len(in_steps) >= 2, "calls of several steps"


@pytest.mark.guard
def test_a_collector_that_does_not_answer_delays_no_end() -> None:
    program = """if True:
    from weightserver.common.tracing import CLIENT, spans
    spans(CLIENT).step_ended(0)
    print("ends", flush=True)
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as ending:
            assert ending.stdout is not None
            assert ending.stdout.readline() == b"ends\n"
            ended = time.monotonic()
            assert ending.wait(60) == 0
    assert time.monotonic() - ended < 8, "the exporter's own limit is 10 s"


@pytest.mark.usefixtures("fresh")
def test_nothing_is_made_unless_someone_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert tracing.spans(tracing.CLIENT) is None


def recorded(program: str) -> tuple[InMemorySpanExporter, tracing.Spans]:
    exporter = InMemorySpanExporter()
    return exporter, tracing.Spans(SimpleSpanProcessor(exporter), program)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("header", ["", "00-zz-11-01", "00-1", "a" * 300, f"00-{'1' * 33}-{'2' * 16}-01"])
def test_a_header_of_another_program_makes_no_span(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, spans = recorded("shard")
    spans.answered(header, "Fetch", 0.1, "OK", {}, {})
    assert not exporter.get_finished_spans()
    spans.answered(f"00-{'1' * 32}-{'2' * 16}-01", "Fetch", 0.1, "OK", {}, {"read": 0.05})
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert span.context is not None
    assert (span.parent.span_id, span.context.trace_id) == (int("2" * 16, 16), int("1" * 32, 16))


def test_a_step_takes_its_time_though_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, spans = recorded("client")
    hour_ago = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr("weightserver.common.tracing.time.time_ns", lambda: hour_ago)
    spans.step_ended(0)
    (span,) = exporter.get_finished_spans()
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 <= span.end_time - span.start_time < 3_000 * 10**9


def test_the_traces_of_calls_that_never_end_are_forgotten() -> None:
    exporter, spans = recorded("client")
    for number in range(5000):
        spans.header(f"{number:016x}")
    assert len(spans._calls) == 4096
    spans.call_ended(f"{1:016x}", "Fetch", 0.1, "ok", {})
    assert not exporter.get_finished_spans()
    spans.call_ended(f"{4999:016x}", "Fetch", 0.1, "ok", {})
    assert len(exporter.get_finished_spans()) == 1
