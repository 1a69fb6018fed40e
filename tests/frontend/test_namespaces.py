"""`cache_salt` and `extra_key` over real HTTP: which namespace each prompt's samples reach the scheduler with."""

from typing import Any

import pytest

from tests.frontend.conftest import Worker

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
ONE = {"sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize(
    ("path", "body", "namespaces"),
    [
        ("/generate", {"text": "a", **ONE}, [()]),
        ("/generate", {"text": "a", "extra_key": "k", **ONE}, [("k",)]),
        ("/generate", {"text": ["a", "b"], "extra_key": "k", "cache_salt": ["s", ""], **ONE}, [("s", "k"), ("k",)]),
        ("/generate", {"text": ["a", "b"], "extra_key": [None, "k"], **ONE}, [(), ("k",)]),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "cache_salt": ["s", "t"], "n": 2, "max_tokens": 1},
            [("s",)] * 2 + [("t",)] * 2,
        ),
        ("/v1/chat/completions", {**CHAT, "cache_salt": "s", "extra_key": "k"}, [("s", "k")]),
        ("/v1/chat/completions", {**CHAT, "cache_salt": None}, [()]),
    ],
)
def test_the_namespace_of_each_sample(worker: Worker, path: str, body: dict[str, Any], namespaces: list[Any]) -> None:
    before = len(worker.scheduler.seen)
    assert worker.post(path, body).status_code == 200
    assert [request.namespace for request in worker.scheduler.seen[before:]] == namespaces
