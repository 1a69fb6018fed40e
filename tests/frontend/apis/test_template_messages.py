"""Messages go through chat templates as they came: contents, null, reasoning, arguments, ids, and a last one that goes on.

Where a template reads what came, the prompt equals that of transformers.
"""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.frontend.apis.chat.calls import as_taken, call_ids, short_id
from engine.frontend.apis.chat.plan import rendering_size
from service.http.errors import ApiError
from tests.frontend.apis.rendering import chat_body, prompt_of, rendered, template_messages, template_of
from tests.text.chat_templates import SHAPES

WORDS = ("first words", "second ones", "third")
WITH_TOOLS = [name for name, shape in SHAPES.items() if shape.tools]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def talk(wrap: Any = str) -> list[dict[str, Any]]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": wrap(words)} for role, words in zip(roles, WORDS, strict=True)]


def of_transformers(source: str, messages: list[dict[str, Any]], *, generates: bool = True, **more: Any) -> str:
    texts: Any = render_jinja_template([messages], chat_template=source, add_generation_prompt=generates, **more)
    return str(texts[0][0])


@pytest.mark.parametrize("name", SHAPES)
def test_no_word_vanishes_whichever_way_it_comes(name: str) -> None:
    source = SHAPES[name].source
    texts = [prompt_of(source, talk(wrap)) for wrap in (str, lambda words: [part(words)])]
    assert texts[0] == texts[1] and [texts[0].count(words) for words in WORDS] == [1, 1, 1]
    mixed = [*talk()[:2], {"role": "user", "content": [part("third")]}]
    assert prompt_of(source, mixed) == texts[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_system_prompt_in_parts_is_its_text(name: str) -> None:
    """Some templates that loop over a user's parts write the system's content as it is."""
    systems = [{"role": "system", "content": content} for content in ("Be kind.", [part("Be kind.")])]
    whole, parts = (prompt_of(SHAPES[name].source, [system, *talk()]) for system in systems)
    assert whole == parts and "{'type'" not in parts


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_template_reads_reaches_it_as_in_transformers(name: str) -> None:
    shape = SHAPES[name]
    if "strings" in shape.reads:
        assert prompt_of(shape.source, talk()) == of_transformers(shape.source, talk())
    if "parts" in shape.reads:
        several = talk(lambda words: [part(words + " "), part("and"), part("more")])
        assert prompt_of(shape.source, several) == of_transformers(shape.source, several)


def test_a_template_of_strings_gets_parts_in_lines() -> None:
    """As vLLM joins them: such a template would write Python's form of a list."""
    messages = [{"role": "user", "content": [part("hi "), part("x")]}]
    assert "hi \nx<|im_end|>" in prompt_of(SHAPES["chatml"].source, messages)


def null(**more: Any) -> list[dict[str, Any]]:
    user, other = ({"role": "user", "content": text} for text in "ab")
    return [user, {"role": "assistant", "content": None, **more}, other]


CALL: dict[str, Any] = {"id": "addabcdef", "type": "function", "function": {"name": "add", "arguments": '{"a": "uno"}'}}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "more",
    [{}, {"reasoning_content": "hm"}, {"refusal": "I will not."}, {"reasoning": "hm"}, {"tool_calls": []}, {"annotations": []}],
)  # fmt: skip
def test_an_assistants_null_is_an_empty_text(name: str, more: dict[str, Any]) -> None:
    text = prompt_of(SHAPES[name].source, null(**more))
    assert "None" not in text and ("I will not." in text) == ("refusal" in more)


@pytest.mark.parametrize("content", ["", None, [{"type": "text", "text": ""}]])
def test_an_empty_text_is_none_to_a_template_of_parts(content: Any) -> None:
    loop = "{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
    shown = "{% for m in messages %}{% if m.content %}<" + loop + ">{% endif %}|{% endfor %}"
    messages = open_turn(content, tool_calls=[CALL])
    assert prompt_of(shown, messages).endswith(">||")
    apart = "{% for m in messages %}" + loop + "|{% if m.content is none %}{{ m.tool_calls }}{% endif %}{% endfor %}"
    calls = apart.replace("{{ m.tool_calls }}", "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}")
    assert prompt_of(calls, messages).endswith("||add")
    assert prompt_of(shown, open_turn(""), continue_final_message=True).endswith("|<")


def test_null_beside_calls_is_null_where_a_template_asks_for_it() -> None:
    asks = "{% for m in messages %}{{ 'null' if m.content is none else m.content }}|{% endfor %}"
    texts = [prompt_of(asks, null(**more)) for more in ({"tool_calls": [CALL]}, {})]
    assert texts == ["a|null|b|", "a||b|"]


