"""Frames of the control plane, drawn from bytes: sender and receiver are given, their messages are mostly sound.

Knows the messages and values that are near a limit. Knows no cores and no sockets.
"""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tools.fuzz.source import Source, odd, spoilt
from transfer_backends.contract import Region
from transfer_backends.liveness import ProcessMark
from transfer_backends.wire import MAX_ROW_BYTES, Layout

_EDGES = (2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1)
_REASONS = ("", "because", "x" * 2048, "x" * 2049, "\x00\n", "é")
_STRANGERS = ("", "stranger", "x" * 256, "x" * 257, "é")


@dataclass(frozen=True)
class Ends:
    """Of one link: the incarnations at both ends, and what decode has, so that frames can be nearly right.

    `lives`: more incarnations that there are. `rooms`: the first one that may be live, and how many.
    """

    src: str
    dst: str
    layout: Layout
    kv: Region
    aux: Region
    mark: ProcessMark
    lives: tuple[str, ...] = ()
    rooms: tuple[int, int] = (1, 6)


def to_prefill(source: Source, ends: Ends) -> bytes:
    return _frame(source, ends, source.pick(_TO_PREFILL))


def to_decode(source: Source, ends: Ends) -> bytes:
    return _frame(source, ends, source.pick(_TO_DECODE))


def offer(source: Source, ends: Ends, room: int) -> bytes:
    """Pages, wherever they are, for a room."""
    return msgspec.msgpack.encode(["TransferInfo", ends.src, ends.dst, room, 0, pages(source, ends), 0])


def register(source: Source, ends: Ends) -> bytes:
    return _frame(source, ends, "Register")


def _frame(source: Source, ends: Ends, kind: str) -> bytes:
    src, dst = _names(source, ends)
    value = [kind, src, dst, *(_FIELDS[field](source, ends) for field in _MESSAGES[kind])]
    return spoilt(source, value)


def _names(source: Source, ends: Ends) -> tuple[str, str]:
    if not source.once_in(8):
        return ends.src, ends.dst
    names = (ends.src, ends.dst, *ends.lives, *_STRANGERS)
    return source.pick(names), source.pick(names)


def pages(source: Source, ends: Ends) -> bytes:
    """int32 ids: sound, twice, negative, beyond the end, or no ids at all."""
    if source.once_in(8):
        return source.text(20)
    end, wild = ends.kv.num_items, source.once_in(3)
    count = source.below(7)
    drawn = [_page(source, end) if wild else source.below(end) for _ in range(count)]
    ids = drawn if source.once_in(4) else list(dict.fromkeys(drawn))
    return b"".join(i.to_bytes(4, "little", signed=True) for i in ids)


def _page(source: Source, end: int) -> int:
    return source.pick((end - 1, 0, end, end + 1, -1, 2**31 - 1, -(2**31)))


def _room(source: Source, ends: Ends) -> Any:
    first, count = ends.rooms
    return first + source.below(count) if not source.once_in(12) else source.pick((0, *_EDGES))


def _row_bytes(source: Source, ends: Ends) -> Any:
    """None, a whole one, or one of another size."""
    whole = bytes(ends.aux.item_bytes)
    return source.pick(
        (b"", b"", whole, whole, whole[1:], whole + b"x", bytes(MAX_ROW_BYTES), bytes(MAX_ROW_BYTES + 1))
    )


def _region(source: Source, sound: Region) -> Any:
    """The one there is; or moved, longer, with another width, wrapping around, or empty."""
    if not source.once_in(4):
        return [sound.base_ptr, sound.num_items, sound.item_bytes, None]
    return source.pick(
        (
            [sound.base_ptr + (1 << 42), sound.num_items, sound.item_bytes, None],
            [sound.base_ptr, sound.num_items + 1, sound.item_bytes, None],
            [sound.base_ptr, sound.num_items, sound.item_bytes + 1, None],
            [2**63 - 1, 2**62, sound.item_bytes, None],
            [2**63 - 1, sound.num_items, sound.item_bytes, None],
            [sound.base_ptr, 2**31 + 1, sound.item_bytes, None],
            [sound.base_ptr, sound.num_items, 2 * sound.item_bytes, None],
            [2**63 - 1, 2**63 - 1, sound.item_bytes, 0],
            [sound.base_ptr, 2**31, sound.item_bytes, None],
            [0, 0, 0, 7],
            odd(source),
        )
    )


def _layout(source: Source, ends: Ends) -> Any:
    layout = list(msgspec.structs.astuple(ends.layout))
    if source.once_in(6):
        layout[source.below(len(layout))] = odd(source)
    return layout


def _ranks(source: Source, ends: Ends) -> Any:
    """One rank that has all; or a part of that, more than there is, several, or none."""
    one = [_region(source, ends.kv), 0, 1, 0, 1, source.text(8)]
    if source.once_in(6):
        one[1 + source.below(4)] = source.pick((0, 1, 2, 2**16, 2**16 + 1, -1))
    return source.pick(([one], [one], [one], [one, one], [], [one] * 1025))


def _marks(source: Source, ends: Ends) -> Any:
    mark = list(msgspec.structs.astuple(ends.mark)) if not source.once_in(6) else odd(source)
    return source.pick(([mark], [mark], [mark, mark], []))


Field = Callable[[Source, Ends], Any]
_FIELDS: dict[str, Field] = {
    "room": _room,
    "attempt": lambda source, ends: source.pick((0, 0, 0, 0, 1, 2, 2**31 - 1, 2**31)),
    "later attempt": lambda source, ends: source.pick((1, 1, 2, 3, 0, 2**31)),
    "count": lambda source, ends: source.below(8) if not source.once_in(8) else source.pick(_EDGES),
    "row": lambda source, ends: source.below(ends.aux.num_items + 1) if not source.once_in(12) else source.pick(_EDGES),
    "retry": lambda source, ends: source.pick((0, 0, 0, 0, 1, 255, 256, -1)),
    "reason": lambda source, ends: source.pick(_REASONS),
    "reasons": lambda source, ends: [source.pick(_REASONS) for _ in range(source.below(4))],
    "flag": lambda source, ends: source.once_in(2),
    "state": lambda source, ends: source.below(7) - 1,
    "pages": pages,
    "row bytes": _row_bytes,
    "layout": _layout,
    "ranks": _ranks,
    "aux": lambda source, ends: _region(source, ends.aux),
    "marks": _marks,
}
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_MESSAGES: dict[str, list[str]] = _DATA["messages"]
_TO_PREFILL, _TO_DECODE = (
    [kind for kind, times in _DATA[way].items() for _ in range(times)] for way in ("to_prefill", "to_decode")
)
