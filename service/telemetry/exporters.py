"""Request records for other tools: OpenTelemetry spans, and Chrome trace events for Perfetto."""

import logging
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from service.extras import missing
from service.flags import ConfigError
from service.telemetry.context import Exporter, Record, Span, TraceParent

# ---- OpenTelemetry

DEFAULT_ENDPOINT = "http://localhost:4318"
PATH = "/v1/traces"
PROVIDER = "tandem"
CLOSE_S = 1.0


def endpoint_of(*, enable: bool, endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """The collector's URL by flags or OTEL_* variables. Raises ConfigError."""
    if not enable and endpoint is None:
        return None
    if endpoint is None and (whole := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return whole
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint: {base!r} is no OTLP/HTTP address; give http://HOST:4318 (gRPC is not spoken)"
        )
    return base if parts.path.strip("/") else base.rstrip("/") + PATH


def open_exporter(*, enable: bool, endpoint: str | None, process: str) -> Exporter:
    """Open an exporter. Raises ConfigError, also without the extra."""
    url = endpoint_of(enable=enable, endpoint=endpoint, environ=os.environ)
    return Exporter() if url is None else OtlpExporter(url, process=process)


class OtlpExporter(Exporter):
    """Exporter to an OpenTelemetry collector (OTLP over HTTP), as service.name tandem-PROCESS.

    By the gen_ai conventions: https://github.com/open-telemetry/semantic-conventions-genai (status:
    development). Needs the extra `otel`. A thread sends batches; spans are dropped while the
    collector is away.
    """

    exports = True

    def __init__(self, url: str, *, process: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint: {missing([error.name or 'opentelemetry'], 'otel')}") from None
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # warns at each try while the collector is away
        self._trace = trace
        self._span_class = ReadableSpan
        service = os.environ.get("OTEL_SERVICE_NAME") or f"{PROVIDER}-{process}"
        self._resource = Resource.create({"service.name": service, "service.namespace": PROVIDER})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))

    def export(self, record: Record, *, at: TraceParent, parent: TraceParent | None) -> None:
        kind = self._trace.SpanKind.SERVER
        name = f"{record.operation} {record.model}".strip()
        attributes = {**_attributes(record), **record.attributes}
        whole = Span(name=name, start_s=record.start_s, end_s=record.end_s, attributes=attributes)
        self._send(whole, at=at, parent=parent, kind=kind, error=record.error)
        for span in record.spans:
            inside = TraceParent(at.trace_id, secrets.randbits(64) or 1)
            self._send(span, at=inside, parent=at, kind=self._trace.SpanKind.INTERNAL)

    def _send(self, span: Span, *, at: TraceParent, parent: TraceParent | None, kind: Any, error: str = "") -> None:
        code = self._trace.StatusCode.ERROR if error else self._trace.StatusCode.UNSET
        self._processor.on_end(
            self._span_class(
                name=span.name,
                context=self._context(at, remote=False),
                parent=None if parent is None else self._context(parent, remote=True),
                resource=self._resource,
                attributes=span.attributes,
                kind=kind,
                status=self._trace.Status(code, error or None),
                start_time=round(span.start_s * 1e9),
                end_time=round(max(span.end_s, span.start_s) * 1e9),
            )
        )

    def _context(self, at: TraceParent, *, remote: bool) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(at.trace_id, at.span_id, is_remote=remote, trace_flags=flags)

    def close(self) -> None:
        """Send the rest, within `CLOSE_S`."""
        flush = threading.Thread(target=self._processor.shutdown, name="otlp-close", daemon=True)
        flush.start()
        flush.join(CLOSE_S)


def _attributes(record: Record) -> dict[str, Any]:
    named = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model,
        "error.type": record.error,
        "tandem.request_id": record.request_id,
        "tandem.role": record.process,
    }
    return {name: value for name, value in named.items() if value}


# ---- Chrome's trace event format

_ORDER = {"router": 0, "prefill": 1, "decode": 2}
Lane = list[Span]


