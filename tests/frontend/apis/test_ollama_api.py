"""Ollama's API through the real `ollama` client. The stand-in's model repeats its prompt, so a prompt says what is answered."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from engine.frontend.apis.ollama.body import CHAT, GENERATE, chat_of, completion_of
from service.http.errors import ApiError
from tests.frontend.apis.rendering import template_messages
from tests.frontend.conftest import CALL, CONTEXT, TEMPLATE, TOOL, Worker, wait_for
from tests.hostile.wrong_ollama import WRONG_OLLAMA

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[ollama.Client]:
    with ollama.Client(host=worker.url) as c:
        yield c


@pytest.fixture(scope="module")
def reasoner(thinker: Worker) -> Iterator[ollama.Client]:
    with ollama.Client(host=thinker.url) as c:
        yield c


def test_a_chat(client: ollama.Client, worker: Worker) -> None:
    answer = client.chat("tiny", [{"role": "system", "content": "S"}, *USER], options={"num_predict": 9})
    assert worker.prompt == "<|system|>S<|user|>hello<|assistant|>"
    assert (answer.message.role, answer.message.content) == ("assistant", "<|system|")
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (len(worker.prompt), 9)
    assert answer.total_duration > 0 and answer.created_at.endswith("Z")


def test_a_chat_streams_unless_stream_is_false(client: ollama.Client, worker: Worker) -> None:
    text = "🎉 naïve\u2028你好\x85"  # two of its characters end lines for some readers
    limit = len(f"<|user|>{text}".encode())
    messages = [{"role": "user", "content": text}]
    *parts, last = client.chat("tiny", messages, stream=True, options={"num_predict": limit})
    assert "".join(part.message.content for part in parts) == f"<|user|>{text}" and not last.message.content
    assert not any(part.done for part in parts) and (last.done_reason, last.eval_count) == ("length", limit)
    response = worker.post("/api/chat", {"model": "tiny", "messages": USER, "options": {"num_predict": 3}})
    assert response.headers["content-type"] == "application/x-ndjson" and response.text.endswith("\n")
    assert [json.loads(line)["done"] for line in response.text.splitlines()][-1] is True


def test_the_same_prompt_as_a_chat_of_openai(client: ollama.Client, worker: Worker) -> None:
    client.chat("tiny:latest", USER, options={"num_predict": 2})
    ids = worker.scheduler.seen[-1].input_ids
    worker.post("/v1/chat/completions", {"messages": USER, "max_tokens": 2})
    assert worker.scheduler.seen[-1].input_ids == ids
    client.generate("tiny", "hello", options={"num_predict": 2})
    assert worker.scheduler.seen[-1].input_ids == ids


def test_options_reach_the_engine(client: ollama.Client, worker: Worker) -> None:
    sampled = {"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "seed": 7, "stop": ["zz"]}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repeat_penalty": 1.1}
    client.chat("tiny", USER, options={**sampled, **penalties, "num_ctx": 99, "num_predict": 4}, keep_alive="5m")
    seen = worker.scheduler.seen[-1].sampling
    assert (seen.temperature, seen.top_k, seen.top_p, seen.min_p, seen.stop) == (0.5, 3, 0.4, 0.1, ("zz",))
    assert (seen.presence_penalty, seen.frequency_penalty, seen.repetition_penalty) == (0.1, 0.2, 1.1)
    assert seen.max_new_tokens == 4 and seen.seed == 7
    client.chat("tiny", USER, options={"num_predict": -1, "top_k": 0, "seed": -1})
    seen = worker.scheduler.seen[-1].sampling
    assert seen.top_k == -1 and seen.max_new_tokens == CONTEXT - len(worker.prompt)


def test_a_stop_string_ends_the_answer(client: ollama.Client) -> None:
    answer = client.generate("tiny", "hello", options={"stop": ["lo"]})
    assert (answer.response, answer.done_reason) == ("<|user|>hel", "stop")


def test_prompts_are_written_by_the_template_or_raw(client: ollama.Client, worker: Worker) -> None:
    *parts, last = client.generate("tiny", "hello", system="S", stream=True, options={"num_predict": 10})
    assert worker.prompt == "<|system|>S<|user|>hello<|assistant|>"
    assert "".join(part.response for part in parts) == "<|system|>" and last.done and last.response == ""
    answer = client.generate("tiny", "hello", raw=True, options={"num_predict": 5})
    assert worker.prompt == "hello" and answer.eval_count == 5


def test_a_format_is_a_constraint(client: ollama.Client, worker: Worker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format, wanted in (("json", {"type": "object"}), (schema, schema)):
        client.chat("tiny", USER, format=format, options={"num_predict": 2})
        grammar = worker.scheduler.seen[-1].sampling.grammar
        assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.source) == wanted


def test_tools_and_thinking_go_round(reasoner: ollama.Client) -> None:
    question = {"role": "user", "content": f"Hm.</think>Now.\n{CALL}"}
    asked: dict[str, Any] = {"tools": [TOOL], "think": True, "options": {"stop": ["<|assistant|>"]}}
    answer = reasoner.chat("tiny", [question], **asked).message
    assert (answer.thinking, answer.content) == ("<|user|>Hm.", "Now.")
    (call,) = answer.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
    parts = list(reasoner.chat("tiny", [question], **asked, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "<|user|>Hm."
    assert "".join(part.message.content or "" for part in parts) == "Now."
    calls = [call.function for part in parts for call in part.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1})]
    assert parts[-1].done_reason == "stop" and not parts[-1].message.tool_calls
    result = {"role": "tool", "content": "it is 2", "tool_name": "add"}
    assert reasoner.chat("tiny", [question, answer, result], **asked, stream=False).done
    thought = reasoner.generate("tiny", "Hm.</think>Now.", options={"stop": ["<|assistant|>"]})
    assert (thought.thinking, thought.response) == ("<|user|>Hm.", "Now.")


def test_a_call_that_is_cut_has_no_arguments(reasoner: ollama.Client) -> None:
    content = f"</think>{CALL}"
    options = {"num_predict": len(f"<|user|>{content}") - 18}
    answer = reasoner.chat("tiny", [{"role": "user", "content": content}], tools=[TOOL], options=options)
    assert answer.done_reason == "length" and answer.message.tool_calls[0].function.arguments == {}


def test_nothing_to_answer_loads_the_model(client: ollama.Client, worker: Worker) -> None:
    seen = len(worker.scheduler.seen)
    assert client.generate("tiny").done_reason == client.chat("tiny").done_reason == "load"
    assert [part.done_reason for part in client.generate("tiny", stream=True)] == ["load"]
    assert len(worker.scheduler.seen) == seen
    with pytest.raises(ollama.ResponseError) as missing:
        client.generate("other")
    assert missing.value.status_code == 404


def test_models_are_described(client: ollama.Client, reasoner: ollama.Client) -> None:
    (model,) = client.list().models
    assert (model.model, model.details.family, model.details.format) == ("tiny", "qwen3", "safetensors")
    assert len(model.digest) == 64 and model.modified_at is not None
    (running,) = client.ps().models
    assert running.model == "tiny" and running.expires_at is not None
    shown = client.show("tiny:latest")
    assert shown.modelinfo["qwen3.context_length"] == CONTEXT and shown.template == TEMPLATE
    assert shown.capabilities == ["completion"]
    assert reasoner.show("tiny").capabilities == ["completion", "tools", "thinking"]
    with pytest.raises(ollama.ResponseError) as missing:
        client.show("other")
    assert missing.value.status_code == 404 and "does not exist" in missing.value.error


def test_the_version_is_one_of_ollama(worker: Worker) -> None:
    assert worker.http.get("/api/version").json()["version"].count(".") == 2


def test_errors_are_ollamas(client: ollama.Client, worker: Worker) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat("tiny", USER, options={"temperature": -1})
    assert refused.value.status_code == 400 and refused.value.error.startswith("options.temperature: ")
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat("tiny", [{"role": "user", "content": "REFUSE"}], options={"num_predict": 5})
    assert refused.value.status_code == 503
    with pytest.raises(ollama.ResponseError, match="the transfer broke"):
        list(client.chat("tiny", [{"role": "user", "content": "BREAK"}], stream=True))


def test_a_client_that_leaves_ends_its_request(client: ollama.Client, worker: Worker) -> None:
    with worker.http.stream("POST", "/api/generate", json={"model": "tiny", "prompt": "SLOW"}) as response:
        next(response.iter_lines())
    worker.wait_idle()
    wait_for(lambda: any(rid.startswith("chat-") for rid in worker.scheduler.aborted))


def chat(**more: Any) -> Any:
    body, ignored = CHAT.decode(json.dumps({"model": "m", **more}).encode())
    assert ignored == []
    return chat_of(body)


def test_messages_become_those_of_a_chat() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
        {"role": "assistant", "content": "so"},
    ]
    body = chat(messages=turns, think=False)
    _, called, result, begun = template_messages(body.messages)
    assert called["reasoning_content"] == "hm" and called["tool_calls"] == [{"type": "function", **call}]
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "2")
    assert begun["content"] == "so" and body.continue_final_message and body.stream
    assert body.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert chat(messages=turns[:2]).continue_final_message is False
    assert chat(think="high").reasoning_effort == "high" and chat(stream=False).stream is False


def test_a_raw_prompt_has_no_system_prompt() -> None:
    body, _ = GENERATE.decode(b'{"model": "m", "prompt": "a", "system": "s"}')
    with pytest.raises(ApiError, match="system: needs a chat template"):
        completion_of(body)


def test_what_cannot_be_translated_is_named(worker: Worker) -> None:
    for path, body, field in WRONG_OLLAMA:
        assert field in worker.error(path, body), (body, field)
