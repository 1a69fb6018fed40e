"""A thousand images that do harm, as data: cut, flipped, bombs, files of other kinds, huge headers. Made here, from seeds."""

import random
import struct
import zlib
from collections.abc import Iterator

from tests.frontend.vision import file_of, picture

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
CUTS, FLIPS = 60, 120  # of each format
BOMBS = (6_000, 10_000, 16_000)  # pixels of a side
MEGABYTES = 2


def hostile_images() -> Iterator[tuple[str, bytes]]:
    """(name, file). Some flips leave an image that is whole: it is served; all else is refused."""
    for format in FORMATS:
        data = file_of(picture(64, 48), format)
        yield from _cut(format, data)
        yield from _flipped(format, data)
        yield from _shuffled(format, data)
        yield from ((f"{format} bomb of {side}", bomb(format, side)) for side in BOMBS)
    yield from _other_kinds()
    yield from _headers()


def _cut(format: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    for i in range(CUTS):
        yield f"{format} cut {i}", data[: len(data) * i // CUTS]


def _flipped(format: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(format)
    for i in range(FLIPS):
        wrong = bytearray(data)
        for _ in range(1 + i % 4):  # the first half in the header, where they do most
            wrong[rng.randrange(min(len(data), 64) if i % 2 else len(data))] ^= 1 << rng.randrange(8)
        yield f"{format} flip {i}", bytes(wrong)


def _shuffled(format: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(format)
    for i in range(20):
        yield f"{format} noise {i}", data[:16] + rng.randbytes(200 * i)


def bomb(format: str, side: int) -> bytes:
    """A file of some bytes that says it has side x side pixels."""
    if format == "PNG":
        return _png(_ihdr(side, side), b"IDAT" + zlib.compress(bytes(30_000), 9))
    if format == "GIF":
        return b"GIF89a" + struct.pack("<HH", side, side) + file_of(picture(8, 8), "GIF")[10:]
    data = bytearray(file_of(picture(8, 8), format))
    behind, kind = {
        "BMP": (b"\x28\0\0\0", "<ii"),
        "JPEG": (b"\xff\xc0\0\x11\x08", ">HH"),
        "WEBP": (b"\x9d\x01\x2a", "<HH"),
    }[format]
    at = data.index(behind) + len(behind)
    data[at : at + struct.calcsize(kind)] = struct.pack(kind, side, side)
    return bytes(data)


def _ihdr(width: int, height: int, depth: int = 8, color: int = 2) -> bytes:
    return b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)


def _png(*chunks: bytes) -> bytes:
    framed = (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def _other_kinds() -> Iterator[tuple[str, bytes]]:
    small = picture(16, 16)
    for format in ("TIFF", "ICO", "PPM", "TGA", "PCX", "SGI", "EPS", "PDF", "JPEG2000", "DDS"):
        yield format, file_of(small, format)
    starts = [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"<!doctype html>", b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b\x08",
    ]  # fmt: skip
    starts += [b"%PDF-1.7", b"#!/bin/sh\n", b"\x00" * 100, b"\xff" * 100, b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"GIF89a"]
    starts += [b"RIFF\xff\xff\xff\xffWEBP", b"BM", b"%!PS\n(/etc/passwd) run", b"\x00\x00\x00\x20ftypavif", b"a"]
    starts += [b"push graphic-context\nimage over 0,0 0,0 'https://a.org'"]
    for start in starts:
        yield repr(start[:12]), start
        yield f"{start[:12]!r} and more", start + random.Random(start).randbytes(5000)


def _headers() -> Iterator[tuple[str, bytes]]:
    """Megabytes before the picture, text that unpacks to gigabytes, counts and lengths that lie."""
    header, pixels = _ihdr(8, 8), b"IDAT" + zlib.compress(bytes(200))
    text = zlib.compress(bytes(MEGABYTES << 24), 9)
    yield "PNG text that unpacks", _png(header, *[b"zTXta\0\0" + text] * 8, pixels, b"IEND")
    yield "PNG profile that unpacks", _png(header, b"iCCPa\0\0" + text, pixels, b"IEND")
    yield "PNG chunks", _png(header, *[b"tEXta\0b"] * 20_000)
    yield "PNG huge chunk", _png(header, b"prVt" + bytes(MEGABYTES << 20))
    yield "PNG no pixels", _png(header, b"IEND")
    for width, height in ((0, 0), (0, 8), (2**31 - 1, 2**31 - 1), (2**31, 1), (2**32 - 1, 1)):
        yield f"PNG of {width} x {height}", _png(_ihdr(width, height), pixels)
    for depth, color in ((1, 2), (3, 0), (16, 3), (8, 5), (255, 255)):
        yield f"PNG of depth {depth}, {color}", _png(_ihdr(8, 8, depth, color), pixels)
    yield "JPEG segments", b"\xff\xd8" + (b"\xff\xe1\xff\xff" + bytes(65533)) * 30
    yield "JPEG of EXIF that lies", b"\xff\xd8\xff\xe1\x00\x20Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(20)
    yield "GIF blocks", b"GIF89a\x08\0\x08\0\0\0\0" + (b"!\xfe\xff" + b"a" * 255 + b"\0") * 5000
    for width, height in ((0, 0), (65535, 65535), (65535, 1)):
        head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)
        yield f"GIF of {width} x {height}", head + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x02L\x01\0;"
    for size in (-(2**31), 2**31 - 1, 0):
        head = struct.pack("<IiiHHIIiiII", 40, size, size, 1, 24, 0, 0, 0, 0, 0, 0)
        yield f"BMP of {size}", b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head
    yield "WEBP of 16383 x 16383", b"RIFF\x1a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0" + bytes(8)
