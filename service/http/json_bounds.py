"""Bounds of a body's JSON, whose objects take many times its bytes."""

import re
from collections.abc import Collection

from service.http.errors import ApiError

MOST_PARTS = 1 << 18  # lists, objects, texts and names: 50,000 messages of a chat
MOST_VALUES = 1 << 21  # entries of lists and objects: token ids
MOST_FIELDS = 1024  # top-level fields
_PIECE_BYTES = 4 << 20  # per call
_STRINGS = re.compile(rb'"[^"]*+"?')  # optional end: truncated text is scanned once
_DROPPED = bytes(c for c in range(256) if c not in b'[{,"')


def check_bounds(body: bytes) -> None:
    """Raise ApiError(413) for too much JSON; other text may pass."""
    marks = b"".join(map(_marks, _pieces(body)))
    texts = marks.count(b'"') // 2
    if texts <= MOST_PARTS:
        marks = _STRINGS.sub(b"", marks)
        lists = marks.count(b"[") + marks.count(b"{")
        if texts + lists <= MOST_PARTS and lists + marks.count(b",") <= MOST_VALUES:
            return
    message = (
        f"the body holds more than {MOST_PARTS} lists, objects and texts, or more than {MOST_VALUES} values; "
        "send less in one request"
    )
    raise ApiError(413, message, code="body_too_large")


def check_fields(fields: Collection[str]) -> None:
    """Raise ApiError(400) for too many fields."""
    if len(fields) > MOST_FIELDS:
        raise ApiError(400, f"the body has {len(fields)} fields; at most {MOST_FIELDS} are read")


def _pieces(body: bytes) -> list[bytes]:
    """Split, but not after an escaping backslash."""
    pieces, start = [], 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last one is an escape
            piece = body[start : start + len(piece) + 1]
        pieces.append(piece)
        start += len(piece)
    return pieces


def _marks(piece: bytes) -> bytes:
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return piece.translate(None, _DROPPED)
