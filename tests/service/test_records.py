"""Records, the ring, their picture for Perfetto, trace headers and log lines: literals only."""

import json
import logging
import sys
from typing import Any

import pytest

from service.flags import ConfigError
from service.telemetry.context import (
    CURRENT,
    JsonFormatter,
    Record,
    Ring,
    Span,
    TraceContext,
    TraceParent,
    Tracer,
    TracesQuery,
    about,
    last_ids,
    parse_traceparent,
    query_error,
)
from service.telemetry.exporters import clock_shift_s, endpoint_of, lanes_of, trace_file

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def record(request_id: str, *, process: str = "router", start_s: float = 0.0, **fields: Any) -> Record:
    whole = {"operation": "chat", "end_s": start_s + 1.0, **fields}
    return Record(request_id=request_id, process=process, start_s=start_s, **whole)


def test_the_ring_keeps_the_last_and_makes_records_when_asked() -> None:
    made: list[str] = []

    def make(request_id: str) -> Record:
        made.append(request_id)
        return record(request_id)

    ring = Ring(3)
    for name in ("a", "b", "b", "c"):  # b: a request of two samples
        ring.add(name, lambda name=name: make(name))  # type: ignore[misc]
    assert made == [] and len(ring) == 3
    assert [r.request_id for r in ring.find(TracesQuery(ids=["b", "a"]))] == ["b", "b"]
    assert [r.request_id for r in ring.find(TracesQuery(last=1))] == ["c"]
    assert [r.request_id for r in ring.find(TracesQuery(last=2))] == ["b", "b", "c"]


@pytest.mark.parametrize(
    ("query", "wrong"),
    [
        (TracesQuery(), "ids: give either"),
        (TracesQuery(ids=["a"], last=1), "ids: give either"),
        (TracesQuery(last=0), "last: must be 1 to 1024, got 0"),
        (TracesQuery(ids=[]), "ids: must be 1 to 1024"),
        (TracesQuery(last=7), None),
    ],
)
def test_queries(query: TracesQuery, wrong: str | None) -> None:
    said = query_error(query)
    assert said is None if wrong is None else said is not None and said.startswith(wrong)


def test_the_last_requests_are_those_that_ended_last() -> None:
    records = [record("slow", end_s=9.0), record("a", start_s=1.0), record("b", start_s=2.0)]
    assert last_ids(records, 2) == ["slow", "b"]


@pytest.mark.parametrize(
    ("header", "place"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceParent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-00", TraceParent(int(TRACE, 16), int(SPAN, 16), False)),
        (f"cc-{TRACE}-{SPAN}-01-what-will-be", TraceParent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
        ("junk", None),
    ],
)
def test_traceparent(header: str, place: TraceParent | None) -> None:
    assert parse_traceparent(header) == place
    if place is not None and header.startswith("00"):
        assert place.header() == header


def test_without_a_collector_no_ids_are_made() -> None:
    assert Tracer(ring_size=1).span_under(f"00-{TRACE}-{SPAN}-01") is None


def test_where_spans_go() -> None:
    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}
    assert endpoint_of(enable=False, endpoint=None, environ=where) is None
    assert endpoint_of(enable=False, endpoint="http://h:4318", environ=where) == "http://h:4318/v1/traces"
    assert endpoint_of(enable=True, endpoint="https://h/own/path", environ=where) == "https://h/own/path"
    assert endpoint_of(enable=True, endpoint=None, environ=where) == "http://t/x"
    assert endpoint_of(enable=True, endpoint=None, environ={}) == "http://localhost:4318/v1/traces"
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: 'localhost:4317' is no OTLP/HTTP address"):
        endpoint_of(enable=True, endpoint="localhost:4317", environ={})


def span(name: str, start_s: float, end_s: float, **attributes: Any) -> Span:
    return Span(name=name, start_s=start_s, end_s=end_s, attributes=attributes)


def test_overlapping_stages_lie_in_lanes_of_their_own() -> None:
    spans = [span("whole", 0, 9), span("prefill", 1, 5), span("chunk", 1, 3), span("chunk", 2, 4), span("decode", 5, 9)]
    lanes = [[s.name for s in lane] for lane in lanes_of(spans)]
    assert lanes == [["whole", "prefill", "chunk", "decode"], ["chunk"]]


def test_a_worker_s_part_begins_where_it_was_sent() -> None:
    leg = span("decode leg", 10.0, 12.0)
    assert clock_shift_s(record("a", start_s=10.5), leg) == 0.0
    assert clock_shift_s(record("a", start_s=3.0), leg) == 7.0  # a clock that is 7 s behind
    assert clock_shift_s(record("a", start_s=50.0), leg) == -40.0
    assert clock_shift_s(record("a", start_s=50.0), None) == 0.0


def test_the_picture() -> None:
    url = "http://d"
    router = record("a", start_s=100.0, spans=[span("decode leg", 100.1, 100.9, **{"url.full": url})])
    worker = record(
        "a", process="decode", start_s=50.0, url=url, model="m", spans=[span("decode", 50.2, 50.4)], error="500"
    )
    file = trace_file([worker, router])
    names = {e["args"]["name"]: e["pid"] for e in file["traceEvents"] if e["name"] == "process_name"}
    assert names == {"router": 1, "decode http://d": 2}
    slices = {e["name"]: e for e in file["traceEvents"] if e["ph"] == "X"}
    assert slices["chat"]["ts"] == 50e6 and slices["chat m"]["ts"] == 50.1e6  # the worker's clock is 50.1 s behind
    assert slices["chat m"]["args"] | {"error": "500", "clock_shift_us": 50.1e6} == slices["chat m"]["args"]
    assert slices["decode"]["dur"] == 200_000.0
    arrows = [(e["ph"], e["id"], e["pid"], e["ts"]) for e in file["traceEvents"] if e["name"] == "leg"]
    assert arrows == [("s", 1, 1, 50.1e6), ("f", 1, 2, 50.1e6)]
    assert trace_file([])["traceEvents"] == []


def test_a_log_line_says_which_request_it_is_about() -> None:
    formatter = JsonFormatter("decode")

    def line(text: str, *args: Any, **fields: Any) -> dict[str, Any]:
        made = logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, text, args, None, extra=about(**fields))
        shown = formatter.format(made)
        assert "\n" not in shown
        return json.loads(shown)  # type: ignore[no-any-return]

    said = line("two\nlines of %s", "é", rid="r", room=0, request_id="")
    assert said["message"] == "two\nlines of é" and said["level"] == "WARNING" and said["process"] == "decode"
    assert said["rid"] == "r" and said["room"] == 0 and "request_id" not in said and said["time"].endswith("Z")
    token = CURRENT.set(TraceContext("mine"))
    try:
        assert line("x")["request_id"] == "mine"
        assert line("x", request_id="other")["request_id"] == "other"
    finally:
        CURRENT.reset(token)


def test_a_traceback_is_a_part_of_its_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        made = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "bad", (), sys.exc_info())
    assert "ValueError: why" in json.loads(JsonFormatter("p").format(made))["error"]
