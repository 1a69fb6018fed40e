"""Workers that freeze or vanish for good while they hold requests: nobody waits for them. Dummies, real sockets."""

import asyncio
import json
import socket
from typing import Any

import pytest
from aiohttp import web

from router.client.session import open_session
from router.client.upstream import HttpUpstream
from router.pool.breaker import Health
from tests.router.behaviours import hang, hangs_once, later, resets, streams_on
from tests.router.dummies import (
    CHAT,
    STREAM,
    DummyWorker,
    always,
    answer_ok,
    begin_stream,
    cluster,
    events_of,
    until,
)

QUICK: dict[str, Any] = {"health_check_interval_s": 0.02, "dead_worker_timeout_s": 0.3}


def freeze(worker: DummyWorker) -> None:
    """Its checks fail, its requests hang. (That a check without an answer fails is the first test's affair.)"""
    worker.healthy, worker.behave = False, hang


async def test_a_request_of_a_frozen_decode_worker_moves_to_another_one() -> None:
    async def hangs_first(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (hang if sum(len(w.seen) for w in c.decodes) == 1 else answer_ok)(worker, request, body)

    async with cluster(decode=2, health_check_timeout_s=0.3, **QUICK) as c:
        for worker in c.decodes:
            worker.behave = hangs_first
        ask = await c.begin(CHAT)
        dead = await until(
            lambda: next((w for w in c.decodes if w.seen), None)
        )  # a late check may have cost the other one
        dead.frozen = True
        status, _, answer = await ask
        assert status == 200 and json.loads(answer)["from"] != dead.name and dead.cancelled == 1
        at_router = next(w for w in c.router.table.workers() if w.url == dead.url)
        await until(lambda: at_router.health is Health.DOWN)


async def test_a_request_of_a_frozen_prefill_worker_moves_and_its_decode_leg_is_cancelled() -> None:
    async with cluster(prefill=2, **QUICK) as c:
        dead, (decode,) = c.prefills[0], c.decodes
        dead.behave = hang
        decode.behave = hangs_once
        ask = await c.begin(STREAM, dead, decode)
        freeze(dead)
        status, _, answer = await ask
        assert status == 200 and events_of(answer)[-1] == "[DONE]"
        assert decode.cancelled == 1 and len(c.prefills[1].seen) == 1


async def test_a_stream_of_a_frozen_worker_ends_with_one_error_event_and_the_other_leg_is_cancelled() -> None:
    async with cluster(decode=[streams_on] * 2, prefill=[hang], **QUICK) as c:
        async with c.client.post(c.url + "/v1/chat/completions", json=STREAM) as response:
            await response.content.readuntil(b"\n\n")
            for worker in c.decodes:
                worker.healthy = False
            (error,) = events_of(await response.read())
        assert "--dead-worker-timeout" in error["error"]["message"] and error["error"]["code"] == 502
        await until(lambda: c.prefills[0].cancelled == 1 and sum(w.cancelled for w in c.decodes) == 1)
        assert sum(len(w.seen) for w in c.decodes) == 1


async def test_a_stream_that_gets_bytes_goes_on_though_every_health_check_fails() -> None:
    async with cluster(**{**QUICK, "dead_worker_timeout_s": 1.0}) as c:
        decode, worker = c.decodes[0], c.router.table.workers()[1]
        stop = asyncio.Event()

        async def ticks(_: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            out = await begin_stream(request)
            while not stop.is_set():
                await out.write(b'data: {"i": 0}\n\n')
                await asyncio.sleep(0.01)
            await out.write(b"data: [DONE]\n\n")
            return out

        decode.behave = ticks
        ask = await c.begin(STREAM, decode)
        decode.healthy = False
        await until(lambda: worker.health is Health.DOWN)
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() - worker.checks.good_s > 1.5)
        stop.set()
        status, _, answer = await ask
        assert status == 200 and events_of(answer)[-1] == "[DONE]"


async def test_another_process_at_the_same_url_ends_the_legs_of_the_one_before_at_once() -> None:
    """Long before any time is over: checks go on well."""
    async with cluster(prefill=1, decode=1, health_check_interval_s=0.02) as c:
        decode, worker = c.decodes[0], c.router.table.workers()[1]
        decode.behave, decode.incarnation = hang, "a"
        await until(lambda: worker.process.incarnation == "a")
        ask = await c.begin(CHAT, decode)
        seen_s = worker.process.seen_s
        await until(lambda: worker.process.seen_s > seen_s + 0.05)
        decode.behave, decode.incarnation = answer_ok, "b"
        status, _, answer = await ask
        assert status == 200 and json.loads(answer)["from"] == decode.name and len(decode.seen) == 2


def num_watched() -> int:
    return sum(task.get_name().startswith("health ") for task in asyncio.all_tasks())


async def test_a_worker_that_was_removed_is_looked_after_while_it_holds_requests() -> None:
    async with cluster(decode=2, **QUICK) as c:
        dead, other = c.decodes
        dead.behave = hang
        ask = await c.begin(CHAT, dead)
        assert await c.remove(dead) == 200
        assert num_watched() == 3
        freeze(dead)
        assert json.loads((await ask)[2])["from"] == other.name
        await until(lambda: num_watched() == len(c.router.table.workers()) == 2)


async def test_a_failed_request_waits_a_little_for_workers_of_which_none_is_alive() -> None:
    """Their checks failed by what broke its connection, and the next ones are well: no error then."""
    async with cluster(health_check_interval_s=0.02, health_failure_threshold=1, retry_wait_s=5.0) as c:
        decode, worker = c.decodes[0], c.router.table.workers()[1]
        release = asyncio.Event()
        decode.behave = later(release, resets)
        ask = await c.begin(CHAT, decode)
        decode.healthy = False
        await until(lambda: worker.health is Health.DOWN)
        decode.behave = answer_ok
        release.set()
        await until(lambda: c.router.table.loads.num_leases == 0)  # the first attempt is over
        decode.healthy = True
        assert (await ask)[0] == 200


async def test_a_pair_that_cannot_be_joined_is_tried_once_more_and_the_client_hears_why() -> None:
    async with cluster(retry_backoff_s=0.0) as c:
        said = {"error": {"message": "bootstrap server b:1 cannot be reached", "code": 502}}
        c.decodes[0].behave = always(502, said)
        status, _, answer = await c.post("/generate", {"text": "a"})
        assert (status, json.loads(answer)) == (502, said) and len(c.decodes[0].seen) == 2


async def test_addresses_of_workers_that_come_and_go_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.client.upstream.MAX_ORIGINS", 3)

    async with cluster() as c:
        client = HttpUpstream(connect_timeout_s=5, request_timeout_s=5)
        for path in range(20):  # names of one worker, each an address of its own
            reply = client.post(f"{c.decodes[0].url}#{path}", "/generate", headers={}, body=b"{}")
            while await reply.readany():
                pass
            assert reply.status == 200 and 1 <= len(client.origins) <= 3
            assert len(client.connections) <= 3
        await client.close()


async def test_the_kernel_probes_connections_to_workers() -> None:
    async with cluster(decode=[streams_on]) as c:
        seen: list[socket.socket] = []

        class Watched(HttpUpstream):
            def on_made(self, connection: Any, opened: Any) -> None:
                super().on_made(connection, opened)
                seen.append(opened)

        client = Watched(connect_timeout_s=5, request_timeout_s=5, dead_timeout_s=30)
        await client.post(
            c.decodes[0].url, "/generate", headers={"Content-Type": "application/json"}, body=b'{"stream": true}'
        ).readany()
        assert probes(seen[0]) == [1, 10, 5, 4]
        await client.close()
        async with open_session(connect_timeout_s=1, request_timeout_s=1, dead_timeout_s=30) as session:
            response = await session.post(c.decodes[0].url + "/generate", data=b'{"stream": true}')
            assert response.connection is not None and response.connection.transport is not None
            assert probes(response.connection.transport.get_extra_info("socket")) == [1, 10, 5, 4]
            response.close()


def probes(opened: socket.socket) -> list[int]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    keeps = opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return [keeps, *(opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names)]
