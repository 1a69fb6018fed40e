"""Reasoning over HTTP: shown apart from the text, counted, and what the engine receives about it.

The stand-in's model repeats its prompt, so a prompt with an end of thinking makes an answer that has it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.conftest import CALL, TOOL, Worker, byte_tokenizer, start_worker, write_checkpoint

CHAT = "/v1/chat/completions"
REASONING = "<|user|>Hm, so.\n</think>"


def body(text: str = "Hm, so.\n</think>\n\nFive.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 200, "stop": "<|assistant|>", **more}


def test_reasoning_is_apart_from_the_text_and_counted(thinker: Worker) -> None:
    answer = thinker.post(CHAT, body()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("<|user|>Hm, so.", "Five.")
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["reasoning_tokens"] == len(REASONING)


@pytest.mark.parametrize("streams", [True, False])
def test_a_stream_shows_reasoning_in_deltas(thinker: Worker, streams: bool) -> None:
    more = {"stream": True, "n": 2, "stream_reasoning": streams, "stream_options": {"include_usage": True}}
    events = thinker.events(CHAT, body(**more))
    for index in (0, 1):
        deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == index]
        reasoning = [d["reasoning_content"] for d in deltas if "reasoning_content" in d]
        assert "".join(reasoning) == "<|user|>Hm, so." and (streams or len(reasoning) == 1)
        assert "".join(d.get("content") or "" for d in deltas) == "Five."
        kinds = [k for d in deltas for k in ("reasoning_content", "content") if d.get(k)]
        assert kinds == sorted(kinds, reverse=True), "the text comes last"
    assert events[-1]["usage"]["reasoning_tokens"] == 2 * len(REASONING)


def test_the_text_stays_as_it_is_on_request(thinker: Worker) -> None:
    answer = thinker.post(CHAT, body(separate_reasoning=False)).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == REASONING + "\n\nFive." and message["reasoning_content"] is None
    assert answer["usage"]["reasoning_tokens"] == len(REASONING)


def test_reasoning_that_length_cuts_is_reasoning(thinker: Worker) -> None:
    choice = thinker.post(CHAT, body(max_tokens=12)).json()["choices"][0]
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    assert choice["message"] == message | {"reasoning_content": "<|user|>Hm,"} and choice["finish_reason"] == "length"


def test_calls_follow_reasoning(thinker: Worker) -> None:
    answer = thinker.post(CHAT, body(f"Hm.</think>\n{CALL}", tools=[TOOL])).json()["choices"][0]
    assert answer["message"]["reasoning_content"] == "<|user|>Hm." and answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and answer["finish_reason"] == "tool_calls"


def test_an_answer_without_reasoning_has_none(worker: Worker) -> None:
    answer = worker.post(CHAT, body()).json()
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["choices"][0]["message"]["content"] == REASONING + "\n\nFive."
    assert answer["usage"]["reasoning_tokens"] == 0


def test_what_the_engine_receives(thinker: Worker) -> None:
    thinker.post(CHAT, body(max_tokens=1))
    assert thinker.scheduler.seen[-1].sampling.reasoning is None
    thinker.post(CHAT, body(max_tokens=1, response_format={"type": "json_object"}, separate_reasoning=False))
    gate = thinker.scheduler.seen[-1].sampling.reasoning
    assert gate is not None and (gate.end, gate.opening, gate.budget) == ("</think>", "open", None)
    thinker.post(CHAT, body(max_tokens=1, thinking_token_budget=5))
    gate = thinker.scheduler.seen[-1].sampling.reasoning
    assert gate is not None and (gate.forced, gate.budget) == ("</think>", 5)
    closed = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>a</think>b"}]
    more = {"continue_final_message": True, "response_format": {"type": "json_object"}}
    thinker.post(CHAT, body(max_tokens=1, **more) | {"messages": closed})
    assert thinker.scheduler.seen[-1].sampling.reasoning is None


def test_reasoning_is_left_out_on_request(thinker: Worker) -> None:
    for more in ({}, {"separate_reasoning": False}):
        message = thinker.post(CHAT, body(include_reasoning=False, **more)).json()["choices"][0]["message"]
        assert message["content"] == "Five." and message["reasoning_content"] is None
    events = thinker.events(CHAT, body(include_reasoning=False, stream=True))
    assert "".join(c["delta"].get("content") or "" for e in events for c in e["choices"]) == "Five."
    assert not any("reasoning_content" in c["delta"] for e in events for c in e["choices"])


def test_generate_follows_reasoning_on_request(thinker: Worker, worker: Worker) -> None:
    sampling = {"max_new_tokens": 1, "regex": "a"}
    for more, expected in (
        ({}, None),
        ({"require_reasoning": True}, ("open", None)),
        ({"max_thinking_tokens": 4}, ("open", 4)),
        ({"text": "x</think>", "max_thinking_tokens": 4}, None),
    ):
        assert thinker.post("/generate", {"text": "x", "sampling_params": sampling, **more}).status_code == 200
        gate = thinker.scheduler.seen[-1].sampling.reasoning
        assert (None if gate is None else (gate.opening, gate.budget)) == expected
    wrong = thinker.error("/generate", {"text": "x", "max_thinking_tokens": -1})
    assert "max_thinking_tokens: must be at least 0" in wrong["message"]
    for name, value in (("require_reasoning", True), ("max_thinking_tokens", 3)):
        wrong = worker.error("/generate", {"text": "x", name: value})
        assert f"{name}: this server was started without --reasoning-parser" in wrong["message"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget: must be at least 0, got -1"),
        ({"thinking_token_budget": "x"}, "thinking_token_budget: expected `int | null`, got `str`"),
        ({"separate_reasoning": 1}, "separate_reasoning: expected `bool | null`, got `int`"),
    ],
)
def test_a_wrong_value_is_named(thinker: Worker, more: dict[str, Any], says: str) -> None:
    assert says in thinker.error(CHAT, body(**more))["message"]


def test_a_budget_needs_a_parser(worker: Worker) -> None:
    error = worker.error(CHAT, body(thinking_token_budget=5))
    assert error["param"] == "thinking_token_budget" and "--reasoning-parser" in error["message"]


def test_effort_reaches_the_template_as_its_switches(tmp_path: Path) -> None:
    with start_worker(tmp_path / "gpt", engine={"reasoning_parser": "gpt-oss"}) as w:
        assert w.error(CHAT, body(reasoning_effort="none"))["param"] == "reasoning_effort"
    config = write_checkpoint(tmp_path / "qwen" / "tiny") / "tokenizer_config.json"
    template = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    with start_worker(tmp_path / "qwen", engine={"reasoning_parser": "qwen3"}) as w:
        w.post(CHAT, body("x", reasoning_effort="none", max_tokens=1))
        w.post(CHAT, body("x", reasoning_effort="low", chat_template_kwargs={"thinking": 0}, max_tokens=1))
        prompts = [byte_tokenizer().decode(request.input_ids) for request in w.scheduler.seen]
    assert prompts[-2:] == ["x|none|False|False", "x|low|True|0"]
