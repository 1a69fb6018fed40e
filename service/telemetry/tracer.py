"""A process's records: the ring of `tandem trace`, and the collector."""

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from service.telemetry.context import TraceParent, parse_traceparent
from service.telemetry.records import Exporter, Record, Ring

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
