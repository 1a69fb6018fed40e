"""What the server says can be sent back: answers of each API, for all parsers and templates, whole, streamed and cut anywhere."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.frontend.apis.chat.calls import call_ids
from engine.frontend.apis.chat.plan import check_chat
from engine.frontend.apis.chat.reading import reading_of
from engine.text.reasoning import HARMONY, REASONING_FORMATS, opening_of
from engine.text.tool_calls import CALL_FORMATS
from tests.frontend.apis.answers import APIS, FIRST, LAST, RESULT, Said, anthropic_blocks, openai_message
from tests.frontend.apis.rendering import chat_body, rendered, template_of
from tests.text.chat_templates import SHAPES

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "look_up")]
ADD, LOOK_UP = '{"a": "uno"}', '{"a": "dos"}'
ARRAY = f'[{{"name": "add", "parameters": {ADD}}}, {{"name": "look_up", "parameters": {LOOK_UP}}}]'
OBJECTS = [f'{{"name": "add", "arguments": {ADD}}}', f'{{"name": "look_up", "arguments": {LOOK_UP}}}']
TAG = "<tool_call>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
GLM = "<tool_call>{}\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
CODER = "<tool_call>\n<function={}>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
OSS = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
# What a model writes, by the parser's name; and the template of its family.
CALLS = {
    "qwen25": "\n".join(f"{TAG}{call}\n</tool_call>" for call in OBJECTS),
    "llama3": "<|python_tag|>" + "; ".join(OBJECTS),
    "mistral": f"[TOOL_CALLS] [{', '.join(OBJECTS)}]",
    "pythonic": '[add(a="uno"), look_up(a="dos")]',
    "llama4": '<|python_start|>[add(a="uno"), look_up(a="dos")]<|python_end|>',
    "deepseekv3": f"<｜tool▁calls▁begin｜>{V3.format('add', ADD)}\n{V3.format('look_up', LOOK_UP)}<｜tool▁calls▁end｜>",
    "deepseekv31": f"<｜tool▁calls▁begin｜>{V31.format('add', ADD)}{V31.format('look_up', LOOK_UP)}<｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI.format('add', 0, ADD)}{KIMI.format('look_up', 1, LOOK_UP)}<|tool_calls_section_end|>",
    "glm45": GLM.format("add", "uno") + "\n" + GLM.format("look_up", "dos"),
    "qwen3_coder": CODER.format("add", "uno") + "\n" + CODER.format("look_up", "dos"),
    "gpt-oss": OSS.format("add", ADD) + OSS.format("look_up", LOOK_UP),
}
FAMILY = {
    **{"qwen25": "qwen 3", "llama3": "llama 3.1", "mistral": "mistral 7b v0.3", "pythonic": "llama 3.1", "llama4": "llama 4"},
    **{"deepseekv3": "deepseek v3", "deepseekv31": "deepseek v3.1", "kimi_k2": "kimi k2", "glm45": "glm 4.5"},
    **{"qwen3_coder": "qwen 3 coder", "gpt-oss": "gpt-oss"},
}  # fmt: skip
WITH_TOOLS = [name for name, shape in SHAPES.items() if shape.tools]
THOUGHT, TEXT = "hm hm", "I look."
PIECES = 7  # characters of a chunk


def said(
    parser: str, reasoning: str | None, template: str, text: str = "", cut: int | None = None, **more: Any
) -> Said:
    body = chat_body([{"role": "user", "content": FIRST}], **{"tools": TOOLS, **more})
    format = REASONING_FORMATS.get(reasoning or "")
    reading = reading_of(body, reasoning=format, tool_parser=parser)
    numbers = iter(range(99))
    template_used = template_of(SHAPES[template].source)
    return Said(
        text=(text or _text_of(parser, reasoning))[:cut],
        kind="stop" if cut is None else "length",
        body=body,
        reader=None if format is None and reading.reader is None else reading.reader(opening_of(format or HARMONY, "")),
        mint_id=call_ids(parser, template_used, body.messages, lambda: f"call_{next(numbers):032x}"),
    )


def _text_of(parser: str, reasoning: str | None) -> str:
    format = REASONING_FORMATS.get(reasoning or "")
    calls = CALLS[parser] if parser in ("pythonic", "gpt-oss") else f"{TEXT}\n{CALLS[parser]}"
    if format is HARMONY:
        answer = calls if parser == "gpt-oss" else f"<|start|>assistant{HARMONY.answer}{calls}"
        return f"{HARMONY.start}<|message|>{THOUGHT}{HARMONY.end}{answer}"
    return calls if format is None else f"{format.start}{THOUGHT}{format.end}\n\n{calls}"


def sent_back(answer: Any, api: str, template: str) -> str:
    body = APIS[api].back(answer)
    check_chat(body)
    return "".join(rendered(template_of(SHAPES[template].source), body))


def has_both(prompt: str) -> bool:
    """Both calls are in it, each once, and their results."""
    return prompt.count("uno") == prompt.count("dos") == 1 and prompt.count(RESULT) == 2


def pairs() -> Iterator[tuple[str, str | None]]:
    """Parsers of calls with those of reasoning, one of each format; gpt-oss' channels hold both."""
    formats = {format: name for name, format in REASONING_FORMATS.items()}
    for parser in CALLS:
        for reasoning in (None, *formats.values()):
            if parser != "gpt-oss" or REASONING_FORMATS.get(reasoning or "") is HARMONY:
                yield parser, reasoning


