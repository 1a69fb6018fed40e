"""JSON from outside: decoding, and a check of nesting before recursion."""

import re
from typing import Any

import msgspec

# msgspec's errors: malformed or mistyped JSON, invalid UTF-8, too many levels.
JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_DEPTH = 64  # of a request body; schemas of tools, the deepest honest values, stay below 20

_STRINGS = re.compile(rb'"[^"]*+"?')  # optional end: truncated text is scanned once
_KEPT = b'[{]}"'
_DROPPED = bytes(c for c in range(256) if c not in _KEPT)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def decode_or_none(text: bytes, type_: Any = Any) -> Any:
    """Return the value, None for other text or types."""
    try:
        return msgspec.json.decode(text, type=type_)
    except JSON_ERRORS:
        return None


def object_of(text: bytes) -> dict[str, Any]:
    return decode_or_none(text, dict[str, Any]) or {}


def deeper_than(text: bytes, limit: int = MAX_DEPTH) -> bool:
    """Return whether JSON nests deeper than `limit`."""
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
    kept = text.translate(_ONE_KIND, _DROPPED).replace(b'""', b"")  # adjacent strings merge into one
    return _STRINGS.sub(b"", kept) if b'"' in kept else kept
