"""Fuzzed answers at the readers of reasoning and tool calls: an input is one text of a model, read in two divisions into chunks.

Whatever the text and wherever it ends: the chunks do not matter; a call is of a function that may be called, and its
arguments are a JSON object; a text without calls and markers comes out as it is.
"""

import json
from collections.abc import Callable, Iterator

from engine.frontend.apis.chat.reading import GPT_OSS, Reading
from engine.text.call_formats import (
    ARRAY,
    CALL_FORMATS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    KIMI_K2,
    LLAMA3,
    LLAMA4,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    QWEN25,
    CallFormat,
)
from engine.text.harmony import ENDS, HEADS, MESSAGE
from engine.text.parts import PartReader, PlainReader, WholeAnswer, joined
from engine.text.reasoning import REASONING_FORMATS, Opening, ReasoningFormat
from tools.fuzz.source import Source

FORCED = "forced"
PARSERS = (*CALL_FORMATS, *GPT_OSS, FORCED, "")
REASONINGS = ("", *REASONING_FORMATS)
FUNCTIONS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/B"}}, "$defs": {"B": {}}},
    "run": {"type": "object", "properties": {"input": {"type": "string"}}},
    "no": None,
}
CUSTOM = "run"
MAX_ANSWERS = 12

_OBJECTS = (
    '{"a": 1, "b": [2, {"c": "}\\"{"}]}',
    '{"input": "x\\ny <b>"}',
    "{}",
    "null",
    '"{\\"a\\": 1}"',
    "[1]",
    "NaN",
)
_NAMES = ("add", "run", "add", "no", "run", "rm", " add", "")
_SLIPS = (
    "\n",
    "}",
    "{",
    '"',
    "\\",
    ",",
    ":",
    "True",
    "\\ud83d",
    "\\u12",
    "\t",
    "'",
    "]",
    "[",
    "(",
    ")",
    "=",
    "-",
    "1e999",
)
_WORDS = (
    "so ",
    "é鬱",
    " \n",
    "a",
    "<",
    "|",
    "functions.add:0",
    "<tool",
    "name",
    "arguments",
    "parameters",
    "input",
    "\ufffd",
)
_TAGS = (
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<parameter=a>",
    "<parameter=input>",
    "</parameter>",
    ">",
)
_MORE = ("</function>", "<｜tool▁sep｜>", "[ARGS]", "[CALL_ID]", "<|tool_call_argument_begin|>", MESSAGE, *HEADS, *ENDS)


def _marks() -> Iterator[str]:
    for format in (ARRAY, *CALL_FORMATS.values()):
        yield from (format.marker, format.bare, format.bracket, format.opener, format.separator, format.closer)
        yield from format.fillers
    for reasoning in REASONING_FORMATS.values():
        yield from (reasoning.start, reasoning.end, reasoning.answer)


