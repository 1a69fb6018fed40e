"""Images of simulated prompts, and what the hash model sees of such a prompt: the right answers follow from it alone.

    tokens      5   9  49  49  49  49   3       49: the placeholder, which a prompt of text may have, too
    contents    5   9  c0  c1  c2  c3   3       c: of the image's pixels, row by row
    seen        5   9  those of an image and behind it with their RoPE positions, where these are not their places

Nothing here asks the product for key ids, features or RoPE positions: whoever has other ones computes other KV.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from engine.images import ImageInput, key_ids
from tests.core.hash_model import next_token, prefix_hash, step_hash
from tests.core.images import TOKEN, image
from tools.simulation.options import GRID, Options

SIZES = ((1, 1), (1, 2), (2, 2), (2, 2), (2, 3), (2, 3), (3, 3))  # of images by number: rows and columns of tokens
LARGEST = 9  # tokens of an image
STARTS, GAPS = (0, 2, 5), (0, 0, 1, 4)  # text before the first image of a prompt, and before the others
SHARE = 0.6  # of prompts that bring images
FIRST_CONTENT = 1000  # no token id is so high

Turn = tuple[int, int, int]  # the RoPE positions of a token: time, row, column


@dataclass(frozen=True)
class Sight:
    """An image by its number, and where it begins in its prompt."""

    start: int
    number: int

    @property
    def num_tokens(self) -> int:
        rows, columns = SIZES[self.number]
        return rows * columns

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def input(self) -> ImageInput:
        """As a frontend makes it of the image's file."""
        rows, columns = SIZES[self.number]
        return image(self.number, at=self.start, rows=rows, columns=columns)


Sights = tuple[Sight, ...]


def sights_of(images: Sequence[ImageInput]) -> Sights:
    """By their pixels."""
    return tuple(Sight(shown.start, shown.pixels[0]) for shown in images)


# ---- what is seen


def content(number: int, row: int) -> int:
    return FIRST_CONTENT + 100 * number + row


def contents(image: ImageInput) -> list[int]:
    """Features of its pixels, wherever it stands."""
    return [content(image.pixels[0], row) for row in range(image.num_tokens)]


def seen_at(content: int, position: int, turn: Turn) -> int:
    """What the model sees at `position`: the same of as much text as without images."""
    return content if turn == (position,) * 3 else prefix_hash([content, *turn])


def turns_of(sights: Sights, num_tokens: int) -> list[Turn]:
    """An image begins behind what is before it, and what follows goes on behind its longer side."""
    turns, following = list[Turn](), 0
    starts = {sight.start: sight for sight in sights}
    while len(turns) < num_tokens:
        if (sight := starts.get(len(turns))) is None:
            turns.append((following,) * 3)
            following += 1
            continue
        rows, columns = SIZES[sight.number]
        turns += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
        following += max(rows, columns)
    return turns[:num_tokens]


def delta_of(sights: Sights) -> int:
    """RoPE position minus position behind all of them."""
    return sum(max(SIZES[sight.number]) - sight.num_tokens for sight in sights)


def seen_of(tokens: Sequence[int], sights: Sights) -> list[int]:
    """What the model sees of `tokens`, of a prompt or an answer behind it. The last image may be cut."""
    if not sights:
        return list(tokens)
    found = list(tokens)
    for sight in sights:
        for row, position in enumerate(range(sight.start, min(sight.end, len(found)))):
            found[position] = content(sight.number, row)
    return [
        seen_at(of, at, turn) for at, (of, turn) in enumerate(zip(found, turns_of(sights, len(found)), strict=True))
    ]


def right_tokens(prompt: list[int], sights: Sights, n: int, *, eos: int, adapter: int) -> list[int]:
    """What greedy generation must give."""
    value, delta, out = prefix_hash(seen_of(prompt, sights), adapter), delta_of(sights), list[int]()
    while len(out) < n:
        token, position = next_token(value), len(prompt) + len(out)
        out.append(token)
        if token == eos:
            break
        value = step_hash(value, seen_at(token, position, (position + delta,) * 3))
    return out


def seen_by_keys(keys: Sequence[int]) -> list[int]:
    """The same of a path in a radix tree, where key ids stand for images."""
    found, sights = _first_keys(), list[Sight]()
    for at, key in enumerate(keys):
        if key in found and not (sights and at < sights[-1].end):
            sights.append(Sight(at, found[key]))
    return seen_of(keys, tuple(sights))


@cache
def _first_keys() -> dict[int, int]:
    """The key id of each image's first token -> its number."""
    sights = [Sight(0, number) for number in range(len(SIZES))]
    return {key_ids([sight.input()], [TOKEN] * sight.num_tokens, 0)[0]: sight.number for sight in sights}


# ---- what is asked


def draw_sights(draw: random.Random, length: int, options: Options) -> Sights:
    """Images for a prompt of `length` tokens: some, one of them twice, or none. A worker has room for what it needs at once."""
    if draw.random() >= SHARE:
        return ()
    sights, at = list[Sight](), draw.choice(STARTS)
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        again = bool(sights) and draw.random() < 0.3
        sight = Sight(at, draw.choice(sights).number if again else draw.randrange(len(SIZES)))
        if sight.end > length or not _fits([*sights, sight], options):
            break
        sights.append(sight)
        at = sight.end + draw.choice(GAPS)
    return tuple(sights)


def _fits(sights: Sequence[Sight], options: Options) -> bool:
    part = GRID if options.state_slots != (0, 0) else options.page_size
    return all(_needed(sights, start, start + part) <= options.image_room for start in range(sights[-1].end))


def _needed(sights: Sequence[Sight], start: int, end: int) -> int:
    touched = {sight.number: sight.num_tokens for sight in sights if sight.start < end and sight.end > start}
    return sum(touched.values())


def with_placeholders(prompt: list[int], sights: Sights) -> list[int]:
    """As a frontend expands it: the same length, some of its text is images."""
    found = list(prompt)
    for sight in sights:
        found[sight.start : sight.end] = [TOKEN] * sight.num_tokens
    return found


def whole_ones(sights: Sights, length: int) -> Sights:
    """Those of a longer prompt that its first `length` tokens have whole."""
    return tuple(sight for sight in sights if sight.end <= length)
