"""What dummy workers do with a request besides answering it: they wait, hang, break off, change their role."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.router.dummies import Behaviour, DummyWorker, answer_ok, begin_stream, until


def later(ready: "asyncio.Event | Callable[[], Any]", then: Behaviour = answer_ok) -> Behaviour:
    """Waits, then behaves as `then`."""

    async def behave(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await (ready.wait() if isinstance(ready, asyncio.Event) else until(ready))
        return await then(worker, request, body)

    return behave


def after(delay_s: float, then: Behaviour) -> Behaviour:
    """Behaves as `then` once the clock is `delay_s` further: a timer may fire early, and a test may replace it."""

    async def behave(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        end_s = time.monotonic() + delay_s
        return await later(lambda: time.monotonic() >= end_s, then)(worker, request, body)

    return behave


def pauses(go_on: asyncio.Event, rest: bytes = b'data: {"i": 1}\n\ndata: [DONE]\n\n') -> Behaviour:
    """Streams an event, and when `go_on` is set the rest."""

    async def behave(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        out = await begin_stream(request)
        await go_on.wait()
        await out.write(rest)
        return out

    return behave


async def obey(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Changes its role when told to, and quicker than anybody looks."""
    if request.path != "/switch_role":
        return await answer_ok(worker, request, body)
    worker.mode, worker.incarnation = body["role"], worker.incarnation + "+"
    return web.json_response({}, status=202)


async def hang(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Never answers; ends only when its client goes away."""
    await asyncio.Event().wait()
    raise AssertionError


async def hangs_once(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As a decode worker whose first request gets no KV."""
    return await (hang if len(worker.seen) == 1 else answer_ok)(worker, request, body)


async def resets(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def streams_on(worker: "DummyWorker", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """One event, then nothing until its client goes away."""
    await begin_stream(request)
    return await hang(worker, request, body)
