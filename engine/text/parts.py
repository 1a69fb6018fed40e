"""Readers of answers with reasoning and tool calls."""

import json
from collections.abc import Callable, Collection
from typing import Protocol

from engine.text.json_value import JsonValue
from engine.text.sample import Arguments, CallBegins, Part, PlainText, ReasoningText, TextAnswers, TextOutput


class PartReader(Protocol):
    """Reads one answer: `feed`, then `end`. `num_calls`: started calls."""

    @property
    def num_calls(self) -> int: ...
    def feed(self, text: str) -> list[Part]: ...
    def end(self) -> list[Part]: ...


class CallScanner:
    """`name`: set once the text surely is a call. `broken`: it is none."""

    name: str | None = None
    id = ""
    broken = False
    done = False
    _new = ""  # arguments

    def feed(self, text: str) -> int:
        """Return how many characters were consumed; negative gives back earlier ones."""
        raise NotImplementedError

    def end(self) -> None: ...

    def new_arguments(self) -> str:
        """New JSON of the arguments, in total one object."""
        new, self._new = self._new, ""
        return new


class PlainReader:
    num_calls = 0

    def feed(self, text: str) -> list[Part]:
        return [PlainText(text)] if text else []

    def end(self) -> list[Part]:
        return []


class ShownParts:
    """Parts of `reader` as `show` turns them, None to drop one."""

    def __init__(self, reader: PartReader, show: Callable[[Part], Part | None]) -> None:
        self.num_calls = 0
        self._reader = reader
        self._show = show

    def feed(self, text: str) -> list[Part]:
        return self._shown(self._reader.feed(text))

    def end(self) -> list[Part]:
        return self._shown(self._reader.end())

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown = [part for part in map(self._show, parts) if part is not None]
        self.num_calls += sum(isinstance(part, CallBegins) for part in shown)
        return shown


def without_reasoning(part: Part) -> Part | None:
    return None if isinstance(part, ReasoningText) else part


def first_call(part: Part) -> Part | None:
    return None if isinstance(part, CallBegins | Arguments) and part.index > 0 else part


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    most = min(len(text), len(marker) - 1)
    return next((n for n in range(most, 0, -1) if marker.startswith(text[-n:])), 0)


def split_at(text: str, markers: Collection[str]) -> tuple[str, str, str]:
    """Text before the first marker, the marker, and the rest.

    Without a marker ("") the rest may begin one.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    end = len(text) - max((overlap(text, marker) for marker in markers), default=0)
    return text[:end], "", text[end:]


# ---- Custom tools: the model writes {"input": TEXT}, the client gets TEXT.

INPUT = "input"


class CustomInputs:
    """Shows calls of `names` with their input as one `Arguments`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._written: dict[int, tuple[JsonValue, str]] = {}  # custom calls with incomplete input

    def show(self, part: Part) -> Part | None:
        if isinstance(part, CallBegins) and part.name in self._names:
            self._written[part.index] = (JsonValue(), "")
        if not isinstance(part, Arguments) or part.index not in self._written:
            return part
        arguments, written = self._written[part.index]
        arguments.feed(part.text)
        self._written[part.index] = (arguments, written + part.text)
        shown = _input_in(written + part.text) if arguments.done else ""
        return Arguments(part.index, shown) if shown else None


def _input_in(written: str) -> str:
    """Arguments other than one text are returned as they are."""
    try:
        arguments = json.loads(written)
    except RecursionError:
        return written
    value = arguments.get(INPUT, "" if not arguments else None)
    return value if isinstance(value, str) else written


# ---- Parts of a request's samples, read chunk by chunk.


MintId = Callable[[str, int], str]  # of function name and index of the call


class AnswerReaders(TextAnswers):
    """`make`: a sample's reader. `mint_id`: of calls without id."""

    is_plain = False

    def __init__(self, make: Callable[[], PartReader], mint_id: MintId) -> None:
        self._make = make
        self._mint_id = mint_id
        self._readers: dict[int, PartReader] = {}

    def read(self, index: int, output: TextOutput) -> list[Part]:
        reader = self._readers.get(index) or self._readers.setdefault(index, self._make())
        parts = reader.feed(output.text)
        parts = parts if output.tokens.finish is None else parts + reader.end()
        return [
            CallBegins(part.index, part.name, self._mint_id(part.name, part.index))
            if isinstance(part, CallBegins) and not part.id
            else part
            for part in parts
        ]

    def has_called(self, index: int) -> bool:
        return index in self._readers and self._readers[index].num_calls > 0
