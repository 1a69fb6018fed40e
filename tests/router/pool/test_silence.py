"""Workers that say nothing while they are asked: requests go elsewhere at once, those that run there too, unless told otherwise."""

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web

from router.pool.active_calls import last_sign_s
from router.pool.breaker import Health
from router.pool.heartbeats import SilenceTimer
from router.pool.worker import Role, Worker
from tests.router.attempts import Launched
from tests.router.behaviours import hang, later
from tests.router.dummies import CHAT, STREAM, Cluster, DummyWorker, always, begin_stream, cluster, until, workers

QUICK: dict[str, Any] = {"health_check_interval_s": 0.02, "health_silence_s": 0.05}
PATIENT: dict[str, Any] = {**QUICK, "health_check_timeout_s": 60.0}


def state(c: Cluster, index: int) -> Worker:
    return c.router.table.workers()[index]


async def test_what_waits_for_a_frozen_worker_moves_to_another() -> None:
    async with cluster(decode=2, **PATIENT) as c:
        frozen, other = c.decodes
        frozen.behave = hang
        running = await c.begin(CHAT, frozen)
        frozen.frozen = True
        assert (await running)[0] == 200
        assert len(frozen.seen) == len(other.seen) == 1 and frozen.cancelled == 1


async def test_the_last_attempt_stays_at_a_silent_worker() -> None:
    """Moved, it would be an error; the worker may only be slow."""
    async with cluster(decode=2, retry_max=0, **PATIENT) as c:
        frozen, other = c.decodes
        goes_on = asyncio.Event()
        frozen.behave = later(goes_on)
        running = await c.begin(CHAT, frozen)
        frozen.frozen = True
        await until(lambda: state(c, 1).silent)
        assert state(c, 1).calls and not running.done()
        frozen.frozen = False
        goes_on.set()
        assert (await running)[0] == 200 and not other.seen


async def test_a_worker_with_requests_is_asked_more_often_than_checks_come_while_it_says_nothing() -> None:
    """The next check is an hour away when it freezes."""
    async with cluster(decode=2, **{**PATIENT, "health_check_interval_s": 3600.0}) as c:
        frozen = c.decodes[0]
        frozen.behave = hang
        running = await c.begin(CHAT, frozen)
        c.router.monitor.look(state(c, 1))
        await until(lambda: frozen.num_checks == 4)  # of the start, this one, and two of its silence
        frozen.frozen = True
        assert (await running)[0] == 200 and frozen.cancelled == 1


