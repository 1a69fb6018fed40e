"""A worker's HTTP API inside another application, under a plain uvicorn."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2 as httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tandem import EngineDeadError
from tandem.asgi import WorkerApp, app

CHAT = {"messages": [{"role": "user", "content": "k17 v42 k03 v91 k17"}], "max_tokens": 4, "temperature": 0}
WAIT_S = 30.0


@asynccontextmanager
async def mounted(app: WorkerApp) -> AsyncIterator[httpx.AsyncClient]:
    service = FastAPI()
    service.mount("/llm", app)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(service, log_config=None))
        serving = asyncio.create_task(server._serve([sock]))
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{sock.getsockname()[1]}/llm", timeout=WAIT_S
            ) as client:
                yield client
        finally:
            server.should_exit = True
            await serving


async def test_it_answers_below_a_path_whole_and_in_events(worker_app: WorkerApp) -> None:
    async with mounted(worker_app) as client:
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()
        events = (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).text
        wrong = await client.post("/v1/chat/completions", json={"messages": 3}, headers={"Host": "service.example"})
        assert "/v1/chat/completions" in (await client.get("/openapi.json")).json()["paths"]
    pieces = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    said = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert said == whole["choices"][0]["message"]["content"] and events.endswith("data: [DONE]\n\n")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "messages"


async def test_a_client_that_leaves_ends_its_request(worker_app: WorkerApp) -> None:
    services = await worker_app._ready()
    async with mounted(worker_app) as client:
        endless = {**CHAT, "stream": True, "max_tokens": 8000, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=endless) as answer:
            await anext(answer.aiter_bytes())
            assert services.client.num_live == 1
            await worker_app.pause("in_place")  # it does not end by itself
        until_s = time.monotonic() + WAIT_S
        while services.client.num_live and time.monotonic() < until_s:
            await asyncio.sleep(0.01)
        await worker_app.resume()
        assert services.client.num_live == 0


async def test_an_engine_that_cannot_start_is_in_each_answer(caplog: pytest.LogCaptureFixture) -> None:
    broken = app("/nowhere")
    async with mounted(broken) as client:
        for path, kind in (("/v1/chat/completions", "server_error"), ("/v1/messages", "overloaded_error")):
            answer = await client.post(path, json=CHAT)
            error = answer.json()["error"]
            assert answer.status_code == 503 and error["type"] == kind
            assert error["message"].startswith("model_path /nowhere: no such directory")
    alone = uvicorn.Server(uvicorn.Config(broken, log_config=None))
    with pytest.raises(SystemExit):
        await alone._serve([])
    assert "/nowhere: no such directory" in caplog.text


async def test_an_engine_that_has_ended_is_in_each_answer(
    worker_app: WorkerApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker_app._ready()
    monkeypatch.setattr(worker_app._worker, "over", EngineDeadError("it died"))
    async with mounted(worker_app) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "it died"


async def test_a_host_that_is_not_allowed_is_refused(worker_app: WorkerApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_app, "_allowed_hosts", ())
    monkeypatch.setattr(worker_app, "_application", None)
    async with mounted(worker_app) as client:
        assert (
            await client.post("/v1/chat/completions", json=CHAT, headers={"Host": "evil.example"})
        ).status_code == 403
