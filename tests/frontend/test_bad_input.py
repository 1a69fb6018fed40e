"""Wrong fields of every API: each gets its 4xx in OpenAI's shape, and the next good request is served.

Bodies that are no request, wrong wrappings and bytes that are no HTTP: tests/hostile, at every door.
"""

import gzip
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.frontend.conftest import CONTEXT, Worker, wait_for

TOOL = {"type": "function", "function": {"name": "f"}}
USER = [{"role": "user", "content": "x"}]
CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

# (path, fields, the field that the error must name)
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    (CHAT, {"messages": USER, "max_tokens": 600}, "messages"),
    (CHAT, {"messages": USER, "max_tokens": -1}, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": USER, "max_tokens": 10**30}, "messages"),
    (CHAT, {"messages": USER, "temperature": -0.1}, "temperature"),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
    (CHAT, {"messages": USER, "top_p": 1.1}, "top_p"),
    (CHAT, {"messages": USER, "top_k": 0}, "top_k"),
    (CHAT, {"messages": USER, "min_p": -1}, "min_p"),
    (CHAT, {"messages": USER, "frequency_penalty": 3}, "frequency_penalty"),
    (CHAT, {"messages": USER, "presence_penalty": -3}, "presence_penalty"),
    (CHAT, {"messages": USER, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": USER, "n": 0}, "n"),
    (CHAT, {"messages": USER, "n": 129}, "n"),
    (CHAT, {"messages": USER, "n": 10**12}, "n"),
    (CHAT, {"messages": USER, "n": True}, "n"),
    (CHAT, {"messages": USER, "seed": 2**63}, "seed"),
    (CHAT, {"messages": USER, "seed": "x"}, "seed"),
    (CHAT, {"messages": USER, "stop": ["x"] * 33}, "stop"),
    (CHAT, {"messages": USER, "stop": ""}, "stop"),
    (CHAT, {"messages": USER, "stop": "x" * 2000}, "stop"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop[0]"),
    (CHAT, {"messages": USER, "stop": ["x" * 10_000_000]}, "stop"),
    (CHAT, {"messages": USER, "stop_regex": "("}, "stop_regex"),
    (CHAT, {"messages": USER, "stop_regex": ["a", "a*"]}, "stop_regex"),
    (CHAT, {"messages": USER, "stop_regex": "(?=a)"}, "stop_regex"),
    (CHAT, {"messages": USER, "stop_regex": ["a"] * 9}, "stop_regex"),
    (CHAT, {"messages": USER, "stop_regex": "a" * 10_000_000}, "stop_regex"),
    (CHAT, {"messages": USER, "stop_regex": 5}, "stop_regex"),
    (CHAT, {"messages": USER, "no_stop_trim": "yes"}, "no_stop_trim"),
    (CHAT, {"messages": USER, "stop_token_ids": [-1]}, "stop_token_ids"),
    (CHAT, {"messages": USER, "stop_token_ids": [260]}, "stop_token_ids"),
    (CHAT, {"messages": USER, "logit_bias": {"5": 101}}, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"999999": 1}}, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": USER, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": USER, "stream": "yes"}, "stream"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": USER, "tools": [{"type": "magic", "function": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
    (CHAT, {"messages": USER, "tools": [{"function": {}}]}, "tools[0].function.name"),
    (
        CHAT,
        {"messages": USER, "tools": [{"function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (CHAT, {"messages": USER, "tools": [TOOL, TOOL]}, "tools"),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": f"f{i}"}} for i in range(200)]}, "tools"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    (
        CHAT,
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": 5}},
        "response_format.json_schema",
    ),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    (CHAT, {"messages": USER, "json_schema": "{}", "ebnf": "start: a"}, "ebnf"),
    (CHAT, {"messages": USER, "json_schema": " "}, "json_schema"),
    (CHAT, {"messages": USER, "regex": 5}, "regex"),
    (CHAT, {"messages": USER, "regex": "a" * (256 * 1024 + 1)}, "regex"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": USER, "custom_logit_processor": "gASV"}, "custom_logit_processor"),
    (CHAT, {"messages": USER, "model": 5}, "model"),
    (CHAT, {"messages": USER, "rid": "x" * 300}, "rid"),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": None}, "prompt"),
    (COMPLETE, {"prompt": ""}, "prompt"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": ["a", ""]}, "prompt"),
    (COMPLETE, {"prompt": [[]]}, "prompt"),
    (COMPLETE, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETE, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETE, {"prompt": [260]}, "prompt"),
    (COMPLETE, {"prompt": [-1]}, "prompt"),
    (COMPLETE, {"prompt": [10**30]}, "prompt"),
    (COMPLETE, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETE, {"prompt": ["a"] * 100, "n": 128}, "prompt"),
    (COMPLETE, {"prompt": [1] * CONTEXT}, "prompt"),
    (COMPLETE, {"prompt": "a", "max_tokens": CONTEXT}, "prompt"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETE, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETE, {"prompt": "a", "logprobs": 6}, "logprobs"),
    (COMPLETE, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETE, {"prompt": "a", "echo": "yes"}, "echo"),
    (GENERATE, {}, "text"),
    (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"input_ids": []}, "input_ids"),
    (GENERATE, {"input_ids": [1, [2]]}, "input_ids"),
    (GENERATE, {"input_ids": [[1], []]}, "input_ids"),
    (GENERATE, {"input_ids": [99999]}, "input_ids"),
    (GENERATE, {"text": "a", "sampling_params": "greedy"}, "sampling_params"),
    (GENERATE, {"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
    (GENERATE, {"text": "a", "sampling_params": {"stop_regex": ["("]}}, "stop_regex"),
    (GENERATE, {"text": "a", "sampling_params": {"stop": ["x" * 10_000_000]}}, "stop"),
    (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": ""}}, "sampling_params.regex"),
    (GENERATE, {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
    (GENERATE, {"text": "a", "sampling_params": {"json_schema": "[" * 300_000}}, "sampling_params.json_schema"),
    (GENERATE, {"text": "a", "sampling_params": {"temperature": []}}, "sampling_params.temperature"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": 50}, "logprob_start_len"),
    (GENERATE, {"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    (GENERATE, {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
    (GENERATE, {"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
    (GENERATE, {"text": ["a", "b"], "rid": ["one"]}, "rid"),
    (GENERATE, {"text": "a", "rid": ""}, "rid"),
    (GENERATE, {"text": "a", "image_data": "x"}, "image_data"),
    (GENERATE, {"text": "a", "lora_path": "x"}, "lora_path"),
    (GENERATE, {"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    (GENERATE, {"text": "a", "return_logprob": True, "token_ids_logprob": [10**9]}, "token_ids_logprob"),
    ("/abort_request", {}, "rid"),
    ("/abort_request", {"rid": 5}, "rid"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ("/tokenize", {"prompt": 5}, "prompt"),
]


def check_error(status: int, body: Any, *, expected: int = 400) -> dict[str, Any]:
    assert status == expected, body
    error = body["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["message"]
        and error["type"] == "invalid_request_error"
    )
    return dict(error)


def check_good(worker: Worker) -> None:
    good = worker.post(COMPLETE, {"prompt": "fine", "max_tokens": 5})
    assert good.status_code == 200 and good.json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize(
    ("path", "body", "field"), FIELDS, ids=[f"{p.strip('/')}-{f}-{i}" for i, (p, _, f) in enumerate(FIELDS)]
)
def test_wrong_fields_are_named(worker: Worker, path: str, body: dict[str, Any], field: str) -> None:
    seen = len(worker.scheduler.seen)
    answer = worker.post(path, body)
    error = check_error(answer.status_code, answer.json())
    assert error["param"] == field and field.split(".")[-1].split("[")[0] in error["message"]
    assert len(worker.scheduler.seen) == seen  # nothing of it reached the engine
    check_good(worker)


def test_context_errors_carry_openai_s_code(worker: Worker) -> None:
    for body in ({"prompt": [1] * CONTEXT}, {"prompt": "a", "max_tokens": CONTEXT}):
        assert worker.post(COMPLETE, body).json()["error"]["code"] == "context_length_exceeded"


def test_wrong_places_and_methods(worker: Worker) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETE, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/../../etc/passwd", 404),
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


def test_a_body_that_never_comes_and_a_client_that_leaves_do_no_harm(worker: Worker) -> None:
    parts = urlsplit(worker.url)
    socks = [socket.create_connection((parts.hostname, parts.port), timeout=10) for _ in range(20)]
    for sock in socks:
        sock.sendall(
            b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        )
    check_good(worker)
    for sock in socks:
        sock.close()
    check_good(worker)


def test_no_internal_error_was_logged(worker: Worker) -> None:
    wait_for(lambda: worker.scheduler.num_running == 0)
    log = worker.log.read_text()
    assert "Traceback" not in log and "internal error" not in log, log[-3000:]
