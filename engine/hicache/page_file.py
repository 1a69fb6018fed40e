"""File of one KV page: header and bytes.

| magic 8 | header length 4, little-endian | header: msgpack of `Header` | zeros | page bytes |
|<------------------------- HEADER_BYTES ------------------------------------->|<- page_bytes ->|
"""

import hashlib

import msgspec

from engine.core.page_keys import KVIdentity

MAGIC = b"TANDEMKV"
VERSION = 1
HEADER_BYTES = 1024
_AT = len(MAGIC) + 4


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`key`: chained hash of all tokens up to the page's end."""

    version: int
    identity: KVIdentity
    key: bytes
    checksum: bytes


class BadFile(ValueError):
    """The file is not the page of its name."""


def file_bytes(identity: KVIdentity) -> int:
    return HEADER_BYTES + identity.page_bytes


def encode_header(identity: KVIdentity, key: bytes, page: memoryview) -> bytes:
    """Raises ValueError if names are too long for HEADER_BYTES."""
    header = Header(version=VERSION, identity=identity, key=key, checksum=checksum(page))
    encoded = msgspec.msgpack.encode(header)
    if len(encoded) > HEADER_BYTES - _AT:
        raise ValueError(f"a page's header takes {len(encoded)} bytes, there is room for {HEADER_BYTES - _AT}")
    return (MAGIC + len(encoded).to_bytes(4, "little") + encoded).ljust(HEADER_BYTES, b"\0")


def check_page(raw: bytes, page: memoryview, *, identity: KVIdentity, key: bytes) -> None:
    """Raises BadFile unless the header `raw` matches `page`, `identity` and `key`."""
    header = _decode(raw)
    for name, expected in {"version": VERSION, "identity": identity, "key": key}.items():
        if getattr(header, name) != expected:
            raise BadFile(f"{name} is {getattr(header, name)!r}, not {expected!r}")
    if header.checksum != checksum(page):
        raise BadFile("the checksum is wrong")


def _decode(raw: bytes) -> Header:
    length = int.from_bytes(raw[len(MAGIC) : _AT], "little")
    if len(raw) != HEADER_BYTES or raw[: len(MAGIC)] != MAGIC or length > HEADER_BYTES - _AT:
        raise BadFile("not a page file")
    try:
        return msgspec.msgpack.decode(raw[_AT : _AT + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec lets broken UTF-8 through as such
        raise BadFile(f"the header cannot be read: {error}") from error


def checksum(page: memoryview) -> bytes:
    return hashlib.sha256(page).digest()
