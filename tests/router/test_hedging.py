"""Hedging: a request whose answer does not come is sent to a second pair, within a budget; one answers, the other is ended."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.metrics import RouterMetrics
from router.pool.breaker import State
from router.pool.pool import WorkerPool
from router.pool.worker import LoadReport, Role, Worker
from router.pool.workers import WorkerTable
from router.requests.hedging import MAX_SAVED, Budget, Hedging, other_pools
from tests.router.dummies import (
    CHAT,
    STREAM,
    Cluster,
    DummyWorker,
    always,
    answer_ok,
    cluster,
    events_of,
    hang,
    later,
    streams_on,
    until,
)

SOON: dict[str, Any] = {"hedge_after_s": 0.02, "hedge_budget": 1.0}


async def counts(c: Cluster, name: str) -> dict[str, float]:
    """Values of a metric that are not 0, by its label."""
    lines = [line for line in await c.metrics() if line.startswith(name + "{") and not line.endswith(" 0.0")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def hedges(c: Cluster) -> tuple[float, float, float]:
    """(started, won, lost), as /metrics says."""
    found = await counts(c, "tandem_router_hedges_total")
    return found.get("started", 0.0), found.get("won", 0.0), found.get("lost", 0.0)


# ---- whole requests, real sockets


@pytest.mark.parametrize("slow", ["prefills", "decodes"])
@pytest.mark.parametrize("body", [STREAM, {**STREAM, "n": 3}], ids=["one", "three"])
async def test_a_hedge_answers_for_a_silent_pair_whose_calls_both_end(slow: str, body: dict[str, Any]) -> None:
    async with cluster(prefill=2, decode=2, **SOON) as c:
        (first_prefill, prefill), (first_decode, decode) = c.prefills, c.decodes
        first_prefill.behave = first_decode.behave = hang
        if slow == "decodes":
            first_prefill.behave = answer_ok
        status, _, answer = await c.post("/v1/chat/completions", body)
        assert status == 200 and events_of(answer)[0]["from"] == decode.name and events_of(answer)[-1] == "[DONE]"
        await until(lambda: first_decode.cancelled == 1)
        await until(lambda: first_prefill.cancelled == (slow == "prefills"))
        rooms = [seen.body["bootstrap_room"] for w in (first_decode, decode) for seen in w.seen]
        flat = [room for room in rooms for room in (room if isinstance(room, list) else [room])]
        assert len(flat) == len(set(flat)) == 2 * body.get("n", 1)
        assert prefill.seen[0].body["bootstrap_room"] == rooms[1]
        assert await hedges(c) == (1, 1, 0)
        await c.settled()


async def test_the_losing_pair_gets_no_fault_and_is_shown_as_ended() -> None:
    async with cluster(prefill=2, decode=2, cb_failure_threshold=1, **SOON) as c:
        c.prefills[0].behave = c.decodes[0].behave = hang
        assert (await c.post("/v1/chat/completions", STREAM, headers={"X-Request-Id": "r"}))[0] == 200
        await c.settled()
        assert all(w.circuit.state is State.CLOSED for w in c.router.table.workers())
        (record,) = c.router.recorder.snapshot().records
        first, hedge = record.attempts
        assert (first.hedge, hedge.hedge) == (False, True) and first.cancelled_s is not None
        assert (first.failure, hedge.failure, hedge.cancelled_s, record.failure) == ("", "", None, "")
        assert sum(second.retried for second in c.router.recorder.snapshot().seconds) == 0
        c.prefills[0].behave = c.decodes[0].behave = answer_ok
        told = json.loads((await c.post("/traces", {"ids": ["r"]}))[2])["records"]
        (router,) = [part for part in told if part["process"] == "router"]
        legs = {s["attributes"]["url.full"]: s["attributes"].get("error.type") for s in router["spans"][:4]}
        assert legs == {c.prefills[0].url: "cancelled", c.decodes[0].url: "cancelled"} | dict.fromkeys(
            (c.prefills[1].url, c.decodes[1].url)
        )
        assert not await counts(c, "tandem_router_errors_total")


async def test_a_pair_that_fails_while_its_hedge_runs_leaves_the_request_to_it() -> None:
    async with cluster(prefill=2, decode=2, retry_max=0, **SOON) as c:
        bad, good = c.decodes
        failed = asyncio.Event()

        async def fails_late(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await until(lambda: good.seen)
            failed.set()
            return web.json_response({"error": {"message": "broken"}}, status=500)

        bad.behave = fails_late
        good.behave = later(lambda: failed.is_set() and c.router.table.workers()[2].inflight_requests == 0)
        status, _, answer = await c.post("/v1/chat/completions", STREAM)
        assert status == 200 and events_of(answer)[0]["from"] == good.name
        assert await hedges(c) == (1, 1, 0)
        await c.settled()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_hedge_that_hangs_or_is_refused_leaves_the_answer_to_the_first_attempt(*, refused: bool) -> None:
    """429 is a worker's word that it has enough, not that the request is bad."""
    async with cluster(prefill=2, decode=2, **SOON) as c:
        first, hedge = c.decodes
        hedge.behave = always(429, {"error": {"message": "full"}}) if refused else hang
        first.behave = later(lambda: hedge.seen and c.router.table.workers()[3].inflight_requests == (not refused))
        status, _, answer = await c.post("/v1/chat/completions", STREAM)
        assert status == 200 and events_of(answer)[0]["from"] == first.name
        await until(lambda: hedge.cancelled == (not refused))
        assert await hedges(c) == (1, 0, 1)
        await c.settled()


