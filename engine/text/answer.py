"""The samples of a request as parts: each has one reader, which goes on from chunk to chunk. Pure."""

from collections.abc import Callable

from engine.text.parts import Part, PartReader
from engine.text.sample import TextOutput


class AnswerReaders:
    """`make`: a new reader, one for each sample."""

    def __init__(self, make: Callable[[], PartReader]) -> None:
        self._make = make
        self._readers: dict[int, PartReader] = {}

    def read(self, index: int, output: TextOutput) -> list[Part]:
        """Parts of what is new of a sample; a whole answer is new text that ends."""
        reader = self._readers.get(index) or self._readers.setdefault(index, self._make())
        parts = reader.feed(output.text)
        return parts if output.tokens.finish is None else parts + reader.end()

    def has_called(self, index: int) -> bool:
        """Whether the sample has begun a tool call."""
        return index in self._readers and self._readers[index].num_calls > 0
