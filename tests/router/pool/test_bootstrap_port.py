"""A wrong bootstrap port of a prefill worker is said when the worker joins, with the remedy; not by each of its requests."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from fastapi import Response
from starlette.types import ASGIApp

from bootstrap_server.app import make_app
from bootstrap_server.registry import BootstrapConfig, Registry
from router.pool.reports import is_bootstrap_server
from service.http.errors import RequestLimits
from service.http.listening import open_port
from service.http.request import HttpRequest, asgi_app
from service.http.server import serving
from tests.router.dummies import BOOTSTRAP_PORT, CHAT, Cluster, DummyWorker, cluster, until, workers

LIMITS = RequestLimits(max_body_bytes=1 << 10)


async def ok(request: HttpRequest) -> Response:
    return Response("OK")


@asynccontextmanager
async def bootstrap(app: ASGIApp) -> AsyncIterator[int]:
    with open_port("127.0.0.1", 0) as port:
        async with serving(port, app, LIMITS, shutdown_timeout_s=0.1):
            yield port.port


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def given(port: int, **flags: Any) -> AbstractAsyncContextManager[Cluster]:
    """A pair whose prefill worker says `BOOTSTRAP_PORT`, and of which the router is given another port; 0: that of its HTTP."""
    return cluster(prefill=[DummyWorker("p", "prefill", given_port=port)], **flags)


@pytest.mark.parametrize("port", ["closed", "the worker's own"])
async def test_a_wrong_port_keeps_a_worker_out_and_the_remedy_is_named(
    port: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with given(free_port() if port == "closed" else 0) as c:
            worker = c.state(c.prefills[0])
            assert not worker.answers
            assert f"given as {worker.bootstrap.given_port}" in worker.checks.error
            assert (
                f"leave the port out (--prefill, bootstrap_port, the pod's annotation), or give {BOOTSTRAP_PORT}"
                in worker.checks.error
            )
    assert f"{worker.url} gets no request: {worker.checks.error}" in caplog.text


async def test_a_refusal_says_why_there_is_no_worker() -> None:
    async with cluster() as c, workers(1, mode="prefill") as (late,):
        assert await c.remove(c.prefills[0]) == 200
        added = {"url": late.url, "role": "prefill", "bootstrap_port": free_port()}
        assert (await c.post("/workers", added))[0] == 201
        await until(lambda: c.router.table.find(late.url).checks.last)
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert status == 503 and f"it says {BOOTSTRAP_PORT}" in json.loads(answer)["error"]["message"]
        shown = (await c.get("/workers"))[1]["workers"]
        assert [f"or give {BOOTSTRAP_PORT}" in (worker["last_error"] or "") for worker in shown] == [False, True]


@pytest.mark.parametrize("whose", ["ours", "SGLang's", "as it says"])
async def test_a_mapped_port_is_right_where_a_bootstrap_server_answers(whose: str) -> None:
    config = BootstrapConfig()
    app = asgi_app(ok, LIMITS) if whose == "SGLang's" else make_app(Registry(config, shared=False), config=config)
    async with bootstrap(app) as port, given(BOOTSTRAP_PORT if whose == "as it says" else port) as c:
        worker = c.state(c.prefills[0])
        await until(lambda: worker.answers)
        assert worker.bootstrap.port == (BOOTSTRAP_PORT if whose == "as it says" else port)


async def test_a_bootstrap_server_that_hangs_hides_no_silent_worker() -> None:
    asked = 0

    async def ok_once(request: HttpRequest) -> Response:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.sleep(3600)
        return await ok(request)

    quick = {"health_silence_s": 0.05, "health_check_timeout_s": 600.0}
    async with bootstrap(asgi_app(ok_once, LIMITS)) as port, given(port, **quick) as c:
        prefill, worker = c.prefills[0], c.state(c.prefills[0])
        await until(lambda: worker.answers)
        before = prefill.num_checks
        c.router.monitor.look(worker)
        await until(lambda: asked > 1 or prefill.num_checks > before + 2)
        prefill.frozen = True
        await until(lambda: worker.silent)


@pytest.mark.parametrize(
    ("status", "body", "is_one"),
    [
        (200, b'{"workers": 1, "rooms": 0, "refused": 0}', True),
        (200, b"OK", True),
        (200, b'{"status": "ok", "incarnation": "a"}', False),
        (200, b"", False),
        (200, b"[" * 100_000, False),
        (200, b"\xff", False),
        (200, b'["rooms"]', False),
        (404, b"OK", False),
        (0, b"OK", False),
    ],
)
def test_what_answers_as_a_bootstrap_server(status: int, body: bytes, is_one: bool) -> None:
    assert is_bootstrap_server(status, body) is is_one
