"""Errors of a worker that OpenAI's clients tell apart. Hostile input: tests/hostile, at every door."""

import gzip
import json
from typing import Any

from tests.frontend.conftest import Worker

COMPLETE = "/v1/completions"


def check_error(status: int, body: Any, *, expected: int = 400) -> dict[str, Any]:
    assert status == expected, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    return dict(error)


def check_good(worker: Worker) -> None:
    good = worker.post(COMPLETE, {"prompt": "fine", "max_tokens": 5})
    assert good.status_code == 200 and good.json()["choices"][0]["text"] == "fine"


def test_wrong_places_and_methods(worker: Worker) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETE, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/nowhere", 404),
        ("PATCH", "/generate", 405),
    ):
        answer = worker.http.request(method, path)
        check_error(answer.status_code, answer.json(), expected=status)
    wrong_model = worker.post(COMPLETE, {"model": "gpt-4", "prompt": "a"})
    assert check_error(wrong_model.status_code, wrong_model.json(), expected=404)["code"] == "model_not_found"
    check_good(worker)


def test_a_compressed_body_is_served(worker: Worker) -> None:
    good = gzip.compress(json.dumps({"prompt": "fine", "max_tokens": 5}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    assert worker.http.post(COMPLETE, content=good, headers=headers).status_code == 200
    check_good(worker)
