"""JSON from outside: errors of decoding, and nesting, found before code walks the values recursively."""

import re
from typing import Any

import msgspec

# What msgspec raises: malformed or of another type; text that is no UTF-8; too many levels.
JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_DEPTH = 64  # of a request body; tools' schemas, the deepest honest things, stay below 20

_STRINGS = re.compile(rb'"[^"]*+"?')  # the end is optional: a cut-off text is read once
_KEPT = b'[{]}"'
_DROPPED = bytes(c for c in range(256) if c not in _KEPT)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def decode_or_none(text: bytes, type_: Any = Any) -> Any:
    """The JSON value; None for text that is not JSON, or of another type."""
    try:
        return msgspec.json.decode(text, type=type_)
    except JSON_ERRORS:
        return None


def object_of(text: bytes) -> dict[str, Any]:
    """The JSON object; empty for any other text."""
    return decode_or_none(text, dict[str, Any]) or {}


def deeper_than(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than `limit` deep. Text that is not JSON may get either answer."""
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    brackets = _brackets(text)
    if b"[" * (limit + 1) in brackets:
        return True
    for _ in range(limit):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level of every branch
    return b"[]" in brackets or brackets.count(b"[") > limit


def _brackets(text: bytes) -> bytes:
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = text.translate(_ONE_KIND, _DROPPED).replace(b'""', b"")  # two strings with no bracket between them are one
    return _STRINGS.sub(b"", kept) if b'"' in kept else kept
