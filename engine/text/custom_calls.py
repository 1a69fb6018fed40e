"""Calls of custom tools: the model writes {"input": TEXT} as for a function; the client receives the text. Pure."""

import json
from collections.abc import Collection

from engine.text.parts import Arguments, CallBegins, Part, PartReader

INPUT = "input"


class CustomInputs:
    """The parts of `reader`, where `Arguments` of a call to one of `names` are its input, whole."""

    def __init__(self, reader: PartReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._written: dict[int, str] = {}  # of custom calls whose input is not complete

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def feed(self, text: str) -> list[Part]:
        return self._shown(self._reader.feed(text))

    def end(self) -> list[Part]:
        """An input that length has cut is shown as far as it came."""
        parts = self._shown(self._reader.end())
        cut = ((index, _input_in(written + '"}')) for index, written in self._written.items())
        return parts + [Arguments(index, input) for index, input in cut if input]

    def _shown(self, parts: list[Part]) -> list[Part]:
        return [shown for part in parts if (shown := self._show(part)) is not None]

    def _show(self, part: Part) -> Part | None:
        if isinstance(part, CallBegins) and part.name in self._names:
            self._written[part.index] = ""
        if not isinstance(part, Arguments) or part.index not in self._written:
            return part
        self._written[part.index] += part.text
        written = self._written[part.index]
        input = _input_in(written) if written.endswith("}") else None
        if input is None:
            return None
        del self._written[part.index]
        return Arguments(part.index, input)


def _input_in(written: str) -> str | None:
    """None: it is not complete. Other arguments than one text are shown as they are."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        return None
    value = arguments.get(INPUT) if isinstance(arguments, dict) else None
    return value if isinstance(value, str) else written
