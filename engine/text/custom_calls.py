"""Custom tools: the model writes {"input": TEXT}, the client gets TEXT."""

import json
from collections.abc import Collection

from engine.text.json_value import JsonValue
from engine.text.parts import Arguments, CallBegins, Part, PartReader

INPUT = "input"


class CustomInputs:
    """Parts of `reader`; calls of `names` get their input as one `Arguments`."""

    def __init__(self, reader: PartReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._written: dict[int, tuple[JsonValue, str]] = {}  # custom calls with incomplete input

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def feed(self, text: str) -> list[Part]:
        return self._shown(self._reader.feed(text))

    def end(self) -> list[Part]:
        return self._shown(self._reader.end())

    def _shown(self, parts: list[Part]) -> list[Part]:
        return [shown for part in parts if (shown := self._show(part)) is not None]

    def _show(self, part: Part) -> Part | None:
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
