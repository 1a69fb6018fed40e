"""Workers that fail, hang, die and come back; clients that go away; back-pressure. Dummy workers, real sockets."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from router.pool.breaker import Health, State
from tests.router.behaviours import hang, hangs_once, later, pauses, resets, streams_on
from tests.router.dummies import (
    CHAT,
    STREAM,
    Behaviour,
    DummyWorker,
    always,
    answer_ok,
    begin_stream,
    cluster,
    events_of,
    stream,
    until,
)


def failing(times: int, status: int) -> Behaviour:
    """Answers `status` to the first `times` requests, then well."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(worker.seen) <= times:
            return web.json_response({"error": {"message": "not now"}}, status=status)
        return await answer_ok(worker, request, body)

    return behave


async def dies_after_two_events(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks in the middle of the third event."""
    out = await begin_stream(request, b'data: {"i": 0}\n\ndata: {"i": 1}\n\ndata: {"i"')
    assert request.transport is not None
    request.transport.close()
    return out


@pytest.mark.parametrize("status", [500, 502, 503])
@pytest.mark.parametrize("leg", ["prefills", "decodes"])
async def test_a_failing_worker_is_hidden_by_a_retry_elsewhere_in_a_new_room(leg: str, status: int) -> None:
    async with cluster(prefill=2, decode=2) as c:
        bad = getattr(c, leg)[0]
        bad.behave = always(status, {"error": {"message": "broken"}})
        code, _, answer = await c.post("/v1/chat/completions", STREAM)
        assert code == 200 and events_of(answer)[-1] == "[DONE]"
        rooms = [s.body["bootstrap_room"] for w in getattr(c, leg) for s in w.seen]
        assert len(rooms) == 2 and rooms[0] != rooms[1] and len(bad.seen) == 1
        assert all(w.health is Health.UP for w in c.router.table.workers())


async def test_retries_are_bounded_and_the_workers_last_word_is_passed() -> None:
    async with cluster(retry_max=2, retry_backoff_s=0.01) as c:
        c.decodes[0].behave = always(503, {"error": {"message": "full"}}, **{"Retry-After": "7"})
        status, headers, answer = await c.post("/generate", {"text": "a"})
        assert (status, json.loads(answer), headers["Retry-After"]) == (503, {"error": {"message": "full"}}, "7")
        assert len(c.decodes[0].seen) == 3
        c.decodes[0].behave = failing(5, 503)
        assert (await c.post("/generate", {"text": "a"}))[0] == 200


NO_TOKEN = {"message": "the model returned NaN logits for this request", "code": "model_error"}
OWN_ERRORS = [{"error": NO_TOKEN}, {"error": NO_TOKEN["message"], "code": "internal_error"}]


@pytest.mark.parametrize("error", OWN_ERRORS)
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_request_that_fails_by_itself_is_tried_once_more_and_counts_against_no_worker(
    error: dict[str, Any], body: dict[str, Any]
) -> None:
    async with cluster(decode=[always(500, error)] * 3, prefill=3, cb_failure_threshold=1) as c:
        for number in range(1, 4):
            status, _, answer = await c.post("/v1/chat/completions", body)
            assert (status, json.loads(answer)) == (500, error)
            assert sum(len(w.seen) for w in c.decodes) == 2 * number
        assert all(worker.circuit.state is State.CLOSED for worker in c.router.table.workers())


async def test_a_request_that_fails_by_itself_does_not_come_back_to_the_same_workers() -> None:
    async with cluster(decode=[always(500, OWN_ERRORS[0])], cb_failure_threshold=1) as c:
        assert (await c.post("/generate", {"text": "a"}))[0] == 500
        assert len(c.decodes[0].seen) == len(c.prefills[0].seen) == 1
        assert all(worker.circuit.state is State.CLOSED for worker in c.router.table.workers())


@pytest.mark.parametrize("leg", ["prefills", "decodes"])
async def test_a_worker_at_which_every_request_fails_by_itself_is_found(leg: str) -> None:
    """Its GPU may be broken: others answer what it could not. Whoever stood beside it in both attempts is not blamed."""
    async with cluster(prefill=2, decode=2, cb_failure_threshold=2) as c:
        bad = getattr(c, leg)[0]
        bad.behave = always(500, OWN_ERRORS[0])
        table = {worker.url: worker.circuit for worker in c.router.table.workers()}
        while table[bad.url].state is State.CLOSED:
            assert len(bad.seen) < 20
            assert (await c.post("/v1/chat/completions", STREAM))[0] == 200


async def test_of_two_attempts_with_one_worker_in_both_the_other_is_blamed() -> None:
    async with cluster(decode=[always(500, OWN_ERRORS[0]), answer_ok], prefill=1, cb_failure_threshold=1) as c:
        for _ in range(2):  # one goes to each decode worker first
            assert (await c.post("/generate", {"text": "a"}))[0] == 200
        opened = [worker.url for worker in c.router.table.workers() if worker.circuit.state is State.OPEN]
        assert opened == [c.decodes[0].url]


@pytest.mark.parametrize("status", [400, 404, 408, 409, 413, 422, 429, 499])
@pytest.mark.parametrize("leg", ["prefills", "decodes"])
async def test_a_4xx_of_either_leg_is_passed_as_it_is_at_once(leg: str, status: int) -> None:
    """The other leg hangs; it is cancelled, and nothing is retried."""
    async with cluster(prefill=[hang], decode=[hang], cb_failure_threshold=1) as c:
        (bad,) = getattr(c, leg)
        (other,) = c.decodes if leg == "prefills" else c.prefills
        bad.behave = always(status, {"error": {"message": "no"}}, **{"Retry-After": "3"})
        got, headers, answer = await c.post("/v1/chat/completions", STREAM)
        assert (got, json.loads(answer), headers["Retry-After"]) == (status, {"error": {"message": "no"}}, "3")
        assert headers["Content-Type"].startswith("application/json")
        await until(lambda: other.cancelled == len(other.seen))
        assert len(bad.seen) == 1
        assert all(worker.circuit.state is State.CLOSED for worker in c.router.table.workers())


@pytest.mark.parametrize("behave", [resets, dies_after_two_events])
async def test_a_connection_lost_before_anything_was_sent_is_retried(behave: Behaviour) -> None:
    async with cluster(prefill=[behave, answer_ok], decode=[hangs_once]) as c:
        assert (await c.post("/generate", {"text": "a"}))[0] == 200
        assert len(c.prefills[1].seen) == 1 and c.decodes[0].cancelled == 1


async def test_a_dead_worker_leaves_the_pool_at_once_and_comes_back() -> None:
    """Its port refuses connections, so the first request takes it out, long before the next health check."""
    async with cluster(decode=2, health_check_interval_s=60.0) as c:
        dead = c.decodes[0]
        await dead.stop()
        for _ in range(4):
            status, _, answer = await c.post("/generate", {"text": "a"})
            assert (status, json.loads(answer)["from"]) == (200, "decode-1")
        assert c.router.table.workers()[1].health is Health.DOWN
    async with cluster(decode=2) as c:
        dead = c.decodes[0]
        await dead.stop()
        await until(lambda: c.router.table.workers()[1].health is Health.DOWN)
        await dead.start()
        await until(lambda: c.router.table.workers()[1].health is Health.UP)
        names = {json.loads((await c.post("/generate", {"text": "a"}))[2])["from"] for _ in range(4)}
        assert names == {"decode-0", "decode-1"}


async def test_a_lost_connection_makes_the_router_look_at_once() -> None:
    """Between health checks that are a minute apart: unhealthy is noticed, and so is another bootstrap port."""
    async with cluster(prefill=1, decode=2, health_check_interval_s=60.0, health_failure_threshold=1) as c:
        c.decodes[0].behave, c.decodes[0].healthy = resets, False
        assert (await c.post("/generate", {"text": "a"}))[0] == 200
        await until(lambda: c.router.table.workers()[1].health is Health.DOWN)
        c.prefills[0].info["disaggregation_bootstrap_port"] = 4444
        c.prefills[0].behave, c.decodes[1].behave = resets, hang
        await c.post("/generate", {"text": "a"})
        await until(lambda: c.router.table.workers()[0].bootstrap.port == 4444)


async def test_an_unhealthy_worker_leaves_and_a_restarted_prefill_worker_is_asked_for_its_bootstrap_port() -> None:
    async with cluster(info={"disaggregation_bootstrap_port": 1111}) as c:
        prefill = c.prefills[0]
        prefill.healthy = False
        await until(lambda: c.router.table.workers()[0].health is Health.DOWN)
        status, headers, answer = await c.post("/generate", {"text": "a"})
        error = json.loads(answer)["error"]
        assert status == 503 and headers["Retry-After"] and "no prefill worker is alive" in error["message"]
        assert "/health answers 503" in error["message"] and c.decodes[0].seen == []
        prefill.healthy, prefill.info["disaggregation_bootstrap_port"] = True, 2222
        await until(lambda: c.router.table.workers()[0].health is Health.UP)
        await c.post("/generate", {"text": "a"})
        assert c.decodes[0].seen[0].body["bootstrap_port"] == 2222


async def test_no_pair_alive_is_a_503_at_once_that_names_every_missing_role() -> None:
    async with cluster(retry_wait_s=3600.0) as c:
        await c.prefills[0].stop()
        await c.decodes[0].stop()
        await until(lambda: all(w.health is Health.DOWN for w in c.router.table.workers()))
        status, _, answer = await c.post("/generate", {"text": "a"})
        assert status == 503 and "no prefill and no decode worker is alive" in json.loads(answer)["error"]["message"]
        assert (await c.get("/readiness"))[0] == (await c.get("/v1/models"))[0] == 503


async def test_decode_that_dies_in_mid_stream_leaves_one_error_event() -> None:
    async with cluster(decode=[dies_after_two_events] * 2, prefill=[hang]) as c:
        status, _, answer = await c.post("/v1/chat/completions", STREAM)
        *good, error = events_of(answer)
        assert status == 200 and good == [{"i": 0}, {"i": 1}]
        assert error["error"]["type"] == "server_error" and "decode worker" in error["error"]["message"]
        await until(lambda: c.prefills[0].cancelled == 1)
        assert sum(len(w.seen) for w in c.decodes) == 1


async def test_prefill_that_refuses_after_decode_began_ends_the_stream_with_its_error() -> None:
    refuse, refuses = asyncio.Event(), always(500, {"error": {"message": "transfer failed"}})
    async with cluster(prefill=[later(refuse, refuses)], decode=[streams_on]) as c:
        async with c.client.post(c.url + "/v1/chat/completions", json=STREAM) as response:
            assert await response.content.readuntil(b"\n\n") == b'data: {"i": 0}\n\n'
            refuse.set()
            (error,) = events_of(await response.read())
            assert error["error"]["message"] == "transfer failed"
        await until(lambda: c.decodes[0].cancelled == 1)


ENDED = always(503, {"error": {"message": "the scheduler process ended"}})


@pytest.mark.parametrize(("ending", "reason"), [(resets, "lost"), (ENDED, "http_503")])
async def test_a_prefill_worker_that_dies_after_decode_began_does_not_end_the_answer(
    ending: Behaviour, reason: str
) -> None:
    """By a broken connection, or with its last words (found by `make churn-soak`)."""
    break_off, go_on = asyncio.Event(), asyncio.Event()
    legs: dict[str, Any] = {"prefill": [later(break_off, ending)], "decode": [pauses(go_on, b"data: [DONE]\n\n")]}
    async with cluster(**legs) as c, c.client.post(c.url + "/v1/chat/completions", json=STREAM) as response:
        await response.content.readuntil(b"\n\n")
        break_off.set()
        await c.shows(f'tandem_router_errors_total{{reason="{reason}",role="prefill"}} 1.0')
        go_on.set()
        assert events_of(await response.read()) == ["[DONE]"]


@pytest.mark.parametrize(("decode", "body"), [(hang, CHAT), (hang, STREAM), (streams_on, STREAM)])
async def test_a_client_that_goes_away_cancels_both_legs(decode: Behaviour, body: dict[str, Any]) -> None:
    async with cluster(prefill=[hang], decode=[decode]) as c:
        client = await c.begin(body, c.prefills[0], c.decodes[0])
        if decode is streams_on:
            await until(lambda: c.router.table.workers()[0].inflight_requests == 0)
        client.cancel()
        await until(lambda: c.prefills[0].cancelled == 1 and c.decodes[0].cancelled == 1)
        await c.settled()
        await c.shows('tandem_router_requests_total{path="/v1/chat/completions",status="499"} 1.0')
        await c.shows("tandem_router_inflight_requests 0.0")


@pytest.mark.parametrize("streaming", [False, True])
async def test_prefills_input_logprobs_reach_the_client(*, streaming: bool) -> None:
    """Decode answers before prefill: the first event waits for what only prefill knows. (One sample: tests/e2e/shared.)"""

    def items(known: Sequence[list[Any]]) -> list[dict[str, Any]]:
        return [{"index": i, "text": "x", "meta_info": {"id": "r", "input_token_logprobs": known[i]}} for i in range(2)]

    known = [[[None, 1, "a"], [-0.5 - i, 2, "b"]] for i in range(2)]
    async with cluster() as c:

        async def prefill(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await until(lambda: c.decodes[0].calls)
            return web.json_response(items(known))

        async def decode(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            worker.calls.append(("began", ""))
            unknown = items([[], []])
            return await stream(request, unknown * 2) if body.get("stream") else web.json_response(unknown)

        c.prefills[0].behave, c.decodes[0].behave = prefill, decode
        ask = {"return_logprob": True, "logprob_start_len": 0, "stream": streaming}
        status, _, answer = await c.post("/generate", {**ask, "text": ["a", "b"]})
        assert status == 200
        whole = items(known)
        assert (events_of(answer) if streaming else json.loads(answer)) == (
            [*whole, *whole, "[DONE]"] if streaming else whole
        )


async def test_a_request_that_takes_too_long_is_a_504() -> None:
    async with cluster(decode=[hang], request_timeout_s=0.2) as c:
        status, _, answer = await c.post("/generate", {"text": "a"})
        assert status == 504 and "--request-timeout-secs" in json.loads(answer)["error"]["message"]
        await until(lambda: c.decodes[0].cancelled == 1)


async def test_a_slow_client_holds_its_worker_back_and_not_the_router() -> None:
    """Back-pressure: a client that does not read stops the worker's writes; the router buffers no whole answer."""
    written = 0

    async def pours(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal written
        out = await begin_stream(request, b"")
        for _ in range(1000):
            await out.write(b"data: " + b"x" * 100_000 + b"\n\n")
            written += 1
        return out

    async with cluster(decode=[pours]) as c, aiohttp.ClientSession(read_bufsize=1 << 16) as slow:
        response = await slow.post(c.url + "/v1/chat/completions", json=STREAM)
        last = -1
        while last != written:
            last = written
            await asyncio.sleep(0.1)
        assert 0 < written < 500
        received = 0
        async for chunk in response.content.iter_any():
            received += len(chunk)
        assert received == 1000 * 100_008 and written == 1000


async def test_plain_mode_retries_and_ends_broken_streams_too() -> None:
    async with cluster(unified=[always(500, {}), answer_ok]) as c:
        assert (await c.post("/generate", {"text": "a"}))[0] == 200
        for worker in c.decodes:
            worker.behave = dies_after_two_events
        *_, error = events_of((await c.post("/v1/chat/completions", STREAM))[2])
        assert "unified worker" in error["error"]["message"]
        for worker in c.decodes:
            worker.behave = hang
        ask = asyncio.create_task(c.post("/generate", {"text": "a"}))
        await until(lambda: sum(len(w.seen) for w in c.decodes) == 4)
        ask.cancel()
        await until(lambda: sum(w.cancelled for w in c.decodes) == 1)
        await asyncio.gather(ask, return_exceptions=True)
