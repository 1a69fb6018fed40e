"""A stand-in of an OpenTelemetry collector: keeps the spans that it gets over HTTP."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver:
    """What a collector receives. `spans`: each with its service's name."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.spans: list[tuple[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(self.path, ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, request: ExportTraceServiceRequest) -> None:
        self.paths.add(path)
        for resource in request.resource_spans:
            service = attributes_of(resource.resource.attributes)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> dict[str, list[Any]]:
        """The spans of one trace, by service."""
        found: dict[str, list[Any]] = {}
        for service, span in list(self.spans):
            if span.trace_id.hex() == trace_id:
                found.setdefault(service, []).append(span)
        return found

    def traces_of(self, request_id: str) -> set[str]:
        """The traces with a span of this request."""
        spans = [span for _, span in list(self.spans)]
        return {s.trace_id.hex() for s in spans if attributes_of(s.attributes).get("tandem.request_id") == request_id}


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
