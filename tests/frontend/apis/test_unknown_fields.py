"""Fields that no struct has: refused by name, ignored by name, or a 400 inside sampling_params; over real HTTP."""

import dataclasses
from typing import Any

import msgspec
import pytest

from engine.frontend.apis.chat.body import READER
from engine.frontend.apis.shared import body_reader
from engine.frontend.errors import IGNORED_HEADER, MAX_NOTED, IgnoredFields, shown
from service.http.errors import plain
from tests.frontend.apis.rendering import rendered, template_of
from tests.frontend.conftest import Worker
from tests.text.chat_templates import SHAPES

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
COMPLETE = {"prompt": "x", "max_tokens": 1}
GENERATE = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETE),
    ("/generate", GENERATE),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_field_is_ignored_and_named(worker: Worker, path: str, body: dict[str, Any], stream: bool) -> None:
    sent = {**body, "stream": stream, "store": True, "temprature": 3, "a\r\nX: b": 1, "session_id": "s"}
    answer = worker.post(path, sent)
    assert answer.status_code == 200 and answer.headers[IGNORED_HEADER] == "store, temprature, ?"
    assert IGNORED_HEADER not in worker.post(path, {**body, "stream": stream}).headers
    told = [line for line in worker.log.read_text().splitlines() if f"{path}: " in line and "temprature" in line]
    assert len(told) == 1


SCHEMA = {"type": "object", "odd": 1, "properties": {"a": {"type": "string", "odd": 2}}}
ODD, CACHED = {"odd": 1}, {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "x"}
TOOL = {"type": "function", **ODD, "function": {"name": "f", **ODD, "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA, **ODD}
FORMAT = {"type": "json_schema", **ODD, "json_schema": {"schema": SCHEMA, "name": "n", **ODD}}
ANSWERED = {"role": "assistant", "content": "y", "reasoning": "r", "refusal": None, "images": None, **ODD}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", **ODD}]}
CHATS = "/v1/chat/completions"
PLAIN: dict[str, dict[str, Any]] = {
    CHATS: CHAT,
    "/v1/completions": COMPLETE,
    "/v1/responses": {"input": "x", "max_output_tokens": 1, "store": False},
    "/v1/messages": CHAT,
    "/api/chat": {"model": "tiny", "messages": CHAT["messages"]},
}


def said(*parts: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts), **more}]


@pytest.mark.parametrize(
    ("path", "more", "names"),
    [
        (CHATS, {"stream": True, "stream_options": {"include_usage": True, **ODD}}, "stream_options.odd"),
        (CHATS, {"tools": [TOOL] * 2}, "tools[].odd tools[].function.odd"),
        (CHATS, {"tools": [TOOL], "tool_choice": {"type": "function", **ODD, "function": {"name": "f"}}},
         "tools[].odd tools[].function.odd tool_choice.odd"),
        (CHATS, {"response_format": FORMAT}, "response_format.odd response_format.json_schema.odd"),
        (CHATS, {"messages": [*said({**TEXT, **CACHED}), ANSWERED, *said({**TEXT, **ODD})]},
         "messages[].odd messages[].content[].cache_control messages[].content[].odd"),
        ("/v1/completions", {**ODD, "stream": True, "stream_options": {"include_obfuscation": False}},
         "odd stream_options.include_obfuscation"),
        ("/v1/responses", {"input": said({"type": "input_text", "text": "x", **ODD}, **ODD)},
         "input[].odd input[].content[].odd"),
        ("/v1/responses", {"tools": [FLAT_TOOL], "tool_choice": ALLOWED}, "tools[].odd tool_choice.tools[].odd"),
        ("/v1/responses", {"text": {"format": {"type": "text", **ODD}}}, "text.format.odd"),
        ("/v1/messages", {"system": [{**TEXT, **ODD, **CACHED}]}, "system[].odd"),
        ("/v1/messages", {"messages": said({**TEXT, **ODD}, **ODD)}, "messages[].odd messages[].content[].odd"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": SCHEMA, **ODD, **CACHED}],
         "tool_choice": {"type": "auto", **ODD}}, "tools[].odd tool_choice.odd"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", **ODD}]}, "messages[].odd"),
        ("/api/chat", {"tools": [{"type": "function", **ODD, "function": {"name": "f"}}]}, "tools[].odd"),
    ],
)  # fmt: skip
def test_an_unknown_field_inside_is_named_by_its_path_and_schemas_are_free(
    worker: Worker, path: str, more: dict[str, Any], names: str
) -> None:
    answer = worker.post(path, {**PLAIN[path], **more})
    assert set(answer.headers[IGNORED_HEADER].split(", ")) == set(names.split()), answer.text
    log = worker.log.read_text()
    assert all(f"{path}: a request has the unknown field {name}," in log for name in names.split())


def test_unknown_fields_change_nothing_else() -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    tools = [{"type": "custom", "custom": {"name": "a"}}, function]
    sent = {**CHAT, "tools": tools, "tool_choice": {"type": "custom", "custom": {"name": "a"}}}
    body, ignored = READER.decode(msgspec.json.encode(sent))
    with_odd, named = READER.decode(msgspec.json.encode({**sent, "odd": 1, "__class__": 1, "model_extra": 2}))
    assert ignored == [] and named == ["odd", "__class__", "model_extra"]
    assert plain(body) == plain(with_odd)
    assert body.tools is not None and body.tools[0].function.name == "a"


