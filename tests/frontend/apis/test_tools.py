"""Tools over HTTP: what template and engine receive, and how calls in the text are shown.

The stand-in's model repeats its prompt, so a prompt that holds a call makes an answer that holds it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.frontend.apis.chat.body import ChatBody, ChatMessage
from engine.frontend.apis.chat.reading import chat_constraint, reading_of
from engine.frontend.apis.chat.tools import (
    AllowedTools,
    ChosenFunction,
    CustomFormat,
    CustomGrammar,
    CustomTool,
    Tool,
    ToolChoice,
    ToolFunction,
    forced_calls,
    template_tools,
)
from engine.frontend.apis.shared.constraints import Constraint
from engine.sampling_params import SamplingParams
from engine.text.tool_calls import GLM45, KIMI_K2, LLAMA3, LLAMA4, PYTHONIC, QWEN3_CODER, QWEN25
from service.http.errors import ApiError
from tests.frontend.apis.rendering import template_messages
from tests.frontend.conftest import CALL, TOOL, Worker, start_worker

CHAT = "/v1/chat/completions"
PROMPT = f"<|user|>{CALL}<|assistant|>"


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": CALL}], "max_tokens": len(PROMPT), "tools": [TOOL], **more}


def test_a_call_in_the_text_is_reported_as_one(qwen: Worker) -> None:
    answer = qwen.post(CHAT, body(stop="<|assistant|>")).json()["choices"][0]
    assert answer["message"]["content"] == "<|user|>" and answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and call["id"].startswith("call_")


def test_a_call_in_a_stream_comes_in_deltas(qwen: Worker) -> None:
    with qwen.http.stream("POST", CHAT, json=body(stream=True, stop="<|assistant|>", n=2)) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    for index in (0, 1):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content") or "" for c in choices) == "<|user|>"
        parts = [part for c in choices for part in c["delta"].get("tool_calls", [])]
        assert [p["function"].get("name") for p in parts if "id" in p] == ["add"]
        assert "".join(p["function"]["arguments"] for p in parts) == '{"a": 1}'
        assert all(p["index"] == 0 for p in parts)
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
        assert choices[-1]["finish_reason"] == "tool_calls"


def test_tools_are_shown_by_the_template_for_them(qwen: Worker) -> None:
    """The other one refuses the role."""
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    assert qwen.post(CHAT, body(messages=messages)).status_code == 200
    for more in ({"tools": None}, {"tool_choice": "none"}):
        assert "no tools here" in qwen.error(CHAT, body(messages=messages, **more))["message"]


def test_ids_are_of_the_parsers_style_in_each_api(tmp_path: Path) -> None:
    said = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    turns: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "max_tokens": 64}
    claude = {"tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    ollama = {"model": "tiny", "stream": False, "options": {"num_predict": 64}, "tools": [TOOL]}
    with start_worker(tmp_path, engine={"tool_call_parser": "mistral"}) as w:
        (call,) = w.post(CHAT, turns | {"tools": [TOOL]}).json()["choices"][0]["message"]["tool_calls"]
        response = {"input": said, "max_output_tokens": 64, "tools": [TOOL["function"] | {"type": "function"}]}
        items = w.post("/v1/responses", response).json()["output"]
        blocks = w.post("/v1/messages", turns | claude).json()["content"]
        (shown,) = w.post("/api/chat", ollama | {"messages": turns["messages"]}).json()["message"]["tool_calls"]
    ids = [call["id"], shown["id"], *(item["call_id"] for item in items if item["type"] == "function_call")]
    ids += [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == 4 and all(len(id) == 9 and id.isalnum() for id in ids)


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_the_text_stays_text(qwen: Worker, more: dict[str, Any]) -> None:
    answer = qwen.post(CHAT, body(**more, stop="<|assistant|>")).json()["choices"][0]
    assert answer["message"]["content"] == "<|user|>" + CALL and answer["finish_reason"] == "stop"
    assert answer["message"]["tool_calls"] is None


def test_without_a_parser_the_text_stays_text(worker: Worker) -> None:
    answer = worker.post(CHAT, body(stop="<|assistant|>")).json()["choices"][0]
    assert answer["message"]["content"] == "<|user|>" + CALL
    worker.post(CHAT, body(stop="<|assistant|>"))
    assert worker.log.read_text().count("stay text") <= 1


def test_auto_by_name_needs_a_parser(worker: Worker) -> None:
    error = worker.error(CHAT, body(tool_choice="auto"))
    assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]
    assert worker.post(CHAT, body(tool_choice="auto", tools=None)).status_code == 200


def test_later_calls_are_left_out_on_request(qwen: Worker) -> None:
    two = [{"role": "user", "content": CALL + CALL}]
    for more, num in (({}, 2), ({"parallel_tool_calls": False}, 1)):
        answer = qwen.post(CHAT, body(messages=two, max_tokens=200, stop="<|assistant|>", **more)).json()
        assert len(answer["choices"][0]["message"]["tool_calls"]) == num


def test_a_call_cut_by_length_says_so(qwen: Worker) -> None:
    """Its arguments are closed; cut before they begin it is no call."""
    for cut, arguments in ((CALL.index(": 1"), "{}"), (CALL.index("}"), '{"a": 1}'), (CALL.index('{"a"'), None)):
        asked = body(max_tokens=len("<|user|>") + cut)
        answer = qwen.post(CHAT, asked).json()["choices"][0]
        assert answer["finish_reason"] == "length"
        calls = answer["message"]["tool_calls"] or []
        assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
        streamed = [c for e in qwen.events(CHAT, {**asked, "stream": True}) for c in e["choices"]]
        deltas = [part for c in streamed for part in c["delta"].get("tool_calls", [])]
        assert "".join(part["function"]["arguments"] for part in deltas) == (arguments or "")
        assert "".join(c["delta"].get("content") or "" for c in streamed) == (answer["message"]["content"] or "")
        assert [c["finish_reason"] for c in streamed if c["finish_reason"]] == ["length"]


def test_what_the_engine_is_asked_for(qwen: Worker) -> None:
    def asked(path: str = CHAT, **more: Any) -> tuple[str, SamplingParams]:
        (request,) = qwen.sent(path, more if path != CHAT else body(max_tokens=3, **more))
        return request.grammar_field, request.sampling

    field, sampling = asked(tool_choice="required")
    assert field == "tools" and json.loads(sampling.json_schema or "")["minItems"] == 1
    field, sampling = asked(tools=None, response_format={"type": "json_object"})
    assert (field, sampling.json_schema) == ("response_format", '{"type": "object"}')
    field, sampling = asked("/generate", text="x", sampling_params={"json_schema": {"type": "null"}})
    assert (field, sampling.json_schema) == ("sampling_params.json_schema", '{"type": "null"}')
    assert asked()[1].grammar is None
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    assert "<tool_call>" in (asked(tools=[strict])[1].structural_tag or "")


def chat(**more: Any) -> ChatBody:
    return ChatBody(messages=[ChatMessage(role="user", content="x")], **more)


def schema_of(constraint: Constraint | None) -> dict[str, Any]:
    assert constraint is not None and constraint.spec.kind == "json_schema"
    return json.loads(constraint.spec.source)  # type: ignore[no-any-return]


def test_forced_calls_allow_the_chosen_functions() -> None:
    tools = [Tool(function=ToolFunction(name=name)) for name in ("f", "g")]
    both = schema_of(chat_constraint(chat(tools=tools, tool_choice="required"), None))
    assert names_in(both) == ["f", "g"] and "maxItems" not in both
    one = schema_of(chat_constraint(chat(tools=tools, tool_choice="required", parallel_tool_calls=False), None))
    assert one["maxItems"] == 1
    choice = ToolChoice(function=ChosenFunction(name="g"))
    named = schema_of(chat_constraint(chat(tools=tools, tool_choice=choice), None))
    assert names_in(named) == ["g"] and named["maxItems"] == 1


def names_in(schema: dict[str, Any]) -> list[str]:
    return [name for s in schema["items"]["anyOf"] for name in s["properties"]["name"]["enum"]]


def test_definitions_of_functions_move_to_the_root_under_their_names() -> None:
    parameters = {"$defs": {"A": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}
    tools = [Tool(function=ToolFunction(name=name, parameters=parameters)) for name in ("f", "g")]
    schema = schema_of(forced_calls(tools, only_one=True))
    assert schema["$defs"] == {"f:A": {"type": "integer"}, "g:A": {"type": "integer"}}
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"properties": {"a": {"$ref": "#/$defs/g:A"}}}


TREE: dict[str, Any] = {"type": "object", "properties": {"kid": {"$ref": "#"}}}
MOVED = {"f": {"type": "object", "properties": {"kid": {"$ref": "#/$defs/f"}}}}
SAYS_X: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 16}
FORCED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (CHAT, SAYS_X, {"type": "function", "function": {"name": "f", "parameters": TREE}},
     {"type": "function", "function": {"name": "f"}}),
    ("/v1/messages", {**SAYS_X, "model": "default"}, {"name": "f", "input_schema": TREE}, {"type": "tool", "name": "f"}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16}, {"type": "function", "name": "f", "parameters": TREE},
     {"type": "function", "name": "f"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "asked", "tool", "choice"), FORCED)
def test_a_forced_tool_of_each_api_brings_its_references_along(
    qwen: Worker, path: str, asked: dict[str, Any], tool: dict[str, Any], choice: dict[str, Any]
) -> None:
    (request,) = qwen.sent(path, {**asked, "tools": [tool], "tool_choice": choice})
    schema = json.loads(request.sampling.json_schema or "")
    assert schema["$defs"] == MOVED
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == {"$ref": "#/$defs/f"}


def test_allowed_tools_leave_the_others_to_the_template() -> None:
    tools = [Tool(function=ToolFunction(name=name)) for name in ("f", "g")]
    for mode, is_forced in (("required", True), ("auto", False)):
        allowed = AllowedTools(mode=mode, tools=[ToolChoice(function=ChosenFunction(name="g"))])
        choice = ToolChoice(type="allowed_tools", allowed_tools=allowed)
        body = chat(tools=tools, tool_choice=choice)
        assert list(reading_of(body, reasoning=None, tool_parser="qwen25").functions) == ["g"]
        constraint = chat_constraint(body, QWEN25)
        assert (constraint is not None) == is_forced
        if is_forced:
            assert names_in(schema_of(constraint)) == ["g"] and "maxItems" not in schema_of(constraint)


CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "run", "description": "Runs code."}}
RUN = '<tool_call>\n{"name": "run", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'


def test_a_custom_tool_receives_a_text(qwen: Worker) -> None:
    more = {"messages": [{"role": "user", "content": RUN}], "tools": [CUSTOM, TOOL], "max_tokens": 200}
    answer = qwen.post(CHAT, body(stop="<|assistant|>", **more)).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "run", "input": 'a\n"b"'}
    assert answer["finish_reason"] == "tool_calls"
    events = qwen.events(CHAT, body(stop="<|assistant|>", stream=True, **more))
    parts = [part for e in events for c in e["choices"] for part in c["delta"].get("tool_calls", [])]
    assert [p["custom"].get("name") for p in parts] == ["run", None] and parts[0]["type"] == "custom"
    assert "".join(p["custom"]["input"] for p in parts) == 'a\n"b"'


@pytest.mark.parametrize(("cut", "input"), [("\\n", "a"), ("input", "")])
def test_an_input_that_length_cuts_is_shown_as_far_as_it_came(qwen: Worker, cut: str, input: str) -> None:
    length = len("<|user|>") + RUN.index(cut)
    more = {"messages": [{"role": "user", "content": RUN}], "tools": [CUSTOM], "max_tokens": length}
    (call,) = qwen.post(CHAT, body(**more)).json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"]["input"] == input


def test_a_reader_sees_the_opener_that_may_stand_without_its_section() -> None:
    tools = [Tool(function=ToolFunction(name="f"))]
    markers = reading_of(chat(tools=tools), reasoning=None, tool_parser="kimi_k2").markers
    assert markers == ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"]


def test_what_a_custom_tool_is_for_the_model() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+|x"}}
    free = Tool.model_validate(CUSTOM)
    bound = Tool.model_validate({"type": "custom", "custom": {"name": "sql", "format": grammar}})
    (shown,) = template_tools([free]) or []
    assert shown["type"] == "function" and shown["function"]["description"] == "Runs code."
    assert shown["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    choice = ToolChoice.model_validate({"type": "custom", "custom": {"name": "sql"}})
    schema = schema_of(chat_constraint(chat(tools=[free, bound], tool_choice=choice), None))
    assert names_in(schema) == ["sql"] and schema["maxItems"] == 1
    parameters = schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert parameters["properties"]["input"]["pattern"] == "^(?:[a-z]+|x)$"
    said = [{"id": "1", "type": "custom", "custom": {"name": "run", "input": "ls"}}]
    (message,) = template_messages([ChatMessage(role="assistant", tool_calls=said)])
    (call,) = message["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "run", "arguments": {"input": "ls"}}}


REGEX = CustomFormat(type="grammar", grammar=CustomGrammar(syntax="regex", definition="a+"))
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a/"}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom.name: must be 1 to 64"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name: must be 1 to 64"),
        ({"tools": [{"type": "search", "function": {"name": "x"}}]}, "tools[0].type: only function and custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name: must be"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": LARK}}]}, "format.grammar.syntax: only regex"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]}, "custom.format: must be"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools: is missing"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools: must not be empty"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "all", "tools": []}}},
         "tool_choice.allowed_tools.mode: must be auto or required"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "no"}}}, "tool_choice: 'no' is not among tools"),
        ({"tool_choice": {"type": "x", "function": {"name": "add"}}}, "tool_choice.type: 'x' is not one of"),
    ],
)  # fmt: skip
def test_a_wrong_tool_or_choice_is_named(worker: Worker, more: dict[str, Any], says: str) -> None:
    assert says in worker.error(CHAT, body(**more))["message"]


@pytest.mark.parametrize("format", [QWEN25, LLAMA3])
def test_strict_functions_constrain_the_calls_of_a_free_answer(format: Any) -> None:
    tools = [Tool(function=ToolFunction(name="f", strict=True, parameters={"type": "object"}))]
    constraint = chat_constraint(chat(tools=tools), format)
    assert constraint is not None and constraint.spec.kind == "structural_tag" and constraint.field == "tools"
    tag = json.loads(constraint.spec.source)
    assert tag["structures"][0]["begin"].startswith(tag["triggers"][0]) and '"f"' in tag["structures"][0]["begin"]
    assert chat_constraint(chat(tools=tools), None) is None
    assert chat_constraint(chat(tools=tools, tool_choice="none"), None) is None


def test_a_kimi_call_has_its_number_before_the_arguments() -> None:
    tools = [Tool(function=ToolFunction(name="f", strict=True, parameters={"type": "object"}))]
    constraint = chat_constraint(chat(tools=tools), KIMI_K2)
    assert constraint is not None
    (structure,) = json.loads(constraint.spec.source)["structures"]
    text = f"{structure['begin']}12{structure['after_number']}{{}}{structure['end']}"
    assert text == "<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
    call = KIMI_K2.scanner({}, "")
    call.feed(text)
    assert (call.name, call.id, call.done, call.new_arguments()) == ("f", "functions.f:12", True, "{}")


@pytest.mark.parametrize(
    ("format", "in_channels"), [(GLM45, False), (QWEN3_CODER, False), (PYTHONIC, False), (LLAMA4, False), (None, True)]
)
def test_a_strict_function_of_a_format_that_no_schema_holds_is_refused(format: Any, in_channels: bool) -> None:
    strict = Tool(function=ToolFunction(name="f", strict=True))
    free = Tool(function=ToolFunction(name="g"))
    for choice in (None, "auto"):
        with pytest.raises(ApiError, match=r"'f' is strict, and .* leave strict out, or force the call") as refused:
            chat_constraint(chat(tools=[free, strict], tool_choice=choice), format, in_channels=in_channels)
        assert (refused.value.status, refused.value.field) == (400, "tools")
    served: list[dict[str, Any]] = [
        {"tools": [strict], "tool_choice": "none"},
        {"tools": [strict], "tool_choice": "required"},
        {"tools": [strict], "regex": "a"},
        {"tools": [free]},
        {"tools": [Tool(type="custom", custom=CustomTool(name="c", format=REGEX))]},
    ]
    for body in served:
        constraint = chat_constraint(chat(**body), format, in_channels=in_channels)
        assert (constraint is None) == (body.get("tool_choice") != "required" and "regex" not in body)


def test_templates_get_tools_and_the_arguments_as_objects() -> None:
    assert template_tools([Tool(function=ToolFunction(name="f", description="d"))]) == [
        {"type": "function", "function": {"name": "f", "description": "d"}}
    ]
    assert template_tools([]) is None
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": "no json"}},
    ]
    (message,) = template_messages([ChatMessage(role="assistant", tool_calls=calls)])
    arguments = [c["function"]["arguments"] for c in message["tool_calls"]]
    assert arguments == [{"a": 1}, {}] and list(map(str, arguments)) == ['{"a": 1}', "no json"]
    assert calls[0]["function"]["arguments"] == '{"a": 1}', "the body is left as it is"
