"""vLLM's workers behind the router: not as a pair, and what they have elsewhere or not at all. Other servers that are no pair."""

import json
import logging
from typing import Any

import pytest
from aiohttp import web

from router.pool.health import NO_BOOTSTRAP, NO_HALF
from router.pool.reports import NO_PAIR, VLLM, lacks_route, runtime_of, vllm_call
from router.pool.worker import Role
from tests.router.dummies import CHAT, DummyWorker, always, cluster, until

CARD = {"id": "m", "owned_by": "vllm"}
VLLM_PATHS = ("/health", "/v1/models", "/v1/chat/completions", "/tokenize", "/inference/v1/abort_requests")
DEV_INFO = {"vllm_config": "...", "vllm_env": {}}  # of /server_info with VLLM_SERVER_DEV_MODE=1


class VllmWorker(DummyWorker):
    """Has vLLM's paths alone; any other gets FastAPI's 404. `info`: of /server_info, if it has that."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/server_info" and self.info:
            return web.json_response(self.info)
        if request.path not in VLLM_PATHS:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [CARD]})
        return await super()._handle(request)


def vllm(mode: str, **more: Any) -> VllmWorker:
    return VllmWorker(f"vllm-{mode}", mode, **more)


@pytest.mark.parametrize("info", [{}, DEV_INFO], ids=["plain", "with its development mode"])
@pytest.mark.parametrize("port", [None, 8998])
async def test_a_pair_of_vllm_workers_is_no_pair(
    info: dict[str, Any], port: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prefill = vllm("prefill", info=info, given_port=port)
        async with cluster(prefill=[prefill], decode=[vllm("decode", info=info)]) as c:
            status, _, answer = await c.post("/v1/chat/completions", CHAT)
            assert status == 503 and NO_PAIR in json.loads(answer)["error"]["message"]
            assert not c.prefills[0].seen and not c.decodes[0].seen
            shown = (await c.get("/workers"))[1]["workers"]
            assert [(w["last_error"], w["runtime_type"], w["is_healthy"]) for w in shown] == [
                (NO_PAIR, VLLM, False)
            ] * 2
            assert (await c.get("/readiness"))[0] == 503
            said = [f"{w.mode} worker {w.url} gets no request: {NO_PAIR}" for w in (*c.prefills, *c.decodes)]
    assert all(line in caplog.text for line in said)


async def test_a_vllm_decode_worker_takes_no_half_of_a_request() -> None:
    """It would ignore the other half, and answer all the same."""
    async with cluster(decode=[vllm("decode")]) as c:
        assert (await c.post("/v1/chat/completions", CHAT))[0] == 503
        assert [worker.checks.error for worker in c.router.table.workers()] == ["", NO_PAIR]


def nothing_said(mode: str) -> DummyWorker:
    return DummyWorker("other", mode, info={"disaggregation_mode": None, "disaggregation_bootstrap_port": None})


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_server_that_knows_no_pairs_is_no_half(mode: str) -> None:
    given: dict[str, Any] = {mode: [nothing_said(mode)]}
    async with cluster(**given) as c:
        errors = {worker.role: worker.checks.error for worker in c.router.table.workers()}
        assert errors == {Role.PREFILL: "", Role.DECODE: "", Role(mode): NO_HALF}
        assert (await c.post("/v1/chat/completions", CHAT))[0] == 503


@pytest.mark.parametrize("port", [None, 1], ids=["none given", "one where nothing listens"])
async def test_a_prefill_worker_without_a_bootstrap_server_gets_nothing(port: int | None) -> None:
    silent = DummyWorker("p", "prefill", info={"disaggregation_bootstrap_port": None}, given_port=port)
    async with cluster(prefill=[silent]) as c:
        state = c.state(silent)
        assert not state.answers and state.checks.error.startswith(NO_BOOTSTRAP)
        assert (f"the given bootstrap port, {port}," in state.checks.error) == (port is not None)


async def test_unified_vllm_workers_serve() -> None:
    async with cluster(unified=[vllm("null")]) as c:
        await until(lambda: c.state(c.decodes[0]).answers)
        assert (await c.post("/v1/chat/completions", CHAT))[0] == 200
        assert (await c.post("/tokenize", {"prompt": "a"}))[0] == 200
        assert (await c.get("/workers"))[1]["workers"][0]["runtime_type"] == VLLM


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "/generate", {"text": "a"}, "vLLM workers have no /generate; ask /v1/completions or /v1/chat/completions"),
        ("PUT", "/generate", {"text": "a"}, "vLLM workers have no /generate; ask /v1/completions or /v1/chat/completions"),
        ("POST", "/generate", {"text": "a", "stream": True}, "vLLM workers have no /generate"),
        ("POST", "/api/chat", CHAT, "vLLM workers have no /api/chat"),
        ("GET", "/get_model_info", None, "vLLM workers have no /get_model_info"),
        ("POST", "/detokenize", {"tokens": [1]}, "vLLM workers have no /detokenize"),
        ("POST", "/flush_cache", None, "vLLM workers have no /flush_cache"),
        ("POST", "/abort_request", {"abort_all": True}, "with abort_all: they end requests by their ids alone (rid)"),
    ],
)  # fmt: skip
async def test_what_vllm_has_not_is_said(method: str, path: str, body: Any, said: str) -> None:
    async with cluster(unified=[vllm("null")]) as c:
        await until(lambda: c.state(c.decodes[0]).answers)
        async with c.client.request(method, c.url + path, json=body) as response:
            assert response.status == 501
            assert said in await response.text()


async def test_aborts_and_health_are_where_vllm_has_them() -> None:
    async with cluster(unified=[vllm("null")]) as c:
        await until(lambda: c.state(c.decodes[0]).answers)
        assert (await c.post("/abort_request", {"rid": "cmpl-1"}))[0] == 200
        (abort,) = c.decodes[0].seen
        assert (abort.path, abort.body) == ("/inference/v1/abort_requests", {"request_ids": ["cmpl-1", "cmpl-1-0"]})
        assert (await c.get("/health_generate"))[0] == 200
        c.decodes[0].healthy = False
        assert (await c.get("/health_generate"))[0] == 503


async def test_other_workers_get_what_was_sent() -> None:
    async with cluster(unified=1) as c:
        assert (await c.post("/abort_request", {"rid": "a"}))[0] == 200
        assert (await c.get("/health_generate"))[0] == 200
        assert c.decodes[0].calls[-2:] == [("/abort_request", '{"rid": "a"}'), ("/health_generate", "")]
        c.decodes[0].behave = always(404, {"detail": "Not Found"})
        status, _, answer = await c.post("/v1/chat/completions", CHAT)
        assert status == 501 and "these workers have no /v1/chat/completions" in answer.decode()


@pytest.mark.parametrize(
    ("info", "listed", "runtime"),
    [
        (None, {"data": [CARD]}, VLLM),
        (DEV_INFO, None, VLLM),
        (None, {"data": [{"id": "m", "owned_by": "sglang"}]}, None),
        (None, {"data": [{"id": "m"}]}, None),
        *((None, listed, None) for listed in (None, [], {}, {"data": {}}, {"data": []}, {"data": [1]})),
        ({"model_path": "m"}, None, None),
        ([], None, None),
    ],
)
def test_how_a_vllm_worker_is_known(info: object, listed: object, runtime: str | None) -> None:
    assert runtime_of(info, listed) == runtime


@pytest.mark.parametrize(
    ("status", "body", "lacks"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b'{"error":{"message":"The model `x` does not exist."}}', False),
        (404, b'{"detail":"no such file"}', False),
        (200, b'{"detail":"Not Found"}', False),
        (404, b"[", False),
    ],
)
def test_which_answers_mean_that_a_route_is_missing(status: int, body: bytes, lacks: bool) -> None:
    assert lacks_route(status, body) is lacks


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"{}", b'{"rid": 5}', b'{"rid": "a", "abort_all": true}'])
def test_a_body_that_names_no_request_goes_as_it_is(body: bytes) -> None:
    assert vllm_call("POST", "/abort_request", body) == ("POST", "/abort_request", body)
