"""Clients that come again, through the router's own code: scripted workers keep a stream, or do not."""

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.config import RouterConfig, check_config
from router.pool.breaker import Health
from router.pool.worker import Role
from service.flags import ConfigError
from service.http.reconnect import KEEP_HEADER, LAST_EVENT_HEADER, RETAINED_PATH, Keep
from service.http.resume import RESUME_FIELD, RESUME_HEADER, Resume, is_signed
from service.security.keys import owner_of
from tests.router.behaviours import later
from tests.router.dummies import CHAT, SECRET, STREAM, DummyWorker, answer_ok, cluster
from tests.router.test_failover import BEGUN, DONE, goes_on, lost_after, tokens_of

PATH = "/v1/chat/completions"
AGAIN = {LAST_EVENT_HEADER: "0123456789abcdef-2", "X-Request-Id": "r-1", "Authorization": "Bearer k"}
HAS = Resume(**msgspec.structs.asdict(BEGUN), output_ids=[[1, 2]], ended=[None], logprobs=[[]], prompt_logprobs=[[]])


def keeps(rest: Any = goes_on, *, status: int = 200, events: bytes = b"") -> Any:
    """Answers what it keeps, with this status, and the rest as `rest`."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != RETAINED_PATH:
            return await rest(worker, request, body)  # type: ignore[no-any-return]
        resume = base64.b64encode(msgspec.json.encode(HAS)).decode()
        return web.json_response({"events": base64.b64encode(events).decode(), "resume": resume}, status=status)

    return behave


async def test_a_client_gets_the_events_behind_its_last_and_then_the_live_answer() -> None:
    async with cluster(decode=[keeps(status=404)] * 3, prefill=2, resume_window_s=7.0) as c:
        kept = keeps(events=b'data: {"token": 2}\n\n')
        c.decodes[1].behave = later(lambda: all(w.seen for w in c.decodes), kept)
        status, _, text = await c.post(PATH, STREAM, headers=AGAIN)
        assert (status, tokens_of(text), text.endswith(DONE)) == (200, [2, 3, 4], True)
        asked = [seen for w in c.decodes for seen in w.seen if seen.path == RETAINED_PATH]
        assert len(asked) == 3 and not any(seen.path == RETAINED_PATH for w in c.prefills for seen in w.seen)
        question = asked[0].body
        assert (question["request_id"], question["after"]) == ("r-1", AGAIN[LAST_EVENT_HEADER])
        assert question["owner"] == owner_of("Bearer k")
        assert is_signed(asked[0].headers[RESUME_HEADER.lower()], SECRET.encode(), msgspec.json.encode(question))
        (rest,) = [seen for w in c.decodes for seen in w.seen if seen.path == PATH]
        assert rest.body[RESUME_FIELD]["output_ids"] == [[1, 2]]
        raw = msgspec.json.encode(rest.body[RESUME_FIELD])
        assert is_signed(rest.headers[RESUME_HEADER.lower()], SECRET.encode(), raw)
        keep = msgspec.json.decode(rest.headers[KEEP_HEADER.lower()].partition(" ")[2], type=Keep)
        assert (keep.window_s, keep.owner, keep.body) == (7.0, question["owner"], question["body"])


async def test_a_stream_that_went_on_with_its_client_may_lose_its_worker_again() -> None:
    async with cluster(decode=2, resume_window_s=7.0) as c:

        async def dies_once(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            dies = len(body[RESUME_FIELD]["output_ids"][0]) == 2
            return await (lost_after(3) if dies else goes_on)(worker, request, body)  # type: ignore[no-any-return]

        for worker in c.decodes:
            worker.behave = keeps(dies_once)
        _, _, text = await c.post(PATH, STREAM, headers=AGAIN)
        assert tokens_of(text) == [3, 4, 5]
        known = [seen.body[RESUME_FIELD]["output_ids"] for w in c.decodes for seen in w.seen if seen.path == PATH]
        assert sorted(known) == [[[1, 2]], [[1, 2, 3]]]


async def test_a_stream_that_no_worker_keeps_is_gone_and_none_begins() -> None:
    async with cluster(decode=[keeps(status=404)] * 2, resume_window_s=7.0) as c:
        status, _, answer = await c.post(PATH, STREAM, headers=AGAIN)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (410, "stream_gone") and "7 s" in error["message"]
        assert all(seen.path == RETAINED_PATH for w in c.decodes for seen in w.seen)


async def test_a_worker_that_says_nothing_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(decode=2, resume_window_s=7.0) as c:

        async def silent(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if request.path == RETAINED_PATH:
                await asyncio.Event().wait()
            return await goes_on(worker, request, body)

        c.decodes[0].behave, c.decodes[1].behave = silent, keeps()
        _, _, text = await c.post(PATH, STREAM, headers=AGAIN)
        assert tokens_of(text) == [3, 4]
        monkeypatch.setattr("router.parts.reconnect.ASK_TIMEOUT_S", 0.05)
        c.decodes[1].behave = keeps(status=404)  # the silent one may have it: the client is to come again
        status, headers, answer = await c.post(PATH, STREAM, headers=AGAIN)
        error = json.loads(answer)["error"]
        assert (status, headers["Retry-After"], error["code"]) == (503, "1", "stream_unknown")
        assert "send the same request again" in error["message"]


async def test_a_worker_that_a_new_router_has_not_checked_yet_is_asked() -> None:
    """The client of a router that died comes at once to the one that was started in its place."""
    async with cluster(decode=2, resume_window_s=7.0) as c:
        new, other = (w for w in c.router.table.workers() if w.role is Role.DECODE)
        c.decodes[0].behave, c.decodes[1].behave = keeps(), keeps(status=404)
        new.health = Health.STARTING
        c.router.table._on_change()
        _, _, text = await c.post(PATH, STREAM, headers=AGAIN)
        assert tokens_of(text) == [3, 4] and other.health is Health.UP


async def test_a_worker_that_is_gone_keeps_nothing() -> None:
    async with cluster(decode=[answer_ok, keeps(status=404)], resume_window_s=7.0, health_check_interval_s=3600.0) as c:
        await c.decodes[0].stop()
        assert (await c.post(PATH, STREAM, headers=AGAIN))[0] == 410


async def test_it_is_off_unless_a_flag_turns_it_on_and_for_streams_of_events_alone() -> None:
    async with cluster() as c:
        status, _, text = await c.post(PATH, STREAM, headers=AGAIN)
        assert status == 200 and b'"i": 0' in text
        (seen,) = c.decodes[0].seen
        assert seen.path == PATH and KEEP_HEADER.lower() not in seen.headers
    async with cluster(resume_window_s=7.0) as c:
        for path, body in ((PATH, CHAT), ("/api/chat", STREAM)):
            assert (await c.post(path, body, headers=AGAIN))[0] == 200
        assert all(KEEP_HEADER.lower() not in seen.headers and seen.path != RETAINED_PATH for seen in c.decodes[0].seen)
    with pytest.raises(ConfigError, match="--resume-window: needs --failover-max above 0"):
        check_config(RouterConfig(resume_window_s=7.0, failover_max=0))
