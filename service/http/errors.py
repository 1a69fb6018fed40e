"""Errors of every server: status, message, `Retry-After`. Their JSON: api_shapes.py."""

import re
from typing import Any, TypeVar

import msgspec

# ---- JSON from outside: decoding, and a check of nesting before recursion.

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


# ---- errors

T = TypeVar("T")

DRAINING = "draining"  # error code, and `status` on /health
MODEL_ERROR = "model_error"  # error code: the model gave no token for this request
INTERNAL_ERROR = "internal_error"  # error code: this request met a bug
REQUEST_ERRORS = frozenset(
    (MODEL_ERROR, INTERNAL_ERROR)
)  # of a 500 that the request may have caused, as others are served

_NAMED = re.compile(r"(missing required|contains unknown) field `([^`]+)`")
_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")


class ApiError(Exception):
    """A response other than 2xx. `field`: wrong part of the request. `code`: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_after_s = retry_after_s


def bad_field(field: str, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, f"{field}: {message}", field=field, code=code)


def decode_body(data: bytes, type_: type[T]) -> T:
    """Decode JSON strictly. Raises ApiError(400) with the field."""
    if deeper_than(data):
        raise ApiError(400, f"the body is nested too deeply (more than {MAX_DEPTH} levels)", code="invalid_json")
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e).removeprefix("JSON is malformed: ")
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None


def _wrong_type(message: str) -> ApiError:
    match = _PATH.search(message)
    path, text = ("", message) if match is None else (match.group(1), message[: match.start()])
    named = _NAMED.search(text)
    field = ".".join(filter(None, (path, named[2] if named else "")))
    if named and named[1] == "contains unknown":
        return bad_field(field, "is no field that this server knows; leave it out", code="unsupported_parameter")
    shown = text if match is None else f"{field}: {text[:1].lower()}{text[1:]}".removeprefix(": ")
    return ApiError(400, shown, field=field or None)
