"""Images of simulated prompts, and how the hash model reads such a prompt: the right answers follow from it alone.

    tokens      5   9  49  49  49  49   3       49: the placeholder, which a prompt of text may have, too
    contents    5   9  c0  c1  c2  c3   3       c: of the image's pixels, row by row
    seen        5   9  contents, with their RoPE positions where these differ from their places

Nothing here asks the product for key ids, features or RoPE positions: wrong ones give other KV.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from engine.images import ImageInput, key_ids
from tests.core.hash_model import next_token, prefix_hash, step_hash
from tests.core.mem_cache.images import TOKEN, image
from tools.simulation.options import GRID, Options

SIZES = ((1, 1), (1, 2), (2, 2), (2, 2), (2, 3), (2, 3), (3, 3))  # of images by number: rows and columns of tokens
STARTS, GAPS = (0, 2, 5), (0, 0, 1, 4)  # text before the first image of a prompt, and before the others
SHARE = 0.6  # of prompts that bring images
FIRST_CONTENT = 1000  # no token id is so high

Turn = tuple[int, int, int]  # the RoPE positions of a token: time, row, column


@dataclass(frozen=True)
class PlacedImage:
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
        """Make the message that a frontend makes of the image's file."""
        rows, columns = SIZES[self.number]
        return image(self.number, at=self.start, rows=rows, columns=columns)


PlacedImages = tuple[PlacedImage, ...]


def placed_images(images: Sequence[ImageInput]) -> PlacedImages:
    """Return the images by number, which their pixels hold."""
    return tuple(PlacedImage(shown.start, shown.pixels[0]) for shown in images)


# ---- the model


def content(number: int, row: int) -> int:
    return FIRST_CONTENT + 100 * number + row


def contents(image: ImageInput) -> list[int]:
    """Return the features of its pixels; its place does not count."""
    return [content(image.pixels[0], row) for row in range(image.num_tokens)]


def seen_at(content: int, position: int, turn: Turn) -> int:
    """Return what the model reads at `position`: the content itself where the RoPE position is the place."""
    return content if turn == (position,) * 3 else prefix_hash([content, *turn])


def turns_of(images: PlacedImages, num_tokens: int) -> list[Turn]:
    """Return the RoPE positions of the first `num_tokens` tokens. Text behind an image goes on behind its longer side."""
    turns, following = list[Turn](), 0
    starts = {placed.start: placed for placed in images}
    while len(turns) < num_tokens:
        if (placed := starts.get(len(turns))) is None:
            turns.append((following,) * 3)
            following += 1
            continue
        rows, columns = SIZES[placed.number]
        turns += [(following, following + row, following + column) for row in range(rows) for column in range(columns)]
        following += max(rows, columns)
    return turns[:num_tokens]


def delta_of(images: PlacedImages) -> int:
    """Return RoPE position minus position behind the last image."""
    return sum(max(SIZES[placed.number]) - placed.num_tokens for placed in images)


def seen_of(tokens: Sequence[int], images: PlacedImages) -> list[int]:
    """Return what the model reads of `tokens`, a prompt or a prompt with an answer. The last image may be cut."""
    if not images:
        return list(tokens)
    found = list(tokens)
    for placed in images:
        for row, position in enumerate(range(placed.start, min(placed.end, len(found)))):
            found[position] = content(placed.number, row)
    return [
        seen_at(of, at, turn) for at, (of, turn) in enumerate(zip(found, turns_of(images, len(found)), strict=True))
    ]


def right_tokens(prompt: list[int], images: PlacedImages, n: int, *, eos: int, adapter: int) -> list[int]:
    """Return the tokens of greedy generation."""
    value, delta, out = prefix_hash(seen_of(prompt, images), adapter), delta_of(images), list[int]()
    while len(out) < n:
        token, position = next_token(value), len(prompt) + len(out)
        out.append(token)
        if token == eos:
            break
        value = step_hash(value, seen_at(token, position, (position + delta,) * 3))
    return out


def seen_by_keys(keys: Sequence[int]) -> list[int]:
    """Return what the model reads of a path in a radix tree, where key ids stand for images."""
    found, images = _first_keys(), list[PlacedImage]()
    for at, key in enumerate(keys):
        if key in found and not (images and at < images[-1].end):
            images.append(PlacedImage(at, found[key]))
    return seen_of(keys, tuple(images))


def contents_by_keys(keys: Sequence[int]) -> list[int]:
    """Of an image alone, or its beginning."""
    number = _first_keys()[keys[0]]
    rows, columns = SIZES[number]
    return [content(number, row) for row in range(min(len(keys), rows * columns))]


@cache
def _first_keys() -> dict[int, int]:
    """Return each image's number by the key id of its first token."""
    images = [PlacedImage(0, number) for number in range(len(SIZES))]
    return {key_ids([placed.input()], [TOKEN] * placed.num_tokens, 0)[0]: placed.number for placed in images}


# ---- requests


def choose_images(draw: random.Random, length: int, options: Options) -> PlacedImages:
    """Choose images for a prompt of `length` tokens: some, one of them twice, or none. A worker has room for those of one part."""
    if draw.random() >= SHARE:
        return ()
    images, at = list[PlacedImage](), draw.choice(STARTS)
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        again = bool(images) and draw.random() < 0.3
        placed = PlacedImage(at, draw.choice(images).number if again else draw.randrange(len(SIZES)))
        if placed.end > length or not _fits([*images, placed], options):
            break
        images.append(placed)
        at = placed.end + draw.choice(GAPS)
    return tuple(images)


def _fits(images: Sequence[PlacedImage], options: Options) -> bool:
    part = GRID if options.state_slots != (0, 0) else options.page_size
    return all(_needed(images, start, start + part) <= options.image_room for start in range(images[-1].end))


def _needed(images: Sequence[PlacedImage], start: int, end: int) -> int:
    touched = {placed.number: placed.num_tokens for placed in images if placed.start < end and placed.end > start}
    return sum(touched.values())


def with_placeholders(prompt: list[int], images: PlacedImages) -> list[int]:
    """Put placeholders in place of text; the length stays."""
    found = list(prompt)
    for placed in images:
        found[placed.start : placed.end] = [TOKEN] * placed.num_tokens
    return found


def whole_ones(images: PlacedImages, length: int) -> PlacedImages:
    """Return the images that end within the first `length` tokens."""
    return tuple(placed for placed in images if placed.end <= length)
