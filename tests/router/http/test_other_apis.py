"""Anthropic's and Ollama's APIs through the router: their streams, their errors, what one worker answers for all."""

import json
from typing import Any

import pytest
from aiohttp import web

from service.security.keys import bearer
from tests.router.behaviours import hang
from tests.router.dummies import Behaviour, DummyWorker, always, cluster, until

MESSAGES, COUNT, CHAT, GENERATE = "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"
USER = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {**USER, "max_tokens": 3},
    CHAT: USER,
    GENERATE: {"model": "m", "prompt": "hi"},
}
TYPES = {MESSAGES: "text/event-stream", CHAT: "application/x-ndjson", GENERATE: "application/x-ndjson"}
PIECES = {
    MESSAGES: [b'event: ping\ndata: {"type":', b' "ping"}\n', b'\nevent: x\ndata: {"type": "x"}\n\n', b"event: cut"],
    CHAT: [b'{"i"', b': 0}\n{"i": 1}\n{"', b'i": 2}\n', b'{"cut'],
}
PIECES[GENERATE] = PIECES[CHAT]


def streams(path: str, *, dies: bool) -> Behaviour:
    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": TYPES[path]})
        await out.prepare(request)
        for piece in PIECES[path]:
            await out.write(piece)
        if dies:
            assert request.transport is not None
            request.transport.abort()
        return out

    return behave


def error_of(path: str, event: bytes) -> dict[str, Any]:
    """The one error in `event`, in the shape of its API."""
    head = b"event: error\ndata: " if path == MESSAGES else b""
    assert event.startswith(head) and event.endswith(b"\n\n" if path == MESSAGES else b"\n") and event.count(b"{") >= 1
    return in_shape(path, event[len(head) :])


def in_shape(path: str, body: bytes) -> dict[str, Any]:
    """{"type", "message"} of an error of that path; Ollama's has no type."""
    error = json.loads(body)
    if path.startswith("/api/"):
        assert set(error) <= {"error", "code"}
        return {"type": None, "message": error["error"]}
    assert (
        set(error) == {"type", "error"}
        and error["type"] == "error"
        and set(error["error"]) <= {"type", "message", "code"}
    )
    return dict(error["error"])


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_stream_passes_as_it_is_and_prefill_streams_nothing(path: str) -> None:
    async with cluster(decode=[streams(path, dies=False)]) as c:
        status, headers, answer = await c.post(path, {**BODIES[path], "stream": True})
        assert status == 200 and headers["Content-Type"] == TYPES[path] and answer == b"".join(PIECES[path])
        (prefill,), (decode,) = c.prefills[0].seen, c.decodes[0].seen
        assert prefill.path == decode.path == path and prefill.body["stream"] is False and decode.body["stream"] is True
        assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_worker_that_dies_leaves_whole_events_and_one_error_in_the_shape_of_the_api(path: str) -> None:
    async with cluster(decode=[streams(path, dies=True)], prefill=[hang]) as c:
        body = (
            BODIES[path] if path != MESSAGES else {**BODIES[path], "stream": True}
        )  # Ollama streams unless told not to
        status, _, answer = await c.post(path, body)
        whole = b"".join(PIECES[path][:-1])
        assert status == 200 and answer.startswith(whole)
        assert "decode worker" in error_of(path, answer.removeprefix(whole))["message"]
        await until(lambda: c.prefills[0].cancelled == 1)