async def test_a_request_that_is_bad_for_the_first_pair_is_bad() -> None:
    async with cluster(prefill=2, decode=2, **SOON) as c:
        first, hedge = c.decodes
        hedge.behave = hang
        first.behave = later(lambda: hedge.seen, always(400, {"error": {"message": "no"}}))
        assert (await c.post("/v1/chat/completions", STREAM))[0] == 400
        await until(lambda: hedge.cancelled == 1)
        await c.settled()


async def test_a_stream_that_has_begun_is_not_hedged() -> None:
    async with cluster(prefill=2, decode=2, **{**SOON, "hedge_after_s": 0.2}) as c:
        c.decodes[0].behave = streams_on
        async with c.client.post(c.url + "/v1/chat/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")  # from here on it is silent
            c.decodes[0].behave = c.decodes[1].behave = hang
            ask = asyncio.create_task(c.post("/v1/chat/completions", STREAM))
            await until(lambda: sum(len(w.seen) for w in c.decodes) == 3)  # a later one was due, and hedged
            await until(lambda: sum(len(w.seen) for w in c.prefills) == 3)
            assert await hedges(c) == (1, 0, 0)
        ask.cancel()


async def test_without_another_worker_nothing_is_hedged() -> None:
    async with cluster(**SOON) as c:
        c.decodes[0].behave = hang
        ask = asyncio.create_task(c.post("/v1/chat/completions", STREAM))

        async def withheld() -> bool:
            return await counts(c, "tandem_router_hedges_withheld_total") == {"no_other": 1}

        await until(withheld)
        assert len(c.decodes[0].seen) == 1
        ask.cancel()
        await until(lambda: c.decodes[0].cancelled == 1)
        await c.settled()


@pytest.mark.parametrize("workers", [{"prefill": 1, "decode": 2}, {"unified": 2}], ids=["one prefill", "unified"])
async def test_the_only_prefill_worker_is_shared_and_unified_workers_are_hedged_too(workers: dict[str, int]) -> None:
    async with cluster(**workers, **SOON) as c:
        c.decodes[0].behave = hang
        status, _, answer = await c.post("/v1/chat/completions", STREAM)
        assert status == 200 and events_of(answer)[0]["from"] == c.decodes[1].name
        assert [len(prefill.seen) for prefill in c.prefills] == [2] * workers.get("prefill", 0)
        await until(lambda: c.decodes[0].cancelled == 1)
        await c.settled()


async def test_both_attempts_failing_leaves_the_request_to_a_retry_without_a_hedge() -> None:
    async with cluster(prefill=1, decode=4, retry_backoff_s=0.0, **SOON) as c:
        first, second, third, fourth = c.decodes
        fail, answer = asyncio.Event(), asyncio.Event()
        first.behave = second.behave = later(fail, always(500, {}))
        third.behave, fourth.behave = later(answer), hang
        ask = asyncio.create_task(c.post("/v1/chat/completions", STREAM))
        await until(lambda: first.seen and second.seen)
        fail.set()
        await until(lambda: third.seen)
        first.behave = second.behave = answer_ok
        assert (await c.post("/v1/chat/completions", STREAM))[0] == 200  # due later, and hedged by now
        assert len(fourth.seen) == 1 and await hedges(c) == (2, 1, 1)
        answer.set()
        status, _, body = await ask
        assert status == 200 and events_of(body)[0]["from"] == third.name
        assert await hedges(c) == (2, 1, 1)
        await c.settled()


async def test_a_whole_answer_is_hedged_where_its_client_says_so() -> None:
    async with cluster(prefill=2, decode=2, **SOON) as c:
        c.decodes[0].behave = hang
        said = {"X-Tandem-Hedge-After-Ms": "20"}
        status, _, answer = await c.post("/v1/chat/completions", CHAT, headers=said)
        assert status == 200 and json.loads(answer)["from"] == c.decodes[1].name
        assert "x-tandem-hedge-after-ms" not in c.decodes[1].seen[0].headers
        await c.settled()


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "inf", ""])
async def test_a_header_that_is_no_number_is_400(said: str) -> None:
    async with cluster(**SOON) as c:
        status, _, answer = await c.post("/generate", {"text": "a"}, headers={"X-Tandem-Hedge-After-Ms": said})
        assert status == 400 and "x-tandem-hedge-after-ms" in json.loads(answer)["error"]["message"]
        assert not c.decodes[0].seen
        await c.settled()


