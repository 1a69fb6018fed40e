"""Anthropic's API through the real `anthropic` client. The stand-in's model repeats its prompt, so a prompt says what is answered."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from engine.frontend.apis.anthropic.body import MESSAGES
from engine.frontend.apis.anthropic.translate import sampled_chat_of
from tests.frontend.apis.rendering import template_messages
from tests.frontend.conftest import CALL, CONTEXT, Worker, start_worker, wait_for
from tests.hostile.wrong_messages import WRONG_MESSAGES

TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[anthropic.Anthropic]:
    with client_of(worker) as c:
        yield c


@pytest.fixture(scope="module")
def caller(qwen: Worker) -> Iterator[anthropic.Anthropic]:
    with client_of(qwen) as c:
        yield c


@pytest.fixture(scope="module")
def reasoner(thinker: Worker) -> Iterator[anthropic.Anthropic]:
    with client_of(thinker) as c:
        yield c


def client_of(worker: Worker, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=worker.url, api_key=key, max_retries=0)


def ask(client: anthropic.Anthropic, content: Any = "hello", **more: Any) -> Any:
    asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": content}], **more}
    return client.messages.create(**asked)


def test_a_message(client: anthropic.Anthropic, worker: Worker) -> None:
    answer = ask(client, system="S")
    assert worker.prompt == "<|system|>S<|user|>hello<|assistant|>"
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [{"type": "text", "text": "<|system|"}]
    usage = answer.usage
    assert answer.id.startswith("msg_") and (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert usage.input_tokens + usage.cache_read_input_tokens == len(worker.prompt)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (4, 0, 9)


def test_the_same_prompt_as_a_chat(client: anthropic.Anthropic, worker: Worker) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    answer = ask(client, messages=turns, system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}])
    seen = worker.scheduler.seen[-1]
    chat = {"messages": [{"role": "system", "content": "S"}, *turns], "max_tokens": 9}
    other = worker.post("/v1/chat/completions", chat).json()
    assert worker.scheduler.seen[-1].input_ids == seen.input_ids
    assert other["choices"][0]["message"]["content"] == answer.content[0].text


def test_fields_of_the_body_reach_the_engine(client: anthropic.Anthropic, worker: Worker) -> None:
    plain = {"temperature": 0.5, "top_k": 3, "top_p": 0.4}
    ignored = {"service_tier": "auto", "metadata": {"user_id": "u"}, "context_management": {"edits": []}}
    ask(client, stop_sequences=["zz"], extra_body={**plain, **ignored, "priority": 3, "session_id": "s"})
    seen = worker.scheduler.seen[-1]
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.top_p) == (0.5, 3, 0.4)
    assert seen.sampling.stop == ("zz",) and seen.priority == 3 and seen.sampling.max_new_tokens == 9
    ask(client, extra_body={"top_k": 0})
    assert worker.scheduler.seen[-1].sampling.top_k == -1


def test_a_stop_sequence_ends_the_answer_and_is_named(client: anthropic.Anthropic) -> None:
    for stream in (False, True):
        answer = ask(client, stop_sequences=["never", "ell"], stream=stream)
        if stream:
            delta = next(e for e in answer if e.type == "message_delta").delta
            assert (delta.stop_reason, delta.stop_sequence) == ("max_tokens", None)
    answer = ask(client, "hello", stop_sequences=["lo"], max_tokens=99)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("<|user|>hel", "stop_sequence", "lo")


def test_an_unknown_field_is_ignored_by_name(worker: Worker) -> None:
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = worker.post(path, {**asked, "a_beta": {"x": 1}, "session_id": "s"})
        ignored = answer.headers["X-Tandem-Ignored-Fields"].split(", ")
        assert answer.status_code == 200 and "a_beta" in ignored and "session_id" not in ignored


def test_a_coding_agent_s_request(client: anthropic.Anthropic, worker: Worker) -> None:
    """With betas in headers and the query, a system prompt in blocks, and what Anthropic's service alone reads."""
    ephemeral: Any = {"type": "ephemeral"}
    answer = client.beta.messages.create(
        model="tiny",
        max_tokens=20_000,
        system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T", "cache_control": ephemeral}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": ephemeral}]}],
        tools=[TOOL],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert worker.prompt == "<|system|>S\nT<|user|>hello<|assistant|>"
    assert answer.stop_reason == "model_context_window_exceeded"


