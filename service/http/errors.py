"""Errors of HTTP requests, and what is read of a body: JSON, codings, bounds."""

import re
import zlib
from collections.abc import Collection, Iterator
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


# ---- Decompression of request bodies within bounds: gzip, deflate (RFC 9110, 8.4.1).

USUAL_TIMES = 40  # largest factor of honest chats
MAX_TIMES = 100  # allowed factor beyond `ALWAYS_BYTES`
ALWAYS_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10  # per call of zlib
_MAX_MEMBERS = 1024  # per gzip body
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # `wbits` of zlib
_READ = frozenset(("gzip", "x-gzip", "deflate"))
_NOT_READ = frozenset(("br", "zstd", "compress", "x-compress", "dcb", "dcz", "exi", "aes128gcm", "pack200-gzip"))


def max_inflated(size: int, *, most_bytes: int) -> int:
    return min(most_bytes, max(ALWAYS_BYTES, MAX_TIMES * size))


def coding_of(encoding: str) -> str:
    """Return the coding, if any ("utf-8" is none). Raises ApiError(415)."""
    names = [name.strip().lower() for name in encoding.split(",")]
    codings = [name for name in names if name in _READ | _NOT_READ]
    if len(codings) > 1 or _NOT_READ.intersection(codings):
        text = f"Content-Encoding: {encoding[:40]!r} is not read here; send gzip, deflate, or the body as it is"
        raise ApiError(415, text, code="unsupported_media_type")
    return codings[0] if codings else ""


def inflate(data: bytes, coding: str, *, most_bytes: int) -> bytes:
    """Decompress. ApiError: 413 too large, 400 broken."""
    pieces, size, most = [], 0, max_inflated(len(data), most_bytes=most_bytes)
    if not data:
        return data
    try:
        for piece in _pieces(data, coding):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise _too_much(coding, most)
    except (zlib.error, EOFError) as error:
        raise ApiError(400, f"the body cannot be read as {coding}: {error}") from None
    return b"".join(pieces)


def _pieces(data: bytes, coding: str) -> Iterator[bytes]:
    bits = _bits(data, coding)
    inflater, rest, given, members = zlib.decompressobj(bits), b"", 0, 1
    while rest or given < len(data) or not inflater.eof:
        if inflater.eof:
            inflater, members = zlib.decompressobj(bits), members + 1
            if members > _MAX_MEMBERS:
                raise EOFError(f"it has more than {_MAX_MEMBERS} members")
        if len(rest) < _PIECE_BYTES:
            rest, given = rest + data[given : given + _PIECE_BYTES], given + _PIECE_BYTES
        piece = inflater.decompress(rest, _PIECE_BYTES)
        rest = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        if not (piece or rest or inflater.eof or given < len(data)):
            raise EOFError("it is cut short")
        yield piece


def _bits(data: bytes, coding: str) -> int:
    if coding != "deflate":
        return _GZIP
    return _ZLIB if data[:1] and data[0] & 0xF == 8 else _RAW  # some clients omit zlib's header


def _too_much(coding: str, most: int) -> ApiError:
    message = (
        f"the body inflates to more than {most} bytes ({coding}: to {MAX_TIMES} times its size or {ALWAYS_BYTES} bytes, and to no "
        "more than a plain body has); send it as it is, or send less"
    )
    return ApiError(413, message, code="body_too_large")


# ---- Bounds of a body's JSON, whose objects take many times its bytes.

MAX_PARTS = 1 << 18  # lists, objects, texts and names: 50,000 messages of a chat
MAX_VALUES = 1 << 21  # entries of lists and objects: token ids
MAX_FIELDS = 1024  # top-level fields
_JSON_PIECE_BYTES = 4 << 20  # per call
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[{,"')


def check_bounds(body: bytes) -> None:
    """Raise ApiError(413) for too much JSON; other text may pass."""
    marks = b"".join(map(_marks, _json_pieces(body)))
    texts = marks.count(b'"') // 2
    if texts <= MAX_PARTS:
        marks = _STRINGS.sub(b"", marks)
        lists = marks.count(b"[") + marks.count(b"{")
        if texts + lists <= MAX_PARTS and lists + marks.count(b",") <= MAX_VALUES:
            return
    message = (
        f"the body holds more than {MAX_PARTS} lists, objects and texts, or more than {MAX_VALUES} values; "
        "send less in one request"
    )
    raise ApiError(413, message, code="body_too_large")


def check_fields(fields: Collection[str]) -> None:
    """Raise ApiError(400) for too many fields."""
    if len(fields) > MAX_FIELDS:
        raise ApiError(400, f"the body has {len(fields)} fields; at most {MAX_FIELDS} are read")


def _json_pieces(body: bytes) -> list[bytes]:
    """Split, but not after an escaping backslash."""
    pieces, start = [], 0
    while start < len(body):
        piece = body[start : start + _JSON_PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last one is an escape
            piece = body[start : start + len(piece) + 1]
        pieces.append(piece)
        start += len(piece)
    return pieces


def _marks(piece: bytes) -> bytes:
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return piece.translate(None, _NO_MARKS)
