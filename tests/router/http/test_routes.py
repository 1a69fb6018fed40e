"""Routes of the router beside generation that clients of SGLang, vLLM and SageMaker use; paths and methods that do not exist."""

import json
from datetime import datetime
from typing import Any

import pytest
from aiohttp import web

from router.http.fan_out import join_rows, old_row
from service.http.errors import ApiError
from service.http.routes import UNSERVED, invoked_path
from tests.router.dummies import CHAT, DummyWorker, cluster, events_of


async def names(worker: DummyWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"from": worker.name, "at": request.path, "got": body})


async def test_one_worker_that_answers_turns_text_into_tokens() -> None:
    async with cluster(decode=2) as c:
        dead, alive = c.decodes
        alive.behave = c.prefills[0].behave = names
        await dead.stop()
        asked = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/tokenize/")
        for path in (*asked, "/v1/completions/render", "/v1/chat/completions/render"):
            status, _, answer = await c.post(path, {"prompt": "a", "model": "m"})
            told = {"from": alive.name, "at": path.rstrip("/"), "got": {"prompt": "a", "model": "m"}}
            assert (status, json.loads(answer)) == (200, told)
        status, error = await c.get("/tokenize")
        assert status == 405 and error["error"]["code"] == "method_not_allowed"


async def test_tokens_of_the_model_that_is_named() -> None:
    async with cluster(unified=2) as c:
        for worker, name in zip(c.decodes, ("a", "b"), strict=True):
            worker.info["model_path"], worker.behave = name, names
            c.router.table.on_models(c.router.table.find(worker.url), (name,))
        for model, server in (("a", "null-0"), ("b", "null-1")):
            assert json.loads((await c.post("/tokenize", {"prompt": "x", "model": model}))[2])["from"] == server
        status, _, answer = await c.post("/tokenize", {"prompt": "x", "model": "c"})
        assert status == 404 and json.loads(answer)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (CHAT, "/v1/chat/completions"),
        ({"prompt": "a"}, "/v1/completions"),
        ({"input": "a"}, "/v1/embeddings"),
        ({"text": "a"}, "/generate"),
        ({"input_ids": [1]}, "/generate"),
        ({"messages": [], "prompt": "a"}, "/v1/chat/completions"),
    ],
)
async def test_an_invocation_goes_where_its_body_belongs(body: dict[str, Any], path: str) -> None:
    async with cluster() as c:
        assert (await c.post("/invocations", body))[0] == 200
        answers = c.prefills if path == "/v1/embeddings" else c.decodes
        assert [seen.path for seen in answers[0].seen] == [path] and not answers[0].seen[0].body.get("stream")
        if path == "/v1/chat/completions":
            status, _, answer = await c.post("/invocations/", {**body, "stream": True})
            assert status == 200 and events_of(answer)[-1] == "[DONE]"
        assert invoked_path(json.dumps(body).encode()) == path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/encode", {"text": "a"}),
        ("/encode", {"input_ids": [[1], [2]]}),
        ("/v1/score", {"query": "a", "items": ["b", "c"], "label_token_ids": [1]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/classify", {"input": ["b", "c"]}),
    ],
)
async def test_what_ends_with_its_prompt_goes_to_a_prefill_worker_alone(path: str, body: dict[str, Any]) -> None:
    async with cluster() as c:
        assert (await c.post(path, body))[0] == 200
        (seen,) = c.prefills[0].seen
        assert (seen.path, seen.body) == (path, body) and not c.decodes[0].seen
        for unserved in UNSERVED:
            status, _, answer = await c.post(unserved, body)
            assert status == 404 and json.loads(answer)["error"]["code"] == "model_has_no_head"
        assert len(c.prefills[0].seen) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b'{"model": "m"}', b"{", b'{"messages"', b"\xff", b"[" * 500]
)
async def test_a_body_of_no_api_is_refused_and_goes_nowhere(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        invoked_path(body)
    assert refused.value.status == 400
    async with cluster() as c:
        status, _, answer = await c.post("/invocations", body)
        assert status == 400 and json.loads(answer)["error"]["message"] == refused.value.message
        assert not c.decodes[0].seen and not c.prefills[0].seen


ROW = {"dp_rank": 0, "num_running_reqs": 2, "num_queued_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 70}


async def test_loads_are_those_of_all_workers() -> None:
    async with cluster(decode=2) as c:
        for worker in (c.prefills[0], c.decodes[1]):
            worker.loads = {"timestamp": 1, "loads": [ROW, {**ROW, "dp_rank": 1}]}
        status, told = await c.get("/v1/loads")
        assert status == 200 and told["version"] and told["dp_rank_count"] == 4
        assert datetime.fromisoformat(told["timestamp"]).tzinfo is not None
        assert [(row["dp_rank"], row["worker"], row["role"]) for row in told["loads"]] == [
            *((i, c.prefills[0].url, "prefill") for i in (0, 1)),
            *((i, c.decodes[1].url, "decode") for i in (2, 3)),  # the other one has no such route
        ]
        async with c.client.get(c.url + "/get_load") as response:
            (first, *rest) = await response.json()
        assert len(rest) == 3
        assert first == {
            "dp_rank": 0,
            "num_reqs": 5,
            "num_waiting_reqs": 3,
            "num_tokens": 70,
            "worker": c.prefills[0].url,
            "role": "prefill",
        }


@pytest.mark.parametrize(
    "told", [{}, {"loads": None}, {"loads": {}}, {"loads": [1, None, []]}, {"loads": [{"num_used_tokens": "many"}]}]
)
def test_what_a_worker_may_say_of_its_load(told: dict[str, Any]) -> None:
    rows = [old_row(row) for row in join_rows([("u", "decode", told)])]
    assert all(row["num_tokens"] == row["num_reqs"] == 0 for row in rows)


async def test_ping_is_health_and_the_version_needs_no_key() -> None:
    async with cluster(api_key="k", retry_max=0) as c:
        for method in ("GET", "POST", "HEAD"):
            async with c.client.request(method, c.url + "/ping") as response:
                assert response.status == 200
        assert (await c.get("/version"))[1].keys() == {"version"}
        for path in ("/v1/loads", "/loads", "/get_load"):
            assert (await c.get(path))[0] == 401
        for path in ("/tokenize", "/invocations"):
            assert (await c.post(path, {}))[0] == 401
        await c.decodes[0].stop()
        assert (await c.post("/invocations", CHAT, headers={"Authorization": "Bearer k"}))[0] == 502
        assert (await c.get("/ping"))[0] == 503


async def test_head_is_get_without_its_body_and_what_is_unknown_has_one_shape() -> None:
    async with cluster() as c:
        for path in (
            *("/v1/models", "/v1/models/decode-0", "/ping", "/version", "/v1/loads", "/get_loads", "/metrics"),
            "/workers",
        ):
            for end in ("", "/", "?a=b", "/?a=b"):
                async with c.client.head(c.url + path + end) as response:
                    assert response.status == 200 and await response.read() == b"", path + end
        for method, path, code in (
            ("GET", "/nowhere", "not_found"),
            ("POST", "/v2/models", "not_found"),
            ("GET", "/v1/", "not_found"),
            ("GET", "/invocations", "method_not_allowed"),
            ("PATCH", "/version", "method_not_allowed"),
            ("OPTIONS", "/v1/models", "method_not_allowed"),
        ):
            async with c.client.request(method, c.url + path) as response:
                error = (await response.json())["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["code"] == code, path
                assert response.status == (404 if code == "not_found" else 405)
                assert ("Allow" in response.headers) is (response.status == 405)