def test_the_answer_continues_a_last_message_of_the_assistant(client: anthropic.Anthropic, worker: Worker) -> None:
    ask(client, messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "so:"}])
    assert worker.prompt == "<|user|>q<|assistant|>so:"


def test_a_stream_of_typed_events(client: anthropic.Anthropic, worker: Worker) -> None:
    text = "🎉 naïve 你好"
    limit = len(f"<|user|>{text}".encode())
    with client.messages.stream(model="tiny", max_tokens=limit, messages=[{"role": "user", "content": text}]) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(deltas) == f"<|user|>{text}" == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == limit
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == len(worker.scheduler.seen[-1].input_ids)


def test_the_order_of_events(worker: Worker) -> None:
    asked = {"max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
    start, ping, *rest = worker.named_events("/v1/messages", asked)
    assert ping == {"type": "ping"} and start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] > 0
    kinds = " ".join(event["type"] for event in rest)
    assert re.fullmatch(
        "content_block_start( content_block_delta)+ content_block_stop message_delta message_stop", kinds
    )
    assert rest[0]["content_block"] == {"type": "text", "text": ""} and rest[-2]["usage"]["output_tokens"] == 3


def test_count_tokens_is_what_a_message_uses(client: anthropic.Anthropic, caller: anthropic.Anthropic) -> None:
    for api, more in ((client, {}), (caller, {"tools": [TOOL], "tool_choice": {"type": "auto"}})):
        asked: Any = {"model": "tiny", "system": "be brief", "messages": [{"role": "user", "content": "hello"}], **more}
        counted = api.messages.count_tokens(**asked).input_tokens
        usage = api.messages.create(**asked, max_tokens=1).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


def shown(answer: Any) -> list[Any]:
    return [block.model_dump(exclude={"id"}) for block in answer.content]


def test_tools_go_round(caller: anthropic.Anthropic) -> None:
    """The answer repeats the prompt, in which the client has written a call; its result comes back in the next turn."""
    question = {"role": "user", "content": CALL}
    asked: Any = {"model": "tiny", "max_tokens": 100, "stop_sequences": ["<|assistant|>"], "tools": [TOOL]}
    answer = caller.messages.create(**asked, messages=[question])
    text, call = answer.content
    assert text.text == "<|user|>" and answer.stop_reason == "tool_use" and answer.stop_sequence is None
    assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1}) and call.id.startswith("toolu_")
    with caller.messages.stream(**asked, messages=[question]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert shown(streamed) == shown(answer)
    assert streamed.stop_reason == "tool_use" and "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "it is 2"}]}
    turns = [question, answer.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]
    last = caller.messages.create(**{**asked, "max_tokens": 120}, messages=turns)
    assert last.stop_reason in ("tool_use", "stop_sequence")


def test_thinking_is_a_block_of_its_own(reasoner: anthropic.Anthropic, thinker: Worker) -> None:
    content = f"Hm.</think>Now.\n{CALL}"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"max_tokens": 120, "stop_sequences": ["<|assistant|>"], "tools": [TOOL], "thinking": thinking}
    answer = ask(reasoner, content, **asked)
    reasoning = thinker.scheduler.seen[-1].sampling.reasoning
    assert reasoning is not None and reasoning.budget == 1024
    thought, text, call = answer.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "<|user|>Hm.", "")
    assert (text.text, call.name) == ("Now.", "add")
    assert answer.usage.output_tokens_details.thinking_tokens == len("<|user|>Hm.</think>")
    messages: Any = [{"role": "user", "content": content}]
    with reasoner.messages.stream(model="tiny", messages=messages, **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert shown(final) == shown(answer)
    assert "thinking" in kinds and final.usage.output_tokens == answer.usage.output_tokens
    asked["thinking"] = {**thinking, "display": "omitted"}
    assert [block.type for block in ask(reasoner, content, **asked).content] == ["text", "tool_use"]


def test_a_call_that_is_cut_has_an_empty_input(caller: anthropic.Anthropic) -> None:
    answer = ask(caller, CALL, max_tokens=len("<|user|>" + CALL) - 18, tools=[TOOL])
    assert answer.stop_reason == "max_tokens" and answer.content[1].input == {}


def test_a_limit_beyond_the_context_is_cut_and_named(client: anthropic.Anthropic) -> None:
    """Coding agents send one limit for every model."""
    answer = ask(client, "x" * 400, max_tokens=20_000)
    assert answer.stop_reason == "model_context_window_exceeded"
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == CONTEXT
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, "x" * CONTEXT)