# ---- when and where: pure


def pool(role: Role, *reports: LoadReport | None) -> list[Worker]:
    table = WorkerTable()
    workers = [table.add(f"http://{role}{i}:1", role=role) for i in range(len(reports))]
    for worker, report in zip(workers, reports, strict=True):
        worker.report = report
    return workers


BUSY = LoadReport(waiting_reqs=1)
FULL = LoadReport(stages={"prealloc": 1})


def others_of(pools: list[list[Worker]], taken: list[Worker]) -> list[list[Worker]] | None:
    found = other_pools([WorkerPool(pool) for pool in pools], taken)
    return None if found is None else [[*pool] for pool in found]


def test_a_hedge_goes_to_other_workers_without_a_queue() -> None:
    p0, p1, p2 = prefills = pool(Role.PREFILL, None, BUSY, LoadReport(running_reqs=9))
    d0, d1 = decodes = pool(Role.DECODE, None, None)
    assert others_of([prefills, decodes], [p0, d0]) == [[p2], [d1]]
    assert others_of([[p0], decodes], [p0, d0]) == [[p0], [d1]]  # there is no other one: shared
    assert others_of([[p0, p1], decodes], [p0, d0]) is None  # there is, but it has a queue
    assert others_of([[p0], [d0]], [p0, d0]) is None
    assert others_of([[p1], decodes], [p1, d0]) is None  # the only one has a queue itself
    assert others_of([[], decodes], [p0, d0]) is None
    (full,) = pool(Role.DECODE, FULL)
    assert others_of([prefills, [d0, full]], [p0, d0]) is None


async def test_why_a_hedge_is_withheld_and_that_only_a_made_one_costs() -> None:
    d0, d1 = pool(Role.DECODE, None, None)
    metrics = RouterMetrics(WorkerTable())
    parts: Any = {
        "picker": SimpleNamespace(
            pools=lambda request: request.pools, choose=lambda request, ways: [[*pool] for pool in ways[0]]
        ),
        "launcher": SimpleNamespace(begin=lambda request, headers, placements, hedge: placements, clock=lambda: 0.0),
        "admission": SimpleNamespace(queue=SimpleNamespace(num_waiting=0)),
    }
    hedging = Hedging(default_s=1.0, budget=Budget(0.5), metrics=metrics, **parts)

    async def hedged(*workers: Worker, num_waiting: int = 0) -> Any:
        begun = asyncio.get_running_loop().create_future()
        parts["admission"].queue.num_waiting = num_waiting
        request: Any = SimpleNamespace(pools=[[WorkerPool(workers)]], hedge_after_s=0.0, headers_at=lambda now_s: {})
        first = SimpleNamespace(workers=(d0,))
        group: Any = SimpleNamespace(running=[first], begin_hedge=lambda begin: begun.set_result(begin()))
        hedging.arm(request, group)
        return await begun

    assert await hedged(d0, d1, num_waiting=1) is None
    assert await hedged(d0) is None
    assert await hedged(d0, d1) == [[d1]]
    assert await hedged(d0, d1) is None
    counts = {why: metrics.hedges_withheld.labels(why)._value.get() for why in ("busy", "no_other", "budget")}
    assert counts == {"busy": 1, "no_other": 1, "budget": 1}


def test_the_flag_is_for_streams_the_header_for_any_and_0_for_none() -> None:
    parts: Any = dict.fromkeys(("picker", "launcher", "admission"))
    hedging = Hedging(default_s=2.0, budget=Budget(0.5), metrics=RouterMetrics(WorkerTable()), **parts)
    named = {"x-tandem-hedge-after-ms": "500"}
    assert hedging.after_s({}, streams=True) == 2.0 and hedging.after_s({}, streams=False) is None
    assert hedging.after_s(named, streams=True) == hedging.after_s(named, streams=False) == 0.5
    assert hedging.after_s({"x-tandem-hedge-after-ms": "0"}, streams=True) is None


@given(share=st.floats(0.001, 1.0), steps=st.lists(st.booleans(), max_size=300))
def test_no_more_than_the_share_is_hedged_however_they_come(share: float, steps: list[bool]) -> None:
    budget, came, hedged = Budget(share), 0, 0
    for arrives in steps:
        if arrives:
            budget.earn()
            came += 1
        else:
            hedged += budget.spend()
        assert hedged <= 1 + share * came + 1e-9


def test_a_quiet_time_saves_up_a_few_hedges_only() -> None:
    budget = Budget(1.0)
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == MAX_SAVED
