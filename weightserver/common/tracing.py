"""Spans of steps, calls and answers for OpenTelemetry (the extra `otel`), if OTEL_EXPORTER_OTLP_ENDPOINT is set.

A span is made when what it tells of has ended. A request's id is the id of its client's span; the header `traceparent`
tells the shard the trace. Rows are asked for by other threads, steps ahead and for several steps at once: a trace has
the calls that began between the ends of two steps, whichever steps they are for.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightserver.common.installing import install_advice

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

TRACE_KEY = "traceparent"
"""Key of the trace in a call's metadata, as the W3C defines it: 00-TRACE-SPAN-01."""
CLIENT, SHARD = "weightserver-client", "weightserver-shard"
"""Names of the programs."""
_SEND_SECONDS = 2.0
"""How long a collector may take for a batch: a process that ends waits for it."""
_MOST_CALLS = 4096
"""Calls whose traces are remembered: some never end, as a fetch that was begun and then left."""

_HEADER = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_log = logging.getLogger(__name__)
_opened: dict[str, Spans | None] = {}
_opening = threading.Lock()


class Spans:
    """The spans of this process. Thread-safe.

    Args:
        processor: takes the spans.
        service: name of the program, unless OTEL_SERVICE_NAME is set.
    """

    def __init__(self, processor: SpanProcessor, service: str) -> None:
        from opentelemetry.sdk.resources import Resource

        self._processor = processor
        self._resource = Resource.create({} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service})
        self._random = random.Random(os.urandom(16))
        self._calls: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._begin_step()

    def close(self) -> None:
        """Sends what is left."""
        self._processor.shutdown()

    def _begin_step(self) -> None:
        self._step = self._random.getrandbits(128), self._random.getrandbits(64)  # of the trace, and of its first span
        self._step_began = time.perf_counter()

    def header(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that begins; its further attempts belong to the same trace."""
        with self._lock:
            trace, _ = self._calls.setdefault(request_id, self._step)
            if len(self._calls) > _MOST_CALLS:
                self._calls.pop(next(iter(self._calls)))
        return ((TRACE_KEY, f"00-{trace:032x}-{request_id}-01"),)

    def call_ended(
        self, request_id: str, name: str, seconds: float, outcome: str, values: Mapping[str, int | str]
    ) -> None:
        """Adds the span of a client's call with all its attempts."""
        with self._lock:
            trace, parent = self._calls.pop(request_id, (0, 0))
        self._add(name, trace, int(request_id, 16), parent, seconds, {**values, "outcome": outcome}, outcome == "ok")

    def answered(
        self,
        header: str,
        name: str,
        seconds: float,
        status: str,
        values: Mapping[str, int],
        stages: Mapping[str, float],
    ) -> None:
        """Adds the span of a shard's answer, with the seconds of each of its stages, which take turns."""
        if (found := _HEADER.fullmatch(header)) is None:
            return
        ids = int(found[1], 16), self._random.getrandbits(64), int(found[2], 16)
        spent = {f"stage.{stage}_seconds": round(own, 6) for stage, own in stages.items()}
        self._add(name, *ids, seconds, {**values, "status": status, **spent}, status == "OK", is_server=True)

    def step_ended(self, step: int) -> None:
        """Adds the span from the end of the step before to that of this one; the next one begins."""
        seconds = time.perf_counter() - self._step_began
        self._add(f"step {step}", *self._step, 0, seconds, {"step": step}, is_ok=True)
        self._begin_step()

    def _add(
        self,
        name: str,
        trace: int,
        span: int,
        parent: int,
        seconds: float,
        values: Mapping[str, int | float | str],
        is_ok: bool,
        *,
        is_server: bool = False,
    ) -> None:
        """A span that ends now."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span: int, *, is_remote: bool) -> SpanContext:
            return SpanContext(trace, span, is_remote, TraceFlags(TraceFlags.SAMPLED))

        if not trace:  # of a call that was forgotten
            return
        end = time.time_ns()
        self._processor.on_end(
            ReadableSpan(
                name,
                context(span, is_remote=False),
                context(parent, is_remote=is_server) if parent else None,
                self._resource,
                attributes=values,
                kind=SpanKind.SERVER if is_server else SpanKind.CLIENT if parent else SpanKind.INTERNAL,
                status=Status(StatusCode.OK if is_ok else StatusCode.ERROR),
                start_time=end - int(seconds * 1e9),
                end_time=end,
            )
        )


def spans(service: str) -> Spans | None:
    """This process's spans, sent in batches; None if nobody asks for them."""
    if service not in _opened:
        with _opening:  # or two threads would open two
            if service not in _opened:
                _opened[service] = _open(service)
    return _opened[service]


def _open(service: str) -> Spans | None:
    if not {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} & os.environ.keys():
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        advice = {"advice": install_advice("otel")}
        _log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but there are no spans: %(advice)s", advice)
        return None
    is_given = {"OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"} & os.environ.keys()
    exporter = OTLPSpanExporter(timeout=None if is_given else _SEND_SECONDS)
    found = Spans(BatchSpanProcessor(exporter), service)
    atexit.register(found.close)
    return found
