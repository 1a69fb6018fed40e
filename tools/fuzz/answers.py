"""Fuzzed answers at the readers of reasoning and tool calls: an input is one text of a model, read in two divisions into chunks.

Whatever the text and wherever it ends: the chunks do not matter; a call is of a function that may be called, and its
arguments are a JSON object; a text without calls and markers comes out as it is.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.frontend.apis.chat.reading import GPT_OSS, Reading
from engine.text import tool_calls
from engine.text.parts import PartReader, PlainReader
from engine.text.reasoning import ENDS, HEADS, MESSAGE, REASONING_FORMATS, Opening, ReasoningFormat
from engine.text.sample import WholeAnswer, joined
from engine.text.tool_calls import ARRAY, CALL_FORMATS, CallFormat
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

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_OBJECTS, _NAMES, _SLIPS = _DATA["objects"], _DATA["names"], _DATA["slips"]
_CALLS = {None if name == "none" else getattr(tool_calls, name): calls for name, calls in _DATA["calls"].items()}
_EVERY = [call for calls in _CALLS.values() for call in calls]


def _marks() -> Iterator[str]:
    for format in (ARRAY, *CALL_FORMATS.values()):
        yield from (format.marker, format.bare, format.bracket, format.opener, format.separator, format.closer)
        yield from format.fillers
    for reasoning in REASONING_FORMATS.values():
        yield from (reasoning.start, reasoning.end, reasoning.answer)


_PIECES = tuple(
    dict.fromkeys(
        text for text in (*_DATA["words"], *_SLIPS, *_DATA["tags"], MESSAGE, *HEADS, *ENDS, *_marks()) if text
    )
)


def _text(source: Source, format: CallFormat | None) -> str:
    """Calls, mostly of the format, and pieces of calls between words; often cut short, or with letters changed."""
    own = _CALLS[format]
    parts: list[str] = []
    for _ in range(1 + source.below(5)):
        if source.once_in(2):
            parts.append(source.pick(_PIECES))
            continue
        call = source.pick(_EVERY if source.once_in(4) else own)
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
        self.num_inputs = 0
        self.num_calls = 0

    def result(self) -> str:
        return f"{self.num_calls:,} calls were found"

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
        self.num_inputs += 1
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
