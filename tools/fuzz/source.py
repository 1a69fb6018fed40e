"""Choices read from bytes, so that one draw of hypothesis is a whole story: about 50 times faster than a draw a choice.

As libFuzzer's FuzzedDataProvider does it (atheris has the same). Bytes that have run out are zeros, and zero is always
the first option: put the plain one there, then a failure shrinks towards plain stories.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from hypothesis import strategies as st

T = TypeVar("T")
Value = Callable[["Source"], Any]
STORY_BYTES = st.binary(min_size=200, max_size=1600)
_LEAVES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf")),
    *("", "a", "é", "x" * 300, "\x00\n", b"", b"\x00\xff", b"\x7f" * 40),
)


class Target(Protocol):
    """What stories are played at. `num_inputs`: so far."""

    num_inputs: int

    def run(self, data: bytes) -> None:
        """Play one story; an error means that what must hold did not."""

    def result(self) -> str:
        """What came of all, once nothing is left of it."""


def told(statuses: Counter[int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in sorted(statuses.items()))


class Source:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def below(self, end: int) -> int:
        """0 <= n < end."""
        size = (max(1, (end - 1).bit_length()) + 7) // 8
        return int.from_bytes(self.raw(size)) % end

    def raw(self, size: int) -> bytes:
        """Fewer bytes only where nothing is left."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def once_in(self, count: int) -> bool:
        """Never once nothing is left, so what is rare is left out first."""
        return self.below(count) == count - 1

    def text(self, max_size: int) -> bytes:
        return self.raw(self.below(max_size + 1))


def odd(source: Source, depth: int = 2) -> Any:
    """Any value that msgpack can say."""
    kind = source.below(8) if depth else 0
    if kind == 7:
        return {f"k{i}": odd(source, depth - 1) for i in range(source.below(4))}
    if kind >= 5:
        return [odd(source, depth - 1) for _ in range(source.below(4))]
    return source.raw(4) if kind == 4 else source.pick(_LEAVES)


def mangled(source: Source, frame: bytes) -> bytes:
    """With bytes changed, cut off or added."""
    out = bytearray(frame)
    for _ in range(1 + source.below(3)):
        at, act = source.below(len(out) + 1), source.below(3)
        if act == 0 and at < len(out):
            out[at] ^= 1 + source.below(255)
        elif act == 1:
            out[at:at] = source.text(4)
        else:
            del out[at:]
    return bytes(out)


def spoilt(source: Source, value: list[Any]) -> bytes:
    """The message, mostly; else a field of another kind, too few or many of them, or bytes that differ."""
    kind = source.below(40)
    if kind == 23:
        return source.text(64)
    if kind == 22:
        return msgspec.msgpack.encode(odd(source, 4))
    if kind in (20, 21):
        value[source.below(len(value))] = odd(source)
    elif kind == 19:
        value = value[: source.below(len(value) + 1)]
    elif kind == 18:
        value.append(odd(source))
    frame = msgspec.msgpack.encode(value)
    return mangled(source, frame) if kind in (15, 16, 17) else frame