def test_a_part_may_be_a_refusal() -> None:
    messages = open_turn([{"type": "refusal", "refusal": "I will not."}])
    assert all("I will not." in prompt_of(SHAPES[name].source, messages) for name in ("chatml", "llava 1.5"))


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_other_roles_say_something(role: str) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\].content: is missing"):
        chat_body([{"role": role, "content": None}])


def test_an_audio_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match=r"^messages\[1\].audio: audio is not served"):
        chat_body([{"role": "user", "content": "a"}, {"role": "assistant", "audio": {"id": "x"}}])


def result_of(id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("content", [None, "", "I look."])
def test_calls_and_results_are_in_the_prompt(name: str, content: str | None) -> None:
    text = prompt_of(SHAPES[name].source, [*open_turn(content, tool_calls=[CALL]), result_of("addabcdef", "due")])
    assert "add" in text and "uno" in text and "due" in text and "None" not in text and "{'" not in text
    assert (content or "") in text or name in ("llama 3.1", "mistral 7b v0.3"), "these write calls alone"


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("result", [None, [part("due")]])
def test_results_are_null_or_parts(name: str, result: Any) -> None:
    messages = [*open_turn(None, tool_calls=[CALL]), result_of("addabcdef", result)]
    text = prompt_of(SHAPES[name].source, messages)
    assert "None" not in text and "{'" not in text and ("due" in text) == bool(result)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_two_calls_and_their_results(name: str) -> None:
    calls = [{**CALL, "id": f"{word}123456", "function": {"name": word, "arguments": "{}"}} for word in ("one", "two")]
    results = [result_of(call["id"], f"is {call['id'][:3]}") for call in calls]
    text = prompt_of(SHAPES[name].source, [*open_turn(None, tool_calls=calls), *results, talk()[2]])
    assert [text.count(said) for said in ("is one", "is two", "third")] == [1, 1, 1], text
    assert text.index("one") < text.index("is one") and text.index("two") < text.index("is two") < text.index("third")


def test_results_of_no_call_stay_in_their_order() -> None:
    calls = [{**CALL, "id": id} for id in ("one", "two")]
    results = [result_of(id, f"[{id}{n}]") for n, id in enumerate(("two", "x", "two", "one"))]
    text = prompt_of(SHAPES["llama 3.1"].source, [*open_turn(None, tool_calls=calls), *results])
    assert re.findall(r"\[(\w+)\]|parameters", text) == ["", "one3", "", "two0", "x1", "two2"]


def test_results_without_ids_answer_calls_in_their_order() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}] * 50
    results = [{"role": "tool", "name": "g", "content": "r"}] * 50
    messages = template_messages(chat_body([{"role": "assistant", "tool_calls": calls}, *results]).messages)
    taken = as_taken(messages, template_of(SHAPES["gpt-oss"].source).reads)
    assert [m["tool_call_id"] for m in taken[1::2]] == [m["tool_calls"][0]["id"] for m in taken[::2]]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_without_ids_and_of_openais_first_api(name: str) -> None:
    function, result = CALL["function"], {"role": "tool", "name": "add", "content": "due"}
    ways: list[Any] = [{"tool_calls": [{"type": "function", "function": function}]}, {"function_call": function}]
    texts = {prompt_of(SHAPES[name].source, [*open_turn(None, **way), result]) for way in ways}
    assert len(texts) == 1 and all("uno" in text and "due" in text for text in texts)


def test_ids_of_other_servers_are_shortened_where_a_template_demands_it() -> None:
    calls = [{**CALL, "id": f"call_{n}" * 8} for n in (1, 2)]
    messages = [*open_turn(None, tool_calls=calls), *(result_of(call["id"], "due") for call in calls)]
    text = prompt_of(SHAPES["mistral 7b v0.3"].source, messages)
    assert [text.count(short_id(call["id"])) for call in calls] == [2, 2] and short_id("abcdefghi") == "abcdefghi"
    assert calls[0]["id"] in prompt_of(SHAPES["kimi k2"].source, messages), "elsewhere they go as they came"


@pytest.mark.parametrize(
    ("parser", "shape", "ids"),
    [
        (None, "chatml", ["call_x", "call_x"]),
        ("qwen25", "qwen 3", ["call_x", "call_x"]),
        ("mistral", "chatml", [short_id("call_x")] * 2),
        (None, "mistral 7b v0.3", [short_id("call_x")] * 2),
        ("kimi_k2", "kimi k2", ["functions.add:1", "functions.sub:2"]),
    ],
)
def test_ids_are_of_the_style_of_parser_and_template(parser: str | None, shape: str, ids: list[str]) -> None:
    before = chat_body(null(tool_calls=[CALL])).messages
    mint = call_ids(parser, template_of(SHAPES[shape].source), before, lambda: "call_x")
    assert [mint("add", 0), mint("sub", 1)] == ids


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning"])
def test_a_reasoning_has_all_names_of_templates(given: str) -> None:
    messages = chat_body(null(**{given: "hm"})).messages
    shown = template_messages(messages)[1]
    assert shown["reasoning_content"] == shown["reasoning"] == shown["thinking"] == "hm"
    assert "(hm)" in prompt_of("{% for m in messages %}({{ m.reasoning_content }}){% endfor %}", null(**{given: "hm"}))


