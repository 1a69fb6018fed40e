"""Images of a prompt between processes of a worker. Pure, never torch.

*Key ids* replace an image's tokens in prefix comparison, so that only equal images share KV. *RoPE
positions* have three dimensions (M-RoPE, Qwen2-VL, arXiv:2409.12191). *Features* from a vision
tower replace the embeddings of its tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

KEY_BYTES = 32
FIRST_KEY_ID = 1 << 8 * KEY_BYTES - 1  # minimum key id, far above token ids

RopePositions = tuple[list[int], list[int], list[int]]  # time, row and column of each token


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image, or frames of a video, at input_ids[start : start + num_tokens].

    key:    SHA-256 of everything that determines its features (`KEY_BYTES`)
    grid:   (time, rows, columns) of its patches
    merge:  patches per token, in rows and in columns
    size:   (frames, height, width) of `pixels`
    pixels: resized uint8 [frames, height, width, 3]; empty if another process encodes
    time_step: RoPE positions per step of `grid`'s time
    """

    start: int
    num_tokens: int
    key: bytes
    grid: tuple[int, int, int]
    merge: int
    size: tuple[int, int, int]
    pixels: bytes = b""
    time_step: int = 1

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def span(self) -> int:
        time, rows, columns = self._merged
        return max((time - 1) * self.time_step + 1, rows, columns)

    @property
    def _merged(self) -> tuple[int, int, int]:
        time, rows, columns = self.grid
        return time, rows // self.merge, columns // self.merge

    def rope_positions(self, base: int) -> Iterator[tuple[int, int, int]]:
        time, rows, columns = self._merged
        for t in range(time):
            for row in range(rows):
                for column in range(columns):
                    yield base + t * self.time_step, base + row, base + column


def key_ids(images: Sequence[ImageInput], tokens: list[int], start: int) -> list[int]:
    """`tokens` from position `start`, with key ids for images."""
    found, end = list(tokens), start + len(tokens)
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            found[first - start : last - start] = _ids_of(image)[first - image.start : last - image.start]
    return found


def rope_delta(images: Sequence[ImageInput]) -> int:
    """RoPE position minus position after all `images`.

    Negative, except for videos with more time than tokens.
    """
    return sum(image.span - image.num_tokens for image in images)


def positions_taken(num_tokens: int, images: Sequence[ImageInput]) -> int:
    """Context positions of a prompt: RoPE's, if more than its tokens."""
    return num_tokens + max(0, rope_delta(images))


def rope_positions(images: Sequence[ImageInput], start: int, end: int) -> RopePositions:
    """`images`: of the whole prompt."""
    found: list[tuple[int, int, int]] = []
    at = delta = 0
    for image in images:
        found += _plain(max(at, start), min(image.start, end), delta)
        if image.end > start and image.start < end:
            inside = list(image.rope_positions(image.start + delta))
            found += inside[max(0, start - image.start) : end - image.start]
        at, delta = image.end, delta + image.span - image.num_tokens
    found += _plain(max(at, start), end, delta)
    return [t for t, _, _ in found], [row for _, row, _ in found], [column for _, _, column in found]


def _plain(start: int, end: int, delta: int) -> list[tuple[int, int, int]]:
    return [(position + delta,) * 3 for position in range(start, end)]


def _ids_of(image: ImageInput) -> list[int]:
    stream = hashlib.shake_256(image.key).digest(KEY_BYTES * image.num_tokens)
    return [
        int.from_bytes(stream[at : at + KEY_BYTES], "little") | FIRST_KEY_ID for at in range(0, len(stream), KEY_BYTES)
    ]
