"""Bodies of requests: inflated within bounds, and how much JSON one may hold."""

import re
import zlib
from collections.abc import Collection, Iterator

from service.http.errors import ApiError

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
_STRINGS = re.compile(rb'"[^"]*+"?')  # optional end: truncated text is scanned once
_DROPPED = bytes(c for c in range(256) if c not in b'[{,"')


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
    return piece.translate(None, _DROPPED)