async def test_a_worker_that_streams_or_has_nothing_to_do_is_not_asked_more_often() -> None:
    async def streams(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        out = await begin_stream(request)
        for _ in range(100):
            await out.write(b'data: {"i": 0}\n\n')
            await asyncio.sleep(0.01)
        await out.write_eof()
        return out

    async with cluster(health_check_interval_s=3600.0, health_silence_s=2.0) as c:
        c.decodes[0].behave = later(lambda: c.decodes[0].num_checks == 2, streams)
        running = await c.begin(STREAM, c.decodes[0])
        c.router.monitor.look(state(c, 1))
        assert (await running)[0] == 200
        assert (c.decodes[0].num_checks, c.prefills[0].num_checks) == (2, 1)


async def test_a_frozen_worker_keeps_what_runs_where_nothing_moves() -> None:
    async with cluster(decode=2, **PATIENT, disable_moves=True) as c:
        frozen, other = c.decodes
        frozen.behave = hang
        running = await c.begin(CHAT, frozen)
        frozen.frozen = True
        await until(lambda: state(c, 1).silent)
        assert state(c, 1).health is Health.UP
        for _ in range(5):  # least_load would have gone to each in turn
            assert (await c.post("/v1/chat/completions", CHAT))[0] == 200
        assert len(other.seen) == 5 and len(frozen.seen) == 1 and frozen.cancelled == 0 and not running.done()
        said = {w["url"]: (w["silent"], w["is_healthy"]) for w in (await c.get("/workers"))[1]["workers"]}
        assert said[frozen.url] == (True, False) and said[other.url] == (False, True)
        running.cancel()


async def test_a_worker_in_a_long_step_says_so_and_stays_in_the_choice() -> None:
    """What a worker says of its step is shown; nonsense is not, and costs nothing."""
    async with cluster(decode=2, **QUICK, health_failure_threshold=1) as c:
        for said, shown in (({"busy_s": 90.5}, 90.5), ({"busy_s": "long"}, None), ({"busy_s": -1}, None), ({}, None)):
            c.decodes[0].health_says = said
            await until(lambda shown=shown: state(c, 1).process.busy_s == shown)  # type: ignore[misc]
            assert state(c, 1).health is Health.UP and not state(c, 1).silent
        c.decodes[0].health_says = {"busy_s": 90.5}
        await until(lambda: state(c, 1).process.busy_s == 90.5)
        assert {w["url"]: w["busy_s"] for w in (await c.get("/workers"))[1]["workers"]}[c.decodes[0].url] == 90.5
        for _ in range(4):
            assert (await c.post("/v1/chat/completions", CHAT))[0] == 200
        assert c.decodes[0].seen


# A question takes so long; those for the load would be answered.
BRIEF: dict[str, Any] = {**QUICK, "health_check_timeout_s": 0.2, "load_poll_interval_s": 0.0}
LASTING: dict[str, Any] = {**BRIEF, "health_failure_threshold": 10**6}  # it is never taken for dead


async def held(c: Cluster, **headers: str) -> "asyncio.Task[tuple[int, dict[str, str], bytes]]":
    """A request that came when the only decode worker was silent; nothing of it was sent."""
    c.decodes[0].frozen = True
    await until(lambda: state(c, 1).silent)
    ask = asyncio.create_task(c.post("/v1/chat/completions", CHAT, headers=headers))
    await until(lambda: ask.done() or len(c.router.live) == 1)
    return ask


async def test_a_request_waits_for_the_only_worker_while_it_is_silent() -> None:
    """A pause costs that pause, not an error."""
    async with cluster(**LASTING) as c:
        ask = await held(c, **{"X-Request-Timeout": "60"})
        assert (await c.get("/readiness"))[0] == 200
        assert not ask.done() and not c.prefills[0].seen and not c.decodes[0].seen
        c.decodes[0].frozen = False
        assert (await ask)[0] == 200 and len(c.decodes[0].seen) == 1
        assert 0 < float(c.decodes[0].seen[0].headers["x-request-timeout"]) < 60, "the wait counts"


async def test_a_request_that_has_failed_waits_for_a_silent_worker_as_long_as_for_a_dead_one() -> None:
    """Decode has noticed first that its prefill worker is frozen."""
    async with cluster(prefill=[hang], **LASTING, retry_wait_s=0.05, dead_worker_timeout_s=3600.0) as c:
        c.decodes[0].behave = later(lambda: state(c, 0).silent, always(500, {"error": {"message": "no KV"}}))
        ask = await c.begin(CHAT, c.decodes[0])
        c.prefills[0].frozen = True
        await until(ask.done)
        status, _, answer = await ask
        assert status == 503 and b"no prefill worker answers" in answer and state(c, 0).health is Health.UP


async def test_a_request_is_not_sent_to_a_worker_that_turns_out_to_be_dead() -> None:
    async with cluster(**BRIEF) as c:
        status, headers, answer = await (await held(c))
        assert state(c, 1).health is Health.DOWN
        assert status == 503 and headers["Retry-After"] and b"no decode worker is alive" in answer
        assert not c.prefills[0].seen and not c.decodes[0].seen


async def test_a_request_that_waits_goes_to_a_worker_that_comes() -> None:
    async with cluster(**LASTING) as c, workers(1, mode="decode") as (other,):
        ask = await held(c)
        assert (await c.post("/workers", {"url": other.url, "role": "decode"}))[0] == 201
        assert (await ask)[0] == 200 and len(other.seen) == 1 and not c.decodes[0].seen


@pytest.mark.parametrize(
    ("flags", "headers"),
    [({}, {"X-Request-Timeout": "0.2"}), ({"dead_worker_timeout_s": 0.2}, {})],
    ids=["client", "router"],
)
async def test_no_request_waits_for_ever(flags: dict[str, Any], headers: dict[str, str]) -> None:
    async with cluster(**LASTING, **flags) as c:
        status, _, answer = await (await held(c, **headers))
        assert status == 503 and b"no decode worker answers" in answer and b"does not answer" in answer
        assert state(c, 1).silent and not c.decodes[0].seen


async def test_a_worker_of_which_bytes_come_is_not_silent() -> None:
    loop, told = asyncio.get_running_loop(), list[bool]()
    question = SilenceTimer(limit_s=0.01, received_s=loop.time, report=told.append)
    await until(lambda: len(told) >= 5)
    question.close()
    assert set(told) == {False}
    question = SilenceTimer(limit_s=0.01, received_s=lambda: -math.inf, report=told.append)
    await until(lambda: told[-1])
    question.close()


def test_only_bytes_of_an_answer_are_a_sign_of_life_not_that_it_was_asked_for() -> None:
    launched = Launched()
    worker = launched.worker(Role.DECODE, "http://d0")
    _, _, reply = launched.pair()
    assert last_sign_s(worker) == -math.inf
    reply.answer(200, events=True, complete=False)
    assert last_sign_s(worker) == 0.0
    reply.answer(200)
    assert last_sign_s(worker) == -math.inf
