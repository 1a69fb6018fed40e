"""Id and trace of the current task's request; spans, and their export.

W3C `traceparent` (https://www.w3.org/TR/trace-context/): 00-TRACE(32 hex)-SPAN(16 hex)-FLAGS.
"""

import itertools
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

MAX_REQUEST_ID_CHARS = 256
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """`sampled`: the root requests recording."""

    trace_id: int
    span_id: int
    sampled: bool = True

    def header(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(header: str) -> TraceParent | None:
    """An invalid header starts the trace here (standard)."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or header.startswith("ff"):
        return None
    trace_id, span_id = int(match[1], 16), int(match[2], 16)
    return TraceParent(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED)) if trace_id and span_id else None


def request_id_of(header: str) -> str:
    """The id if short, printable ASCII, else ""."""
    return header if len(header) <= MAX_REQUEST_ID_CHARS and header.isascii() and header.isprintable() else ""


class TraceContext(msgspec.Struct, frozen=True):
    """The current request. `operation` is gen_ai.operation.name, empty if not a generation."""

    request_id: str
    operation: str = ""
    traceparent: str = ""


NO_TRACE = TraceContext("")
CURRENT: ContextVar[TraceContext] = ContextVar("request", default=NO_TRACE)

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/encode": "embeddings",
    "/v1/score": "text_completion",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "rerank",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}


# ---- log lines

FORMATS = ("text", "json")
_ABOUT = "about"
_OURS = "tandem"  # marks the handler of `set_up_logging`


def set_up_logging(*, level: str, format: str, process: str) -> None:
    """Log to stderr; a second call replaces the first."""
    handler = logging.StreamHandler()
    if format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s"))
    for before in [h for h in logging.root.handlers if getattr(h, _OURS, False)]:
        logging.root.removeHandler(before)
    setattr(handler, _OURS, True)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # else junk fills logs with tracebacks


def about(**fields: str | int | float) -> dict[str, dict[str, str | int | float]]:
    return {_ABOUT: {name: value for name, value in fields.items() if value not in ("", None)}}


class JsonFormatter(logging.Formatter):
    """Log lines as text or JSON, with the request id of the task or `extra=about(...)`.

    {"time": "2026-11-21T07:00:00.123Z", "level": "INFO", "process": "prefill scheduler", ...
     "request_id": "...", "rid": "...", "room": 7, "error": "Traceback ..."}
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := CURRENT.get().request_id:
            line["request_id"] = request_id
        line |= getattr(record, _ABOUT, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


# ---- A process's records of requests by stage, and a ring of recent ones.


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage, in Unix seconds."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process's part of a request. `process`: "router" | "prefill" | "decode" | "unified"."""

    request_id: str
    process: str
    operation: str
    start_s: float
    end_s: float
    model: str = ""
    error: str = ""
    url: str = ""
    attributes: dict[str, Any] = {}
    spans: list[Span] = []


class Records(msgspec.Struct, frozen=True, kw_only=True):
    records: list[Record]


MAX_ASKED = 1024


class TracesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A query for the records of `ids`, or of the `last` requests."""

    ids: list[str] | None = None
    last: int | None = None


def query_error(query: TracesQuery) -> str | None:
    """An error as "field: why"."""
    if (query.ids is None) == (query.last is None):
        return "ids: give either ids or last"
    if query.last is not None and not 1 <= query.last <= MAX_ASKED:
        return f"last: must be 1 to {MAX_ASKED}, got {query.last}"
    if query.ids is not None and not 1 <= len(query.ids) <= MAX_ASKED:
        return f"ids: must be 1 to {MAX_ASKED} ids, got {len(query.ids)}"
    return None


def last_ids(records: list[Record], count: int) -> list[str]:
    latest_first = sorted(records, key=lambda record: record.end_s, reverse=True)
    return list(dict.fromkeys(record.request_id for record in latest_first))[:count]


class Ring:
    """The last `size` records, created when read."""

    def __init__(self, size: int) -> None:
        self._kept: deque[tuple[str, Callable[[], Record]]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, make: Callable[[], Record]) -> None:
        self._kept.append((request_id, make))

    def find(self, query: TracesQuery) -> list[Record]:
        if query.ids is not None:
            return self._of(frozenset(query.ids))
        latest_first = dict.fromkeys(request_id for request_id, _ in reversed(self._kept))
        return self._of(frozenset(itertools.islice(latest_first, query.last)))

    def _of(self, ids: Collection[str]) -> list[Record]:
        return [make() for request_id, make in self._kept if request_id in ids]


class Exporter:
    """Base class, discards records (see exporters.py)."""

    exports = False

    def export(self, record: Record, *, at: TraceParent, parent: TraceParent | None) -> None:
        """Export a record as span `at` below `parent`."""

    def close(self) -> None: ...


# ---- A process's records: the ring of `tandem trace`, and the collector.

RING_SIZE = 512  # ended requests for `tandem trace`: some MB


class Tracer:
    """Records requests, retaining `ring_size`."""

    def __init__(self, *, ring_size: int = RING_SIZE, exporter: Exporter | None = None) -> None:
        self.ring = Ring(ring_size)
        self._exporter = exporter or Exporter()

    def span_under(self, traceparent: str) -> "SpanContext | None":
        """A new record's span, if exported."""
        if not self._exporter.exports:
            return None
        parent = parse_traceparent(traceparent)
        if parent is not None and not parent.sampled:
            return None
        trace_id = secrets.randbits(128) or 1 if parent is None else parent.trace_id
        return SpanContext(TraceParent(trace_id, secrets.randbits(64) or 1), parent)

    def add(self, request_id: str, make: Callable[[], Record], *, span: "SpanContext | None" = None) -> None:
        self.ring.add(request_id, make)
        if span is not None:
            self._exporter.export(make(), at=span.at, parent=span.parent)

    def close(self) -> None:
        self._exporter.close()


class SpanContext(NamedTuple):
    """`parent` is None for a root."""

    at: TraceParent
    parent: TraceParent | None


def unix_offset_s() -> float:
    return time.time() - time.monotonic()
