"""/v1/responses at the router: what workers receive, what is stored, for which key, and in which of several processes."""

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.body import Api, parse_body
from router.choice.prefix_index import keyed_prompt
from router.requests.answer import StreamSplitter
from router.requests.responses import response_in
from tests.router.dummies import Cluster, DummyWorker, begin_stream, cluster, key_file, until
from tests.router.test_fleet import Fleet, fleet

PATH = "/v1/responses"


def message(id: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{id[5:]}_0", "role": "assistant", "status": "completed", "content": content}


def response_to(body: dict[str, Any], id: str, **more: Any) -> dict[str, Any]:
    """Says what it was sent."""
    shown = {"id": id, "object": "response", "status": "completed", "store": body.get("store") is not False}
    previous = body.get("previous_response_id")
    return {**shown, "previous_response_id": previous, "output": [message(id, f"to {body['input']}")], **more}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


async def respond(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    id = f"resp_{secrets.token_hex(8)}"
    if not body.get("stream"):
        return web.json_response(response_to(body, id))
    out = await begin_stream(request, event("response.created", response=response_to(body, id, status="in_progress")))
    last = event("response.completed", response=response_to(body, id))
    for at in range(0, len(last), 40):  # an event in pieces
        await out.write(last[at : at + 40])
    await out.write_eof()
    return out


async def respond_until_aborted(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response(response_to(body, "resp_prefill"))
    id = body.get("id") or f"resp_{secrets.token_hex(8)}"
    out = await begin_stream(request, event("response.created", response=response_to(body, id)))
    aborted = ("/abort_request", json.dumps({"rid": id}, separators=(",", ":")))
    await until(lambda: aborted in worker.calls)
    await out.write(event("response.incomplete", response=response_to(body, id, status="cancelled")))
    await out.write_eof()
    return out


async def breaks_off(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response(response_to(body, "resp_prefill"))
    out = await begin_stream(request, event("response.created", response=response_to(body, "resp_1")))
    assert request.transport is not None
    request.transport.abort()
    return out


def answering(c: Cluster | Fleet, behave: Any = respond) -> None:
    for worker in (*c.prefills, *c.decodes):
        worker.behave, worker.seen = behave, []


async def ask(c: Cluster, input: Any, *, key: str = "", **more: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, _, data = await c.post(PATH, {"input": input, **more}, headers=headers)
    assert status == 200, data
    if not more.get("stream"):
        return json.loads(data)  # type: ignore[no-any-return]
    return json.loads(data.decode().strip().split("\n")[-1].removeprefix("data: "))["response"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", [{}, {"unified": 1}], ids=["pd", "unified"])
async def test_both_workers_receive_the_conversation(mode: dict[str, int], stream: bool) -> None:
    async with cluster(**mode) as c:
        answering(c)
        first = await ask(c, "one", stream=stream, instructions="I")
        second = await ask(c, [{"role": "user", "content": "two"}], stream=stream, previous_response_id=first["id"])
        third = await ask(c, "three", stream=stream, previous_response_id=second["id"])
        assert third["previous_response_id"] == second["id"] and third["store"]
        for worker in (*c.prefills, *c.decodes):
            bodies = [seen.body for seen in worker.seen]
            assert [body["input"] for body in bodies] == ["one", [{"role": "user", "content": "two"}], "three"]
            assert bodies[0]["history"] == [] and bodies[0]["instructions"] == "I"
            assert [body.get("first_response_id") for body in bodies] == [None, first["id"], first["id"]]
            roles = [(item["role"], item["content"]) for item in bodies[2]["history"]]
            assert [role for role, _ in roles] == ["user", "assistant", "user", "assistant"]
            assert roles[0][1] == "one" and roles[2][1] == "two" and bodies[2]["history"][1] == first["output"][0]
        status, read = await c.get(f"{PATH}/{second['id']}")
        assert status == 200 and read == second


async def test_a_body_that_neither_continues_nor_stores_passes_as_it_is() -> None:
    body = b'{ "input" : "one",  "store": false, "x": 1 }'
    async with cluster(unified=1) as c:
        answering(c)
        received = []

        async def keep(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            received.append(await request.read())
            return web.json_response(response_to(body, "resp_1"))

        answering(c, keep)
        assert (await c.post(PATH, body))[0] == 200 and received == [body]
        assert (await c.get(f"{PATH}/resp_1"))[0] == 404


async def test_an_answer_that_is_not_stored_may_continue_one_that_is() -> None:
    async with cluster() as c:
        answering(c)
        first = await ask(c, "one")
        second = await ask(c, "two", previous_response_id=first["id"], store=False)
        assert [item["role"] for item in c.decodes[0].seen[-1].body["history"]] == ["user", "assistant"]
        assert second["store"] is False and (await c.get(f"{PATH}/{second['id']}"))[0] == 404


async def test_a_key_finds_only_its_own() -> None:
    async with cluster(unified=1) as c:  # without keys of its own: workers may have some
        answering(c)
        first = await ask(c, "one", key="alice")
        for headers in ({"Authorization": "Bearer bob"}, {}, {"x-api-key": "bob"}):
            assert (await c.get(f"{PATH}/{first['id']}", **headers))[0] == 404
            assert (await c.get(f"{PATH}/{first['id']}/input_items", **headers))[0] == 404
            body = {"input": "x", "previous_response_id": first["id"]}
            status, _, data = await c.post(PATH, body, headers=headers)
            assert status == 400 and json.loads(data)["error"]["code"] == "previous_response_not_found"
            async with c.client.delete(f"{c.url}{PATH}/{first['id']}", headers=headers) as deleted:
                assert deleted.status == 404
        assert len(c.decodes[0].seen) == 1, "nothing of it reaches a worker"
        for good in ({"Authorization": "Bearer alice"}, {"x-api-key": "alice"}):
            assert (await c.get(f"{PATH}/{first['id']}", **good))[0] == 200


async def test_the_routers_own_keys_are_kept_apart(tmp_path: Path) -> None:
    async with cluster(unified=1, api_key_file=key_file(tmp_path, "alice", "bob")) as c:
        answering(c)
        first = await ask(c, "one", key="alice")
        path = f"{PATH}/{first['id']}"
        statuses = [(await c.get(path, Authorization=f"Bearer {key}"))[0] for key in ("alice", "bob", "eve")]
        assert statuses == [200, 404, 401] and (await c.get(path))[0] == 401


async def test_references_arrive_as_items() -> None:
    async with cluster() as c:
        answering(c)
        first = await ask(c, "one")
        await ask(c, [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "x"}])
        assert c.prefills[0].seen[-1].body["input"][0] == first["output"][0]


async def test_a_running_response_is_cancelled_at_its_workers() -> None:
    async with cluster() as c:
        answering(c, respond_until_aborted)
        async with c.client.post(c.url + PATH, json={"input": "x", "stream": True}) as running:
            head = (await running.content.readuntil(b"\n\n")).decode()
            id = json.loads(head.split("data: ")[1])["response"]["id"]
            assert (await c.post(f"{PATH}/{id}/cancel", b"", headers={"Authorization": "Bearer other"}))[0] == 404
            status, _, cancelled = await c.post(f"{PATH}/{id}/cancel", b"")
            assert status == 200 and json.loads(cancelled)["status"] == "cancelled"
            assert b"response.incomplete" in await running.content.read()
        assert {path for worker in (*c.prefills, *c.decodes) for path, _ in worker.calls} >= {"/abort_request"}
        assert (await c.post(f"{PATH}/{id}/cancel", b""))[2] == cancelled, "it has ended: nothing changes"


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async with cluster(retry_max=0) as c:
        answering(c, breaks_off)
        _, _, data = await c.post(PATH, {"input": "x", "stream": True})
        name, shown = data.decode().strip().split("\n\n")[-1].split("\n")
        error = json.loads(shown.removeprefix("data: "))
        assert name == "event: error" and error["type"] == "error" and "broke off" in error["message"]
        assert (await c.get(f"{PATH}/resp_1"))[0] == 404


async def test_a_router_that_stores_nothing_says_so() -> None:
    async with cluster(max_stored_responses=0) as c:
        answering(c)
        first = await ask(c, "one")
        assert first["store"] is False and (await c.get(f"{PATH}/{first['id']}"))[0] == 404
        assert "history" not in c.decodes[0].seen[-1].body
        status, _, data = await c.post(PATH, {"input": "x", "previous_response_id": first["id"]})
        assert status == 400 and "--max-stored-responses" in json.loads(data)["error"]["message"]


async def test_bounds_hold() -> None:
    async with cluster(unified=1, max_stored_responses=2) as c:
        answering(c)
        ids = [(await ask(c, str(n)))["id"] for n in range(3)]
        assert [(await c.get(f"{PATH}/{id}"))[0] for id in ids] == [404, 200, 200]
        assert c.router.book is not None
        c.router.book.local.store.check()
        assert "tandem_router_stored_responses 2.0" in await c.metrics()


async def test_strangers_cannot_ask_as_a_peer() -> None:
    async with cluster(unified=1) as c:
        question = {"act": "find", "id": "resp_1", "owner": ""}
        for headers in ({}, {"X-Tandem-Sibling": "guess"}):
            assert (await c.post("/peers/responses", question, headers=headers))[0] == 404


async def test_any_process_knows_every_response(tmp_path: Path) -> None:
    async with fleet(tmp_path, decode=1) as f:
        answering(f)
        previous: dict[str, Any] = {}
        for n in range(8):  # each over a connection of its own
            more = {"previous_response_id": previous["id"]} if previous else {}
            status, answer = await f.call("POST", PATH, {"input": str(n), **more})
            assert status == 200, answer
            previous = answer
        texts = [item["content"] for item in f.decodes[0].seen[-1].body["history"] if item["role"] == "user"]
        assert texts == [str(n) for n in range(7)]
        for _ in range(8):
            assert await f.call("GET", f"{PATH}/{previous['id']}") == (200, previous)
        items = (await f.call("GET", f"{PATH}/{previous['id']}/input_items?order=asc&limit=100"))[1]["data"]
        assert len(items) == 15
        assert (await f.call("GET", f"{PATH}/{previous['id']}", Authorization="Bearer other"))[0] == 404

        answering(f, respond_until_aborted)
        names = [f"resp_{n}" for n in range(4)]
        asks = [asyncio.create_task(f.call("POST", PATH, {"input": "x", "stream": True, "id": id})) for id in names]
        for id in names:
            assert (await until(lambda id=id: cancelled(f, id)))["status"] == "cancelled"
        for status, text in await asyncio.gather(*asks):
            assert status == 200 and "response.incomplete" in text

        assert (await f.call("DELETE", f"{PATH}/{previous['id']}"))[0] == 200
        for _ in range(8):
            assert (await f.call("GET", f"{PATH}/{previous['id']}"))[0] == 404


async def cancelled(f: Fleet, id: str) -> Any:
    """The cancelled response; None until its first event has come."""
    status, answer = await f.call("POST", f"{PATH}/{id}/cancel")
    return answer if status == 200 else None


def keys_of(body: dict[str, Any]) -> list[int]:
    return keyed_prompt(parse_body(Api.RESPONSES, json.dumps(body).encode()))[0]


def test_a_turn_of_a_conversation_has_the_keys_of_the_one_before() -> None:
    one, two = "a" * 3000, [{"role": "user", "content": "b" * 3000}]
    item = {"type": "message", "role": "user", "content": one}
    first = keys_of({"instructions": "I", "history": [], "input": one})
    as_item = json.dumps(item, separators=(",", ":"))
    history = msgspec.Raw(f'[{as_item},{{"role":"assistant","content":"{"c" * 600}"}}]'.encode())
    body = msgspec.json.encode({"instructions": "I", "history": history, "input": two})
    second, _ = keyed_prompt(parse_body(Api.RESPONSES, body))
    assert len(first) == 5 and second[:5] == first and len(second) > 10
    assert keys_of({"instructions": "J", "history": [], "input": one})[:1] != first[:1]


def test_a_body_is_one_sample_with_its_own_bound() -> None:
    parsed = parse_body(Api.RESPONSES, b'{"input": ["x", "y"], "max_output_tokens": 7, "n": 5}')
    assert (parsed.num_samples, parsed.output_tokens) == (1, 7)


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_a_filter_sees_whole_events(size: int) -> None:
    data = event("response.created", response={"id": "resp_1"}) + event("response.completed", response={"id": "x"})
    pieces = []

    def noted(events: bytes) -> bytes:
        pieces.append(events)
        return events

    stream = StreamSplitter(filters=[noted])
    passed = b"".join(stream.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert passed == data == b"".join(pieces) and all(piece.endswith(b"\n\n") for piece in pieces)


def test_what_is_no_event_has_no_response() -> None:
    assert [response_in(data, 0) for data in (b"", b"data: {}\n\n", b"data: x\n\n", b"\n\n")] == [b""] * 4
    assert response_in(b'data: {"response": {"id": "a"}}\n\n', 0) == b'{"id": "a"}'