def test_fields_of_messages_that_the_template_reads_are_not_ignored(worker: Worker) -> None:
    """The worker's template has the word "tool"."""
    for field, names in (("tool", None), ("odd", "messages[].odd")):
        answer = worker.post(CHATS, {**CHAT, "messages": [{"role": "user", "content": "x", field: 1}]})
        assert answer.status_code == 200 and answer.headers.get(IGNORED_HEADER) == names


def test_fields_of_messages_that_the_template_reads_reach_it() -> None:
    """Phi's template finds tools in the system's message."""
    source = SHAPES["phi 4 mini"].source
    system = {"role": "system", "content": "s", "tools": "[TOOLS]", "odd": 1}
    data = msgspec.json.encode({"messages": [system, {"role": "user", "content": "x", "odd": 2}], "odd": 1})
    body, ignored = READER.decode(data, template_of(source).reads.names)
    assert ignored == ["messages[].odd", "odd"]
    assert "s<|tool|>[TOOLS]<|/tool|>" in "".join(rendered(template_of(source), body))


def test_an_error_names_ignored_fields_too(worker: Worker) -> None:
    answer = worker.post("/v1/completions", {**COMPLETE, "temprature": 3, "temperature": -1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
    assert answer.headers[IGNORED_HEADER] == "temprature"


def test_names_and_log_lines_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    assert shown([f"f{i}" for i in range(20)]).endswith("f14, f15, ...")
    assert shown(["x" * 65, "\u00e9", "a b"]) == "?, ?, ?"
    ignored = IgnoredFields()
    for i in range(1000):
        ignored.note("/generate", [f"f{i}", "f0", "?" * 70])
    assert len(caplog.records) == MAX_NOTED


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"temprature": 3}, "temprature", "did you mean temperature?"),
        ({"max_tokens": 3}, "max_tokens", "did you mean max_new_tokens?"),
        ({"qqqq": 3}, "qqqq", "there are allowed_token_ids"),
        ({"beam_width": 2}, "beam_width", "n gives several answers"),
        ({"custom_params": {"a": 1}}, "custom_params", "logit_bias"),
    ],
)
def test_a_wrong_sampling_parameter_is_an_error(worker: Worker, params: dict[str, Any], field: str, says: str) -> None:
    for given in (params, [{}, params]):
        texts = "a" if isinstance(given, dict) else ["a", "b"]
        error = worker.error("/generate", {"text": texts, "sampling_params": given})
        assert says in error["message"] and error["param"] == f"sampling_params.{field}"


def test_sglangs_defaults_are_no_wishes(worker: Worker) -> None:
    unset = "stop stop_token_ids stop_regex json_schema regex ebnf structural_tag logit_bias custom_params"
    defaults = {
        **dict.fromkeys([*unset.split(), "stream_interval", "beam_width", "watermark"]),
        **{"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0,
            "n": 1},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "no_stop_trim": False},
        **{"ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    }  # fmt: skip
    body = {"text": "x", "sampling_params": defaults, "session_params": None, "image_data": None, "input_embeds": None}
    answer = worker.post("/generate", body)
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers


def test_slime_s_parameters_are_served(worker: Worker) -> None:
    params = {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 3, "stop": None, "stop_token_ids": None},
        **{"skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False},
        "sampling_seed": 42,
    }
    answer = worker.post("/generate", {"input_ids": [71, 72], "sampling_params": params, "return_logprob": True})
    meta = answer.json()["meta_info"]
    assert answer.status_code == 200 and IGNORED_HEADER not in answer.headers
    assert [len(one) for one in meta["output_token_logprobs"]] == [3] * meta["completion_tokens"]
    assert {"finish_reason", "weight_version", "prompt_tokens", "cached_tokens"} <= meta.keys()


REFUSED = [
    ("/v1/chat/completions", CHAT, body_reader.CHAT),
    ("/v1/completions", COMPLETE, body_reader.COMPLETION),
    ("/generate", GENERATE, body_reader.GENERATE),
    ("/v1/embeddings", {"input": "x"}, body_reader.EMBEDDING),
]


@pytest.mark.parametrize(("path", "body", "table"), REFUSED)
def test_a_wish_that_is_not_served_is_refused_with_a_remedy(
    worker: Worker, path: str, body: dict[str, Any], table: dict[str, Any]
) -> None:
    for name, entry in table.items():
        wish = False if True in entry.harmless and False not in entry.harmless else {"a": 1}
        error = worker.post(path, {**body, name: wish}).json()["error"]
        assert error["param"] == name and error["code"] == "unsupported_parameter"
        assert error["message"] == f"{name}: is not supported by this server; {entry.remedy}"
        assert dataclasses.is_dataclass(entry)
    if path != "/v1/embeddings":  # the stand-in has no vectors
        harmless = worker.post(path, {**body, **{name: entry.harmless[-1] for name, entry in table.items()}})
        assert harmless.status_code == 200, harmless.text
        assert IGNORED_HEADER not in harmless.headers