@pytest.mark.parametrize("path", BODIES)
async def test_what_the_router_refuses_has_the_shape_of_the_api(path: str) -> None:
    async with cluster(
        api_key="key", max_body_bytes=4096, rate_limit_requests_per_second=0.001, rate_limit_burst=4
    ) as c:
        refused = [await c.post(path, BODIES[path])]
        refused += [await c.post(path, body, headers=bearer("key")) for body in (b"{", {"prompt": "x" * 5000})]
        refused.append(await c.post(path, BODIES[path], headers={**bearer("key"), "Content-Type": "text/plain"}))
        async with c.client.get(c.url + path, headers=bearer("key")) as response:
            refused.append((response.status, {}, await response.read()))
        await c.decodes[0].stop()
        await until(lambda: c.router.table.workers()[1].health.value == "down")
        refused += [await c.post(path, BODIES[path], headers=bearer("key")) for _ in range(2)]
        assert [status for status, _, _ in refused] == [401, 400, 413, 415, 405, 503, 429]
        kinds = [in_shape(path, body)["type"] for _, _, body in refused]
        if path == MESSAGES:
            invalid = "invalid_request_error"
            assert kinds == [
                *("authentication_error", invalid, "request_too_large", invalid, invalid),
                *("overloaded_error", "rate_limit_error"),
            ]


async def test_an_unknown_model_is_a_404_in_the_shape_of_the_api() -> None:
    async with cluster(unified=2) as c:
        for worker in c.decodes:
            worker.info["served_model_name"] = worker.name
        c.router.monitor.refresh()
        await until(lambda: c.router.table.models.several)
        for path, body in BODIES.items():
            status, _, answer = await c.post(path, {**body, "model": "other"})
            assert status == 404 and "'other' is not served here" in in_shape(path, answer)["message"]
        await c.post(CHAT, {**USER, "model": "null-1:latest", "stream": False})
        assert [len(w.seen) for w in c.decodes] == [0, 1]


@pytest.mark.parametrize("path", [*BODIES, COUNT])
async def test_a_key_in_x_api_key_opens_and_goes_on(path: str) -> None:
    async with cluster(api_key="key", unified=1) as c:
        body = {**BODIES.get(path, USER), "stream": False}
        assert (await c.post(path, body, headers={"x-api-key": "wrong"}))[0] == 401
        status, _, _ = await c.post(path, body, headers={"x-api-key": "key", "anthropic-version": "2023-06-01"})
        assert status == 200 and c.decodes[0].seen[-1].headers["authorization"] == "Bearer key"
        assert "x-api-key" not in c.decodes[0].seen[-1].headers


async def test_one_worker_counts_tokens_for_all() -> None:
    async with cluster(prefill=[always(200, {"input_tokens": 7})], decode=[always(200, {"input_tokens": 7})] * 2) as c:
        status, _, answer = await c.post(COUNT, USER)
        assert status == 200 and json.loads(answer) == {"input_tokens": 7}
        assert sum(len(w.seen) for w in (*c.prefills, *c.decodes)) == 1
        c.decodes[0].behave = c.decodes[1].behave = c.prefills[0].behave = always(400, {"type": "error", "error": {}})
        assert (await c.post(COUNT, {"messages": 5}))[0] == 400


async def test_one_worker_describes_a_model_and_several_models_are_joined() -> None:
    async with cluster(unified=2) as c:
        assert (await c.get("/api/tags"))[1] == {"models": [{"name": "null-0"}]}
        assert (await c.get("/api/version"))[1] == {"version": "null-0"}
        for worker in c.decodes:
            worker.info["served_model_name"] = worker.name
        c.router.monitor.refresh()
        await until(lambda: c.router.table.models.several)
        for path in ("/api/tags", "/api/ps"):
            assert (await c.get(path))[1] == {"models": [{"name": "null-0"}, {"name": "null-1"}]}
        for body in ({"model": "null-1:latest"}, {"name": "null-1"}):
            assert (await c.post("/api/show", body))[0] == 200
        assert [len(w.seen) for w in c.decodes] == [0, 2]
        status, _, answer = await c.post("/api/show", {"model": "other"})
        assert status == 404 and "not served here" in in_shape("/api/show", answer)["message"]


async def test_metrics_name_the_paths() -> None:
    async with cluster() as c:
        for path, body in BODIES.items():
            await c.post(path, {**body, "stream": False})
        lines = await c.metrics()
        for path in BODIES:
            assert f'tandem_router_requests_total{{path="{path}",status="200"}} 1.0' in lines
