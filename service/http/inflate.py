"""Decompression of request bodies within bounds: gzip, deflate (RFC 9110, 8.4.1)."""

import zlib
from collections.abc import Iterator

from service.http.errors import ApiError

USUAL_TIMES = 40  # largest factor of honest chats
MOST_TIMES = 100  # allowed factor beyond `ALWAYS_BYTES`
ALWAYS_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10  # per call of zlib
_MOST_MEMBERS = 1024  # per gzip body
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # `wbits` of zlib
_READ = frozenset(("gzip", "x-gzip", "deflate"))
_NOT_READ = frozenset(("br", "zstd", "compress", "x-compress", "dcb", "dcz", "exi", "aes128gcm", "pack200-gzip"))


def most_inflated(size: int, *, most_bytes: int) -> int:
    return min(most_bytes, max(ALWAYS_BYTES, MOST_TIMES * size))


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
    pieces, size, most = [], 0, most_inflated(len(data), most_bytes=most_bytes)
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
            if members > _MOST_MEMBERS:
                raise EOFError(f"it has more than {_MOST_MEMBERS} members")
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
        f"the body inflates to more than {most} bytes ({coding}: to {MOST_TIMES} times its size or {ALWAYS_BYTES} bytes, and to no "
        "more than a plain body has); send it as it is, or send less"
    )
    return ApiError(413, message, code="body_too_large")