def trace_file(records: Sequence[Record]) -> dict[str, Any]:
    """Chrome's trace event format, for https://ui.perfetto.dev, in microseconds from the first
    start.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Workers and
    routers are processes, requests threads, overlapping stages further ones. Arrows lead from a
    router's call to the worker.
    """
    origin_s = min((record.start_s for record in records), default=0.0)
    spans = [(r.request_id, span) for r in records if r.process == "router" for span in r.spans]
    calls = {(rid, span.attributes["url.full"]): span for rid, span in spans if "url.full" in span.attributes}
    drawing = _Drawing(origin_s)
    for record in sorted(records, key=lambda r: (_ORDER.get(r.process, 3), r.url, r.start_s)):
        call = calls.get((record.request_id, record.url)) if record.url else None
        drawing.draw(record, call)
    return {
        "traceEvents": drawing.events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_unix_s": origin_s, "requests": len({record.request_id for record in records})},
    }


class _Drawing:
    def __init__(self, origin_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._origin_s = origin_s
        self._pids: dict[str, int] = {}
        self._tids = count(1)
        self._flows: dict[tuple[str, str], int] = {}
        self._flow_ids = count(1)

    def draw(self, record: Record, call: Span | None) -> None:
        pid, shift_s = self._pid_of(record), clock_shift_s(record, call)
        root = Span(
            name=f"{record.operation} {record.model}".strip() or record.process,
            start_s=record.start_s,
            end_s=record.end_s,
            attributes={"request_id": record.request_id, **_root_arguments(record, shift_s)},
        )
        for i, lane in enumerate(lanes_of([root, *record.spans])):
            tid = next(self._tids)
            name = record.request_id if i == 0 else f"{record.request_id} ({i + 1})"
            self._meta("thread_name", {"name": name}, pid=pid, tid=tid)
            self._meta("thread_sort_index", {"sort_index": tid}, pid=pid, tid=tid)
            for span in lane:
                self._slice(span, pid=pid, tid=tid, shift_s=shift_s)
                if record.process == "router" and "url.full" in span.attributes:
                    self._flow("s", (record.request_id, span.attributes["url.full"]), span.start_s, pid=pid, tid=tid)
            if i == 0 and call is not None:
                self._flow("f", (record.request_id, record.url), root.start_s + shift_s, pid=pid, tid=tid)

    def _pid_of(self, record: Record) -> int:
        name = f"{record.process} {record.url}".strip()
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            self._meta("process_name", {"name": name}, pid=pid, tid=0)
            self._meta("process_sort_index", {"sort_index": pid}, pid=pid, tid=0)
        return self._pids[name]

    def _meta(self, name: str, args: dict[str, Any], *, pid: int, tid: int) -> None:
        self.events.append({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})

    def _slice(self, span: Span, *, pid: int, tid: int, shift_s: float) -> None:
        self.events.append(
            {
                "name": span.name,
                "cat": "request",
                "ph": "X",
                "ts": self._us(span.start_s + shift_s),
                "dur": round(max(0.0, span.end_s - span.start_s) * 1e6, 3),
                "pid": pid,
                "tid": tid,
                "args": span.attributes,
            }
        )

    def _flow(self, phase: str, key: tuple[str, str], at_s: float, *, pid: int, tid: int) -> None:
        if phase == "s":
            self._flows[key] = next(self._flow_ids)
        if key not in self._flows:
            return
        ends = {"bp": "e"} if phase == "f" else {}
        event = {"name": "leg", "cat": "request", "ph": phase, "id": self._flows[key], "ts": self._us(at_s), **ends}
        self.events.append({**event, "pid": pid, "tid": tid})

    def _us(self, at_s: float) -> float:
        return round((at_s - self._origin_s) * 1e6, 3)


def clock_shift_s(record: Record, call: Span | None) -> float:
    if call is None or call.start_s <= record.start_s <= call.end_s:
        return 0.0
    return call.start_s - record.start_s


def _root_arguments(record: Record, shift_s: float) -> dict[str, Any]:
    error = {"error": record.error} if record.error else {}
    shift = {"clock_shift_us": round(shift_s * 1e6, 3)} if shift_s else {}
    return {**record.attributes, **error, **shift}


def lanes_of(spans: Iterable[Span]) -> list[Lane]:
    """Assign spans to rows where any two nest or are disjoint, first fit."""
    lanes: list[Lane] = []
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        lane = next((lane for lane in lanes if all(_nests(other, span) for other in lane)), None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _nests(earlier: Span, later: Span) -> bool:
    return later.start_s >= earlier.end_s or later.end_s <= earlier.end_s
