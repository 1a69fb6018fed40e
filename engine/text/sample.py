"""The text of one sample, and the parts of an answer: reasoning, text, tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.messages import TokenOutput

Span = tuple[int, int]  # start and end in a text, in characters


class TextOutput(msgspec.Struct, kw_only=True):
    """`TokenOutput` with new final text.

    Parallel to `tokens.logprobs`: `logprob_texts` of the chosen token and alternatives (`top`, then
    `requested`), `logprob_spans` in the sample's text (part of a character has no width).
    """

    text: str
    tokens: TokenOutput
    logprob_texts: list[tuple[str, list[str]]] = []
    logprob_spans: list[Span] = []
    input_logprob_texts: list[tuple[str, list[str]]] = []


class ReasoningText(msgspec.Struct, frozen=True):
    text: str


class PlainText(msgspec.Struct, frozen=True):
    text: str


class CallBegins(msgspec.Struct, frozen=True):
    """The `index`-th call. `id`: if the format has one."""

    index: int
    name: str
    id: str = ""


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments' JSON."""

    index: int
    text: str


Part = ReasoningText | PlainText | CallBegins | Arguments


@dataclass(slots=True)
class ToolCall:
    name: str
    id: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def joined(parts: Iterable[Part], into: WholeAnswer | None = None) -> WholeAnswer:
    """`into`: the earlier parts, which the new ones continue."""
    whole = WholeAnswer() if into is None else into
    for part in parts:
        match part:
            case ReasoningText(text):
                whole.reasoning += text
            case PlainText(text):
                whole.text += text
            case CallBegins(_, name, id):
                whole.calls.append(ToolCall(name, id))
            case Arguments(index, text):
                whole.calls[index].arguments += text
    return whole


class TextAnswers:
    """Reads a request's samples as plain text; `AnswerReaders` finds reasoning and calls, too."""

    is_plain = True

    def read(self, index: int, output: TextOutput) -> list[Part]:
        return [PlainText(output.text)] if output.text else []

    def has_called(self, index: int) -> bool:
        return False
