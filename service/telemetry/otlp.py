"""Export to an OpenTelemetry collector (OTLP over HTTP) by the gen_ai conventions.

https://github.com/open-telemetry/semantic-conventions-genai (status: development). Needs the extra
`otel`. A thread sends batches; spans are dropped while the collector is away.
"""

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from service.flags import ConfigError
from service.telemetry.context import TraceParent
from service.telemetry.records import Exporter, Record, Span

DEFAULT_ENDPOINT = "http://localhost:4318"
PATH = "/v1/traces"
PROVIDER = "tandem"
CLOSE_S = 1.0


def endpoint_of(*, enable: bool, endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the collector's URL by flags or OTEL_* variables. Raises ConfigError."""
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
    """Exporter to a collector, under the service.name tandem-PROCESS."""

    exports = True

    def __init__(self, url: str, *, process: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint: {error.name or 'opentelemetry'} is missing; pip install 'tandem-serve[otel]'"
            ) from None
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