def test_every_parser_is_here() -> None:
    assert {CALL_FORMATS[name] for name in CALLS if name != "gpt-oss"} == set(CALL_FORMATS.values())


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("parser", CALLS)
def test_an_answer_goes_back_whole_and_streamed(api: str, parser: str) -> None:
    template = FAMILY[parser]
    for reasoning in [reasoning for one, reasoning in pairs() if one == parser]:
        for size in (0, PIECES):
            answer = APIS[api].answer(said(parser, reasoning, template), size)
            prompt = sent_back(answer, api, template)
            assert has_both(prompt), (reasoning, prompt)
            assert FIRST in prompt and LAST in prompt and "None" not in prompt
            if reasoning is not None and "reasoning_content" in SHAPES[template].source:
                assert prompt.count(THOUGHT) == 1, prompt


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("parser", CALLS)
def test_an_answer_that_was_cut_goes_back(api: str, parser: str) -> None:
    """In its reasoning, its text, a call's head or arguments; it may be empty."""
    template = FAMILY[parser]
    reasoning = "gpt-oss" if parser == "gpt-oss" else "qwen3"
    text = _text_of(parser, reasoning)
    for cut in range(0, len(text), PIECES):
        for size in (0, PIECES):
            answer = APIS[api].answer(said(parser, reasoning, template, cut=cut), size)
            prompt = sent_back(answer, api, template)
            assert FIRST in prompt and LAST in prompt and "None" not in prompt, (cut, answer)


@pytest.mark.parametrize("template", WITH_TOOLS)
@pytest.mark.parametrize("parser", CALLS)
def test_an_answer_goes_through_any_template(parser: str, template: str) -> None:
    reasoning = "gpt-oss" if parser == "gpt-oss" else "qwen3"
    for api in APIS:
        prompt = sent_back(APIS[api].answer(said(parser, reasoning, template), 0), api, template)
        assert has_both(prompt), prompt


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("parser", CALLS)
def test_forced_calls_go_back(api: str, parser: str) -> None:
    """They are JSON for every model, so their ids are the server's."""
    template = FAMILY[parser]
    for size in (0, PIECES):
        forced = said(parser, None, template, text=ARRAY, tool_choice="required")
        prompt = sent_back(APIS[api].answer(forced, size), api, template)
        assert has_both(prompt), prompt
        if parser == "kimi_k2" and api != "ollama":
            assert "functions.add:0" in prompt and "functions.look_up:1" in prompt


def test_ids_are_those_that_the_models_write() -> None:
    for parser, pattern in (
        ("mistral", "[a-zA-Z0-9]{9}"),
        ("kimi_k2", r"functions\.(add:0|look_up:1)"),
        ("qwen25", "call_[0-9a-f]{32}"),
    ):
        for text in ("", ARRAY):
            more = {"tool_choice": "required"} if text else {}
            for size in (0, PIECES):
                calls = openai_message(said(parser, None, FAMILY[parser], text=text, **more), size)["tool_calls"]
                assert len({call["id"] for call in calls}) == 2
                assert all(re.fullmatch(pattern, call["id"]) for call in calls)


def test_a_custom_call_goes_back() -> None:
    custom = {"type": "custom", "custom": {"name": "run"}}
    text = '[{"name": "run", "parameters": {"input": "ls"}}]'
    answer = openai_message(said("qwen25", None, "qwen 3", text, tools=[custom], tool_choice="required"), 0)
    assert answer["tool_calls"][0]["custom"] == {"name": "run", "input": "ls"}
    assert '{"input": "ls"}' in sent_back(answer, "openai", "qwen 3")


def test_an_answer_without_its_thinking_goes_back() -> None:
    hidden = anthropic_blocks(said("qwen25", "qwen3", "qwen 3", cut=12), 0, shows_thinking=False)
    assert hidden == [] and LAST in sent_back(hidden, "anthropic", "qwen 3")
