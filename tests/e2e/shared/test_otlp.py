"""Spans of a real cluster at a real OTLP/HTTP receiver: one trace from the client's span through the router to both workers."""

from tests.e2e.client import session
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.shared.otlp_receiver import OtlpReceiver, attributes_of

TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MESSAGES = [{"role": "user", "content": "k17 v42 k03 v91 k17"}]


async def _ask(url: str, traceparent: str) -> None:
    headers = {"traceparent": traceparent, "X-Request-Id": "spanned"}
    body = {"model": "recall", "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with session() as http, http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200


async def test_one_trace_through_router_and_both_workers(nixl: Cluster, receiver: OtlpReceiver) -> None:
    await _ask(nixl.router, f"00-{TRACE}-{CLIENT_SPAN}-00")  # not sampled: no span is exported
    await _ask(nixl.router, f"00-{TRACE}-{CLIENT_SPAN}-01")
    services = {"tandem-router", "tandem-prefill", "tandem-decode"}
    wait_until(lambda: receiver.of(TRACE).keys() == services, within_s=20, what=lambda: str(receiver.of(TRACE).keys()))
    await _ask(nixl.router, "junk")  # begins a trace of its own
    wait_until(lambda: len(receiver.traces_of("spanned")) == 2, within_s=20, what="another trace")
    spans = receiver.of(TRACE)
    roots = {service: [s for s in found if s.name.startswith("chat")] for service, found in spans.items()}
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
    said = attributes_of(decode.attributes)
    assert decode.name == "chat recall" and receiver.paths == {"/v1/traces"}
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "tandem"
    assert said["gen_ai.usage.output_tokens"] == 4 and said["gen_ai.usage.input_tokens"] > 4
    assert [value.string_value for value in said["gen_ai.response.finish_reasons"].values] == ["length"]
    assert said["tandem.request_id"] == "spanned" and said["gen_ai.response.time_to_first_chunk"] > 0
    rooms = {attributes_of(span.attributes)["tandem.bootstrap_room"] for span in (router, prefill, decode)}
    assert len(rooms) == 1