_PIECES = tuple(dict.fromkeys(text for text in (*_WORDS, *_SLIPS, *_TAGS, *_MORE, *_marks()) if text))


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_CALLS: tuple[tuple[CallFormat | None, str], ...] = (
    (QWEN25, f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    (LLAMA3, f"<|python_tag|>{_OBJECT}"),
    (LLAMA3, f"{_OBJECT}; "),
    (ARRAY, f"[{_OBJECT}, {_OBJECT}]"),
    (MISTRAL, f"[TOOL_CALLS] [{_OBJECT}]"),
    (MISTRAL, "[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    (PYTHONIC, "[NAME(a=1, b=[2, {'c': 'd'}]), NAME(input='x')]"),
    (LLAMA4, "<|python_start|>[NAME(a=1), NAME(input='\\ud800')]<|python_end|>"),
    (DEEPSEEK_V3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"),
    (KIMI_K2, "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"),
    (GLM45, "<tool_call>NAME\n<arg_key>a</arg_key>\n<arg_value>ARGUMENTS</arg_value>\n</tool_call>"),
    (GLM45, "<tool_call>NAME\n<arg_key>input</arg_key>\n<arg_value>x\ny</arg_value>\n</tool_call>"),
    (QWEN3_CODER, "<function=NAME>\n<parameter=input>\nx\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>"),
    (QWEN3_CODER, "<tool_call>\n<function=NAME>\n<parameter=b>\nARGUMENTS\n</parameter>\n</function>\n</tool_call>"),
    (None, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|><|start|>assistant"),
)


def _text(source: Source, format: CallFormat | None) -> str:
    """Calls, mostly of the format, and pieces of calls between words; often cut short, or with letters changed."""
    own = [call for of, call in _CALLS if of is format]
    every = [call for _, call in _CALLS]
    parts: list[str] = []
    for _ in range(1 + source.below(5)):
        if source.once_in(2):
            parts.append(source.pick(_PIECES))
            continue
        call = source.pick(every if source.once_in(4) else own)
        call = call.replace("NAME", source.pick(_NAMES)).replace("ARGUMENTS", source.pick(_OBJECTS))
        parts.append(call[: source.below(len(call) + 1)] if source.once_in(4) else call)
    text = "".join(parts)
    for _ in range(source.below(6) // 3):
        at = source.below(len(text) + 1)
        text = text[:at] + source.pick(_SLIPS) + text[at + source.below(3) :]
    return text[: source.below(len(text) + 1)] if source.once_in(4) else text


def _chunks(source: Source, text: str) -> list[str]:
    most, chunks, at = 1 + source.below(12), [], 0
    while at < len(text):
        size = 1 + source.below(most)
        chunks.append(text[at : at + size])
        at += size
    return chunks


class Answers:
    """Reads answers; counts them, and the calls that were found."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.num_calls = 0

    def run(self, data: bytes) -> None:
        source = Source(data)
        for _ in range(MAX_ANSWERS):
            if source.is_empty:
                break
            self._read(source)

    def _read(self, source: Source) -> None:
        parser, reasoning = source.pick(PARSERS), REASONING_FORMATS.get(source.pick(REASONINGS))
        reading = _reading(parser, reasoning, source)
        make = reading.reader(source.pick(list(Opening))) or PlainReader
        text = _text(source, reading.calls)
        whole = _answer(make, [text])
        about = (parser, reasoning, text, whole)
        assert _answer(make, _chunks(source, text)) == whole == _answer(make, list(text)), about
        if not whole.calls and not reading.in_channels and not reading.leaves_out:
            assert _bare(whole.reasoning + whole.text, reading) == _bare(text, reading), about
        (whole.reasoning + whole.text + "".join(call.arguments for call in whole.calls)).encode()
        for call in whole.calls:
            assert call.name in FUNCTIONS, about
            assert call.name in reading.customs or isinstance(_strict(call.arguments), dict), about
        self.num_answers += 1
        self.num_calls += len(whole.calls)


def _reading(parser: str, reasoning: ReasoningFormat | None, source: Source) -> Reading:
    return Reading(
        reasoning=reasoning,
        separates=reasoning is not None and not source.once_in(4),
        leaves_out=reasoning is not None and source.once_in(8),
        streams=not source.once_in(3),
        calls=ARRAY if parser == FORCED else CALL_FORMATS.get(parser),
        calls_in_channels=parser in GPT_OSS,
        functions=FUNCTIONS,
        customs=frozenset({CUSTOM} if source.once_in(3) else ()),
        only_one=source.once_in(5),
    )


def _answer(make: Callable[[], PartReader], chunks: list[str]) -> WholeAnswer:
    reader = make()
    whole = joined([part for chunk in chunks for part in reader.feed(chunk)] + reader.end())
    assert reader.num_calls == len(whole.calls), (chunks, whole)
    return whole


def _strict(text: str) -> object:
    """JSON as other languages read it: no NaN, no half of a pair of surrogates."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {text!r}")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _bare(text: str, reading: Reading) -> str:
    """Without space, and without the markers that a reader of reasoning takes away."""
    text = "".join(text.split())
    markers = (reading.reasoning.start, reading.reasoning.end) if reading.separates and reading.reasoning else ()
    while any(marker in text for marker in markers):
        for marker in markers:
            text = text.replace(marker, "")
    return text
