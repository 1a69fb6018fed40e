"""Workers and routers that end in good order: nothing new comes, what runs ends, the rest is handed back."""

import asyncio
import json
import math
from typing import Any

import pytest
from aiohttp import web

from router.pool.breaker import Check, Health
from router.pool.reports import reports_draining, why_draining
from router.pool.worker import Role
from router.pool.workers import WorkerTable
from service.http.guard import LEAST_S, less_time, time_given
from tests.router.behaviours import after, hang, later, streams_on
from tests.router.dummies import Cluster, DummyWorker, always, answer_ok, cluster, events_of, until

DRAINING = {"error": {"message": "the server is draining", "type": "server_error", "param": None, "code": "draining"}}
BODY = {"text": "a"}


def test_a_draining_worker_is_not_a_dead_one() -> None:
    table = WorkerTable()
    worker = table.add("http://h:1", role=Role.DECODE)
    seen = []
    for check in (Check.OK, Check.DRAINING, Check.FAILED, Check.DRAINING, Check.REFUSED, Check.OK):
        table.on_check(worker, check, now_s=0.0)
        seen.append(worker.health)
    assert seen == [Health.UP, Health.DRAINING, Health.DRAINING, Health.DRAINING, Health.DOWN, Health.UP]


@pytest.mark.parametrize(
    ("body", "is_so"),
    [
        (b'{"status":"draining"}', True),
        (json.dumps(DRAINING).encode(), True),
        (b'{"error":{"code":503}}', False),
        (b'{"error":"draining"}', False),
        (b"draining", False),
        (b"\xff", False),
        (b"[" * 10_000, False),
    ],
)
def test_what_counts_as_draining(body: bytes, is_so: bool) -> None:
    assert reports_draining(body) is is_so


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"status":"draining"}', "it is draining"),
        (b'{"status":"draining","released":[]}', "it is draining"),
        (
            b'{"status":"draining","released":["kv_cache","weights"]}',
            "it has released its memory (kv_cache, weights): POST /resume_memory_occupation",
        ),
    ],
)
def test_released_memory_is_named_and_what_brings_it_back(body: bytes, why: str) -> None:
    assert why_draining(body) == why


async def test_a_worker_that_says_so_on_health_gets_nothing_new_and_keeps_what_it_has() -> None:
    async with cluster(decode=2) as c:
        go = asyncio.Event()
        old = c.decodes[0]
        old.behave = later(go)
        running = await c.begin(BODY, old, path="/generate")
        old.draining = True
        worker = next(w for w in c.router.table.workers() if w.url == old.url)
        await until(lambda: worker.health is Health.DRAINING)
        assert [(await c.post("/generate", BODY))[0] for _ in range(4)] == [200] * 4
        assert len(old.seen) == 1 and len(c.decodes[1].seen) == 4
        go.set()
        assert (await running)[0] == 200
        old.draining = False  # another process took the address
        await until(lambda: worker.health is Health.UP)


@pytest.mark.parametrize("leg", ["prefills", "decodes"])
async def test_a_request_that_a_draining_worker_hands_back_goes_elsewhere_and_nothing_follows_it(leg: str) -> None:
    async with cluster(prefill=2, decode=2, health_check_interval_s=60.0) as c:
        bad, good = getattr(c, leg)
        bad.behave = always(503, DRAINING)
        bad.draining = True
        assert [(await c.post("/generate", BODY))[0] for _ in range(4)] == [200] * 4
        assert len(bad.seen) == 1 and len(good.seen) == 4


async def until_draining(c: Cluster, *, timeout_s: float = 60.0) -> "tuple[asyncio.Task[None], asyncio.Event]":
    """The router drains; set the event for "at once"."""
    at_once = asyncio.Event()
    task = asyncio.create_task(c.router.live.drain(timeout_s=timeout_s, at_once=at_once))
    await until(lambda: c.router.live.draining)
    return task, at_once


async def test_a_draining_router_says_so_takes_nothing_and_finishes_what_runs() -> None:
    go = asyncio.Event()
    async with cluster(decode=[later(go)]) as c:
        running = [asyncio.create_task(c.post("/generate", {**BODY, "stream": s})) for s in (False, True)]
        await until(lambda: len(c.decodes[0].seen) == 2)
        draining, _ = await until_draining(c)
        status, headers, answer = await c.post("/generate", BODY)
        assert (status, headers["Retry-After"], json.loads(answer)["error"]["code"]) == (503, "1", "draining")
        for path in ("/health", "/readiness"):
            status, health = await c.get(path)
            assert (status, health["status"]) == (503, "draining")
        assert (await c.get("/liveness"))[0] == 200
        assert not draining.done()
        go.set()
        assert [(await r)[0] for r in running] == [200, 200]
        await draining


@pytest.mark.parametrize("how", ["time is over", "second signal"])
async def test_what_a_draining_router_cannot_finish_is_handed_back(how: str) -> None:
    """Before the first byte as a 503, in a stream as its last event; both legs end."""
    async with cluster() as c:

        async def unfinished(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (streams_on if body.get("stream") else hang)(worker, request, body)

        c.behave(unfinished)
        running = [asyncio.create_task(c.post("/generate", {**BODY, "stream": s})) for s in (False, True)]
        await until(lambda: len(c.decodes[0].seen) == 2)
        await until(lambda: sum(r.cut is not None for r in c.router.live.requests) == 1)
        draining, at_once = await until_draining(c, timeout_s=0.0 if how == "time is over" else 60.0)
        if how == "second signal":
            at_once.set()
        (status, headers, whole), (stream_status, _, events) = [await r for r in running]
        assert (status, headers["Retry-After"], json.loads(whole)["error"]["code"]) == (503, "1", "draining")
        assert stream_status == 200 and events_of(events)[-1]["error"]["code"] == "draining"
        await draining
        await until(lambda: c.decodes[0].cancelled == 2)


async def test_a_retry_has_less_of_the_clients_time() -> None:
    headers = {"x-request-timeout": "10", "x-envoy-expected-rq-timeout-ms": "500.5", "traceparent": "t"}
    assert less_time(headers, 0.25) == {
        "x-request-timeout": "9.750",
        "x-envoy-expected-rq-timeout-ms": "250.500",
        "traceparent": "t",
    }
    assert float(less_time(headers, 11.0)["x-request-timeout"]) > 0
    junk = {"x-request-timeout": "nan", "x-envoy-expected-rq-timeout-ms": "soon"}
    assert less_time(junk, 1.0) == junk
    assert time_given(headers) == pytest.approx(0.5005) and time_given(junk) == math.inf

    async with cluster(decode=[after(10 * LEAST_S, always(503, {"error": {"code": "deadline"}})), answer_ok]) as c:
        assert (await c.post("/generate", BODY, headers={"X-Request-Timeout": "5"}))[0] == 200
        first, second = (float(w.seen[0].headers["x-request-timeout"]) for w in c.decodes)
        assert 5.0 >= first > second > 0.0
        await c.settled()


async def test_the_tables_that_callers_fill_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.attempts.pair_attempt.MAX_LIVE_ROOMS", 2)
    monkeypatch.setattr("router.pool.workers.MAX_WORKERS", 2)
    async with cluster() as c:
        body = {"text": "a", "sampling_params": {"n": 3}}
        status, headers, _ = await c.post("/generate", body)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert (await c.post("/generate", {**body, "sampling_params": {"n": 2}}))[0] == 200
        status, _, answer = await c.post("/workers", {"url": "http://h:1", "role": "decode"})
        assert status == 400 and "no more fit" in json.loads(answer)["error"]["message"]
