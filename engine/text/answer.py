"""Parts of a request's samples, read chunk by chunk."""

from collections.abc import Callable

from engine.text.parts import Part, PartReader
from engine.text.sample import TextOutput


class AnswerReaders:
    def __init__(self, make: Callable[[], PartReader]) -> None:
        self._make = make
        self._readers: dict[int, PartReader] = {}

    def read(self, index: int, output: TextOutput) -> list[Part]:
        reader = self._readers.get(index) or self._readers.setdefault(index, self._make())
        parts = reader.feed(output.text)
        return parts if output.tokens.finish is None else parts + reader.end()

    def has_called(self, index: int) -> bool:
        return index in self._readers and self._readers[index].num_calls > 0
