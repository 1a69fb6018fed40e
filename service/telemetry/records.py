"""A process's records of requests by stage, and a ring of recent ones."""

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

from service.telemetry.context import TraceParent, parse_traceparent


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
    """Return an error as "field: why"."""
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

    @property
    def exports(self) -> bool:
        return self._exporter.exports

    def span_under(self, traceparent: str) -> "SpanContext | None":
        """Return a new record's span, if exported."""
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
    """A record's span; `parent` is None for a root."""

    at: TraceParent
    parent: TraceParent | None


def unix_offset_s() -> float:
    return time.time() - time.monotonic()