def test_nothing_to_generate_is_an_empty_message(client: anthropic.Anthropic) -> None:
    answer = ask(client, max_tokens=0)
    assert answer.content == [] and answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 0


def test_errors_are_those_of_the_clients_api(client: anthropic.Anthropic, worker: Worker) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    error = missing.value.body["error"]
    assert missing.value.body == {"type": "error", "error": error} and error.pop("message")
    assert error == {"type": "not_found_error", "code": "model_not_found"}
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be"):
        ask(client, max_tokens=-1)
    with pytest.raises(anthropic.APIStatusError) as refused:
        ask(client, "REFUSE")
    assert refused.value.status_code == 503 and refused.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError, match="the transfer broke"):
        list(ask(client, "BREAK", stream=True))


def test_the_key_of_the_client_is_a_key(tmp_path: Path) -> None:
    with start_worker(tmp_path, server={"api_key": "right"}) as w:
        with client_of(w, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            ask(client)
        assert refused.value.body["error"]["type"] == "authentication_error"
        with client_of(w, "right") as client:
            assert ask(client).stop_reason == "max_tokens"
            assert client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "a"}]).input_tokens


def test_a_client_that_leaves_ends_its_request(client: anthropic.Anthropic, worker: Worker) -> None:
    with ask(client, "SLOW", stream=True) as stream:
        next(iter(stream))
    worker.wait_idle()
    wait_for(lambda: any(rid.startswith("msg_") for rid in worker.scheduler.aborted))


def translated(**more: Any) -> Any:
    body, ignored = MESSAGES.decode(json.dumps({"max_tokens": 1, "messages": [], **more}).encode())
    assert ignored == []
    return sampled_chat_of(body, reasons=True)


def test_what_cannot_be_translated_is_named(worker: Worker) -> None:
    for path, body, field in WRONG_MESSAGES:
        assert field in worker.error(path, body)["message"], (body, field)


def test_every_block_has_its_place_in_the_template() -> None:
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "xx"}]
    calls = [
        {"type": "tool_use", "id": id, "name": "add", "input": given} for id, given in (("t1", {"a": 1}), ("t2", {}))
    ]
    said = {"type": "text", "text": "I add.", "citations": None}
    results: list[Any] = [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]
    results.append({"type": "tool_result", "tool_use_id": "t2", "is_error": True})
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [*thought, said, *calls]},
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
        {"role": "user", "content": "now"},
    ]
    system, asked, answered, *shown_results, then = template_messages(translated(messages=turns, system="S").messages)
    assert (system["content"], asked["content"]) == ("S", "q")
    assert (answered["content"], answered["reasoning_content"]) == ("I add.", "hm")
    called = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in answered["tool_calls"]]
    assert called == [("t1", "add", {"a": 1}), ("t2", "add", {})]
    due = [(r["role"], r["tool_call_id"], r["content"]) for r in shown_results]
    assert due == [("tool", "t1", "2"), ("tool", "t2", "")]
    assert (then["role"], then["content"]) == ("user", "and?\nnow")


def test_texts_of_two_messages_of_one_turn_are_two_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = translated(messages=[{"role": "user", "content": parts}, {"role": "user", "content": "c"}]).messages
    assert [part.text for part in message.content] == ["a", "b\nc"]


def test_choices_thinking_and_formats() -> None:
    tools = [TOOL]
    for choice, wanted in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert translated(tools=tools, tool_choice={"type": choice}).tool_choice == wanted
    named = translated(tools=tools, tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert named.tool_choice.function.name == "add" and named.parallel_tool_calls is False
    assert named.tools[0].function.parameters == TOOL["input_schema"]
    for kind, on in (("enabled", True), ("adaptive", True), ("disabled", False)):
        assert translated(thinking={"type": kind}).chat_template_kwargs == {"enable_thinking": on, "thinking": on}
    assert translated().chat_template_kwargs is None
    assert translated(chat_template_kwargs={"thinking": True}, thinking={"type": "disabled"}).chat_template_kwargs == {
        "enable_thinking": False,
        "thinking": True,
    }
    shaped = translated(
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    )
    assert shaped.reasoning_effort == "low" and shaped.response_format.json_schema.schema_ == {"type": "object"}
