"""Spans of a real cluster at a real OTLP/HTTP receiver: one trace from the client's span through the router to both workers."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.client import session
from tests.e2e.cluster import cluster, wait_until

TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MESSAGES = [{"role": "user", "content": "k17 v42 k03 v91 k17"}]


class Receiver:
    """What a collector is told. `spans`: each with its service's name."""

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

    def take(self, path: str, told: ExportTraceServiceRequest) -> None:
        self.paths.add(path)
        for resource in told.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> dict[str, list[Any]]:
        """The spans of one trace, by service."""
        found: dict[str, list[Any]] = {}
        for service, span in list(self.spans):
            if span.trace_id.hex() == trace_id:
                found.setdefault(service, []).append(span)
        return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()


async def _ask(url: str, traceparent: str) -> None:
    headers = {"traceparent": traceparent, "X-Request-Id": "spanned"}
    body = {"model": "recall", "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with session() as http, http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200


def test_one_trace_through_router_and_both_workers(tmp_path: Path, receiver: Receiver, monkeypatch: Any) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms until a batch is sent
    flags = ("--transfer-backend", "nixl", "--otlp-traces-endpoint", receiver.url, "--max-total-tokens", "4096")
    with cluster(tmp_path, *flags) as c:
        asyncio.run(_ask(c.router, f"00-{TRACE}-{CLIENT_SPAN}-00"))  # not sampled: no span is exported
        asyncio.run(_ask(c.router, f"00-{TRACE}-{CLIENT_SPAN}-01"))
        services = {"tandem-router", "tandem-prefill", "tandem-decode"}
        wait_until(
            lambda: receiver.of(TRACE).keys() == services, within_s=20, what=lambda: str(receiver.of(TRACE).keys())
        )
        asyncio.run(_ask(c.router, "junk"))  # begins a trace of its own
        wait_until(lambda: len({s.trace_id for _, s in list(receiver.spans)}) == 2, within_s=20, what="another trace")
    spans = receiver.of(TRACE)
    roots = {service: [s for s in told if s.name.startswith("chat")] for service, told in spans.items()}
    (router,), (prefill,), (decode,) = (roots[f"tandem-{name}"] for name in ("router", "prefill", "decode"))
    assert router.parent_span_id.hex() == CLIENT_SPAN
    assert prefill.parent_span_id == decode.parent_span_id == router.span_id
    inside = {
        "tandem-router": (router, {"prefill leg", "decode leg", "answer"}),
        "tandem-prefill": (prefill, {"bootstrap", "queue", "prefill", "chunk", "transfer"}),
        "tandem-decode": (decode, {"bootstrap", "transfer_queue", "decode"}),
    }
    for service, (root, names) in inside.items():
        stages = [span for span in spans[service] if span is not root]
        assert {span.name for span in stages} == names
        assert all(span.parent_span_id == root.span_id for span in stages)
        assert all(0 < span.start_time_unix_nano <= span.end_time_unix_nano for span in stages)
    said = _attributes(decode.attributes)
    assert decode.name == "chat recall" and receiver.paths == {"/v1/traces"}
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "tandem"
    assert said["gen_ai.usage.output_tokens"] == 4 and said["gen_ai.usage.input_tokens"] > 4
    assert [value.string_value for value in said["gen_ai.response.finish_reasons"].values] == ["length"]
    assert said["tandem.request_id"] == "spanned" and said["gen_ai.response.time_to_first_chunk"] > 0
    rooms = {_attributes(span.attributes)["tandem.bootstrap_room"] for span in (router, prefill, decode)}
    assert len(rooms) == 1
