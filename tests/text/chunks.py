"""Reads one text in many ways, which must all give the same answer."""

import random
from collections.abc import Callable, Iterator

from engine.text.parts import PartReader
from engine.text.sample import WholeAnswer, joined


def read(reader: PartReader, chunks: list[str]) -> WholeAnswer:
    return joined([part for chunk in chunks for part in reader.feed(chunk)] + reader.end())


def splits(text: str, *, seeds: int = 20) -> Iterator[list[str]]:
    """The whole text, its characters, and random chunks."""
    yield [text]
    yield list(text)
    for seed in range(seeds):
        rng, chunks, at = random.Random(seed), [], 0
        while at < len(text):
            size = rng.randint(1, 9)
            chunks.append(text[at : at + size])
            at += size
        yield chunks


def same_of_all_splits(make: Callable[[], PartReader], text: str) -> WholeAnswer:
    whole = read(make(), [text])
    for chunks in splits(text):
        assert read(make(), chunks) == whole, chunks
    return whole
