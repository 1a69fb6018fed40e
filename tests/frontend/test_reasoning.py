"""Reasoning over HTTP: shown apart from the text, counted, and what the engine receives about it.

The stand-in's model repeats its prompt, so a prompt with an end of thinking makes an answer that has it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.conftest import Worker, byte_tokenizer, start_worker, write_checkpoint

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
REASONING = "<|user|>Hm, so.\n</think>"


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    engine = {"reasoning_parser": "deepseek-r1", "tool_call_parser": "qwen25"}
    with start_worker(tmp_path_factory.mktemp("r1"), engine=engine) as w:
        yield w


def body(text: str = "Hm, so.\n</think>\n\nFive.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 200, "stop": "<|assistant|>", **more}


def test_reasoning_is_apart_from_the_text_and_counted(r1: Worker) -> None:
    answer = r1.post(CHAT, body()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("<|user|>Hm, so.", "Five.")
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["reasoning_tokens"] == len(REASONING)


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_shows_reasoning_in_deltas(r1: Worker, streams: bool) -> None:
    more = {"stream": True, "n": 2, "stream_reasoning": streams, "stream_options": {"include_usage": True}}
    events = r1.events(CHAT, body(**more))
    for index in (0, 1):
        deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == index]
        reasoning = [d["reasoning_content"] for d in deltas if "reasoning_content" in d]
        assert "".join(reasoning) == "<|user|>Hm, so." and (streams or len(reasoning) == 1)
        assert "".join(d.get("content") or "" for d in deltas) == "Five."
        kinds = [
            "r" if "reasoning_content" in d else "c" for d in deltas if d.get("reasoning_content") or d.get("content")
        ]
        assert kinds == sorted(kinds, reverse=True)
    assert events[-1]["usage"]["reasoning_tokens"] == 2 * len(REASONING)


def test_the_text_stays_as_it_is_on_request(r1: Worker) -> None:
    answer = r1.post(CHAT, body(separate_reasoning=False)).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == REASONING + "\n\nFive." and message["reasoning_content"] is None
    assert answer["usage"]["reasoning_tokens"] == len(REASONING)


def test_reasoning_that_length_cuts_is_reasoning(r1: Worker) -> None:
    choice = r1.post(CHAT, body(max_tokens=12)).json()["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "<|user|>Hm,",
        "tool_calls": None,
    }
    assert choice["finish_reason"] == "length"


def test_calls_follow_reasoning(r1: Worker) -> None:
    answer = r1.post(CHAT, body(f"Hm.</think>\n{CALL}", tools=[TOOL])).json()["choices"][0]
    assert answer["message"]["reasoning_content"] == "<|user|>Hm." and answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and answer["finish_reason"] == "tool_calls"


def test_an_answer_without_reasoning_has_none(worker: Worker) -> None:
    answer = worker.post(CHAT, body()).json()
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["choices"][0]["message"]["content"] == REASONING + "\n\nFive."
    assert answer["usage"]["reasoning_tokens"] == 0


def test_what_the_engine_receives(r1: Worker) -> None:
    r1.post(CHAT, body(max_tokens=1))
    assert r1.scheduler.seen[-1].sampling.reasoning is None
    r1.post(CHAT, body(max_tokens=1, response_format={"type": "json_object"}, separate_reasoning=False))
    gate = r1.scheduler.seen[-1].sampling.reasoning
    assert gate is not None and (gate.end, gate.opening, gate.budget) == ("</think>", "open", None)
    r1.post(CHAT, body(max_tokens=1, thinking_token_budget=5))
    gate = r1.scheduler.seen[-1].sampling.reasoning
    assert gate is not None and (gate.forced, gate.budget) == ("</think>", 5)
    closed = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>a</think>b"}]
    more = {"continue_final_message": True, "response_format": {"type": "json_object"}}
    r1.post(CHAT, body(max_tokens=1, **more) | {"messages": closed})
    assert r1.scheduler.seen[-1].sampling.reasoning is None


def test_reasoning_is_left_out_on_request(r1: Worker) -> None:
    for more in ({}, {"separate_reasoning": False}):
        message = r1.post(CHAT, body(include_reasoning=False, **more)).json()["choices"][0]["message"]
        assert message["content"] == "Five." and message["reasoning_content"] is None
    events = r1.events(CHAT, body(include_reasoning=False, stream=True))
    assert "".join(c["delta"].get("content") or "" for e in events for c in e["choices"]) == "Five."
    assert not any("reasoning_content" in c["delta"] for e in events for c in e["choices"])


def test_generate_follows_reasoning_on_request(r1: Worker, worker: Worker) -> None:
    sampling = {"max_new_tokens": 1, "regex": "a"}
    for more, expected in (
        ({}, None),
        ({"require_reasoning": True}, ("open", None)),
        ({"max_thinking_tokens": 4}, ("open", 4)),
        ({"text": "x</think>", "max_thinking_tokens": 4}, None),
    ):
        assert r1.post("/generate", {"text": "x", "sampling_params": sampling, **more}).status_code == 200
        gate = r1.scheduler.seen[-1].sampling.reasoning
        assert (None if gate is None else (gate.opening, gate.budget)) == expected
    wrong = r1.post("/generate", {"text": "x", "max_thinking_tokens": -1})
    assert wrong.status_code == 400 and "max_thinking_tokens: must be at least 0" in wrong.text
    for name, value in (("require_reasoning", True), ("max_thinking_tokens", 3)):
        wrong = worker.post("/generate", {"text": "x", name: value})
        assert wrong.status_code == 400 and f"{name}: this server was started without --reasoning-parser" in wrong.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget: must be at least 0, got -1"),
        ({"thinking_token_budget": "x"}, "thinking_token_budget: expected `int | null`, got `str`"),
        ({"separate_reasoning": 1}, "separate_reasoning: expected `bool | null`, got `int`"),
    ],
)
def test_a_wrong_value_is_named(r1: Worker, more: dict[str, Any], says: str) -> None:
    answer = r1.post(CHAT, body(**more))
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_budget_needs_a_parser(worker: Worker) -> None:
    answer = worker.post(CHAT, body(thinking_token_budget=5))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
    assert "--reasoning-parser" in answer.json()["error"]["message"]


def test_effort_reaches_the_template_as_its_switches(tmp_path: Path) -> None:
    with start_worker(tmp_path / "gpt", engine={"reasoning_parser": "gpt-oss"}) as w:
        refused = w.post(CHAT, body(reasoning_effort="none"))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"
    config = write_checkpoint(tmp_path / "qwen" / "tiny") / "tokenizer_config.json"
    template = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    with start_worker(tmp_path / "qwen", engine={"reasoning_parser": "qwen3"}) as w:
        w.post(CHAT, body("x", reasoning_effort="none", max_tokens=1))
        w.post(CHAT, body("x", reasoning_effort="low", chat_template_kwargs={"thinking": 0}, max_tokens=1))
        prompts = [byte_tokenizer().decode(request.input_ids) for request in w.scheduler.seen]
    assert prompts[-2:] == ["x|none|False|False", "x|low|True|0"]