def test_gpt_oss_gets_no_thinking_beside_content_and_calls() -> None:
    for content, shown in (("I add.", "I add."), (None, "hm<|end|>")):
        messages = open_turn(content, reasoning="hm", tool_calls=[CALL])
        assert shown in prompt_of(SHAPES["gpt-oss"].source, messages)


def open_turn(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [talk()[0], {"role": "assistant", "content": content, **more}]


def as_read(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wrap: Any = str if "strings" in SHAPES[name].reads else lambda words: [part(words)]
    return [m | {"content": wrap(m["content"])} for m in messages]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("begun", ["Sure, ", "Sure,", " a\n\n", "<think>", "<think>hm"])
def test_a_message_goes_on_as_in_transformers(name: str, begun: str) -> None:
    source, messages = SHAPES[name].source, open_turn(begun)
    theirs = of_transformers(source, as_read(name, messages), generates=False, continue_final_message=True)
    for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": True}):
        assert prompt_of(source, messages, continue_final_message=True, **more) == theirs
    assert begun.strip() in theirs


@pytest.mark.parametrize("name", SHAPES)
def test_what_goes_on_may_have_a_reasoning(name: str) -> None:
    source, messages = SHAPES[name].source, open_turn("So ", reasoning_content="hm")
    theirs = of_transformers(source, as_read(name, messages), generates=False, continue_final_message=True)
    assert prompt_of(source, messages, continue_final_message=True) == theirs


def continued(name: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
    return rendered(template_of(SHAPES[name].source), chat_body(messages, continue_final_message=True))


def test_the_text_that_goes_on_is_apart() -> None:
    """So the beginning of the reasoning is found: in what the template writes before, or in the message."""
    assert continued("chatml", open_turn("Sure, ")) [1] == "Sure, "  # fmt: skip
    assert continued("llama 3.1", open_turn("Sure, "))[1] == "Sure,"
    head, begun = continued("qwen 3", open_turn("<think>a</think>b"))
    assert head.endswith("<think>\na\n</think>\n\n") and begun == "b"
    assert continued("llava 1.5", open_turn([part("a"), part("b")]))[1] == "b"


def test_a_reasoning_that_was_cut_goes_on() -> None:
    head, begun = continued("qwen 3", open_turn(None, reasoning_content="hm hm"))
    assert head.endswith("<|im_start|>assistant\n<think>\n") and begun == "hm hm"
    assert continued("glm 4.5", open_turn(None, reasoning="hm hm"))[1] == "hm hm"
    assert continued("chatml", open_turn(None, reasoning="hm"))[0].endswith("assistant\n"), "it writes no reasoning"


def test_a_users_message_goes_on_too() -> None:
    assert continued("chatml", talk()[:1])[0] == "<|im_start|>user\n"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "a"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}image", [{"type": "image_url", "image_url": "x"}]),
    ],
)
def test_what_cannot_go_on_is_named(source: str, content: Any) -> None:
    with pytest.raises(ApiError, match=r"^messages\[1\].content: the answer continues it: it must end with text"):
        prompt_of(source, open_turn(content), continue_final_message=True)


LONG = "x" * 100_000
FUNCTION = {"name": "f", "parameters": {"description": LONG}}


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ({"content": LONG}, {}),
        ({"content": [part(LONG)]}, {}),
        ({"reasoning_content": LONG}, {}),
        ({"reasoning": LONG}, {}),
        ({"refusal": LONG}, {}),
        ({"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": LONG}}]}, {}),
        ({"function_call": {"name": "f", "arguments": LONG}}, {}),
        ({"content": ""}, {"tools": [{"type": "function", "function": FUNCTION}]}),
        ({"content": ""}, {"chat_template_kwargs": {"documents": [LONG]}}),
    ],
)
def test_all_that_a_template_may_write_counts_as_work(message: dict[str, Any], more: dict[str, Any]) -> None:
    services: Any = SimpleNamespace(texts=SimpleNamespace(check_bytes=lambda *_, **__: None))
    assert rendering_size(services, chat_body([{"role": "assistant", **message}], **more)) > len(LONG)
