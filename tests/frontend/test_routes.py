"""Routes of a worker beside its APIs: SageMaker's, the version; slashes, HEAD, unknown paths; pages of allowed origins."""

import gzip
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from engine.frontend.apis.native.score import probabilities
from engine.frontend.apis.shared.prefill_only import shares
from engine.frontend.routes import ROUTES
from service.http.routes import UNSERVED
from tests.frontend.conftest import Worker, start_worker

PATHS = (
    "/generate /v1/completions /v1/chat/completions /v1/embeddings /encode /v1/score /v1/rerank /rerank /v2/rerank "
    "/score /classify /v1/classify /v1/messages /api/chat /api/generate /invocations /v1/messages/count_tokens "
    "/tokenize /v1/tokenize /detokenize /v1/detokenize /v1/completions/render /v1/chat/completions/render /liveness"
)
ANYWHERE = set(PATHS.split())
PAGE = "http://page.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.parametrize(
    ("body", "object_"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "chat.completion"),
        ({"prompt": "a", "max_tokens": 1}, "text_completion"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 1}}, None),
        ({"input_ids": [70], "sampling_params": {"max_new_tokens": 1}}, None),
    ],
)
def test_an_invocation_is_answered_by_the_api_of_its_body(worker: Worker, body: dict[str, Any], object_: str) -> None:
    answer = worker.post("/invocations", body)
    assert answer.status_code == 200 and answer.json().get("object") == object_
    if object_:
        assert len(worker.events("/invocations", {**body, "stream": True})) >= 1
    else:
        assert answer.json()["meta_info"]["completion_tokens"] == 1


def test_an_invocation_of_no_api_is_refused(worker: Worker) -> None:
    for body in ({}, {"model": "m"}, []):
        assert worker.error("/invocations", body)["type"] == "invalid_request_error"
    assert worker.error("/invocations", {"messages": [], "prompt": "a"})["param"] == "messages"  # it is a chat


def test_a_route_that_needs_another_model_says_which_and_what_is_here(worker: Worker) -> None:
    for path, why in UNSERVED.items():
        for end in ("", "/"):
            error = worker.error(path + end, {"model": "m", "query": "a", "documents": ["b"]}, 404)
            assert error["code"] == "model_has_no_head"
            assert error["message"] == f"{path} {why}"
        assert worker.http.get(path).status_code == 405
    assert not UNSERVED.keys() & worker.http.get("/openapi.json").json()["paths"].keys()


@pytest.mark.parametrize(
    ("logprobs", "chances", "softmax"),
    [
        ([math.log(0.5), math.log(0.25)], [0.5, 0.25], [2 / 3, 1 / 3]),
        ([-math.inf, math.log(0.25)], [0.0, 0.25], [0.0, 1.0]),
        ([-math.inf, -math.inf], [0.0, 0.0], [0.5, 0.5]),
        ([-2000.0, -2000.0 + math.log(3)], [0.0, 0.0], [0.25, 0.75]),
    ],
)
def test_scores(logprobs: list[float], chances: list[float], softmax: list[float]) -> None:
    assert probabilities(logprobs) == pytest.approx(chances) and shares(logprobs) == pytest.approx(softmax)


def test_wrong_places_and_methods_are_errors_of_openai(worker: Worker) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404), ("POST", "/v1/nowhere", 404), ("PATCH", "/generate", 405),
        ("GET", "/nowhere/", 404), ("GET", "/generate/", 405), ("GET", "/v1/", 404),
    ):  # fmt: skip
        answer = worker.http.request(method, path)
        error = answer.json()["error"]
        assert answer.status_code == status and error["message"] and error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}
    assert worker.error("/v1/completions", {"model": "gpt-4", "prompt": "a"}, 404)["code"] == "model_not_found"


def test_a_compressed_body_is_served(worker: Worker) -> None:
    good = gzip.compress(json.dumps({"prompt": "fine", "max_tokens": 5}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = worker.http.post("/v1/completions", content=good, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "fine"


def test_ping_and_version(worker: Worker) -> None:
    for method in ("GET", "POST"):
        assert worker.http.request(method, "/ping").json()["status"] == "ok"
    assert worker.http.get("/version").json() == {"version": worker.http.get("/v1/loads").json()["version"]}


def test_a_slash_at_the_end_and_head(worker: Worker) -> None:
    body = {"prompt": "abc", "max_tokens": 2}
    assert worker.post("/v1/completions/", body).json()["choices"][0]["text"] == "a"
    assert worker.post("/tokenize/?x=1", {"prompt": "a"}).json()["count"] == 2
    for path in ("/v1/models", "/v1/models/tiny", "/ping", "/version", "/metrics", "/get_load", "/openapi.json"):
        for end in ("", "/"):
            head = worker.http.head(path + end)
            assert head.status_code == 200 and not head.content, path + end


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    flags = {"allowed_origins": (PAGE,), "api_key": "k", "sse_keep_alive_interval_s": 0.04}
    with start_worker(tmp_path_factory.mktemp("shared"), server=flags) as started:
        yield started


def test_a_page_of_an_allowed_origin_reads_answers_streams_and_errors(shared: Worker) -> None:
    headers, key = {"Origin": PAGE}, {"Authorization": "Bearer k"}
    asked = shared.http.request("OPTIONS", "/generate", headers=headers | ASKS)
    assert asked.status_code == 204 and asked.headers["access-control-allow-headers"] == "authorization"
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1}}
    for status, answer in (
        (200, shared.post("/generate", body, headers=headers | key)),
        (400, shared.post("/generate", {}, headers=headers | key)),
        (401, shared.post("/generate", body, headers=headers)),
        (404, shared.http.get("/nowhere", headers=headers | key)),
    ):
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE
    with shared.http.stream("POST", "/generate", json={**body, "text": "HANG"}, headers=headers | key) as early:
        assert early.headers["access-control-allow-origin"] == PAGE and early.headers["x-request-id"]
    shared.wait_idle()
    foreign = {"Origin": "http://evil.example"}
    refused = shared.http.request("OPTIONS", "/generate", headers=foreign | ASKS)
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert shared.post("/generate", body, headers=foreign | key).status_code == 403


def test_a_path_belongs_to_any_frontend_or_to_the_main_one_with_all_its_methods() -> None:
    """A frontend beside the main one forwards by path: it must not forward requests for tokens."""
    answered = {(route.path, route.anywhere) for route in ROUTES}
    assert len(answered) == len({path for path, _ in answered})
    assert {path for path, anywhere in answered if anywhere} == ANYWHERE
