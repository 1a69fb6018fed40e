"""Keys of prompt prefixes, alike in routers and workers, so that KV events match. Pure.

    link[-1] = H(seed)     link[i] = H(link[i - 1], next BLOCK_BYTES of the prompt)
    key = first 8 bytes of a link

Token ids are four bytes, little-endian. A page has the key of H(last link before its end, bytes
after it), so a block's last page has the block's. The lowest bit is 1 at a block's end. SHA-1 is
hashlib's fastest; collisions only misroute their own client.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence

import msgspec

BLOCK_BYTES = 512
TOKEN_BYTES = 4
BLOCK_TOKENS = BLOCK_BYTES // TOKEN_BYTES
NAME_BYTES = 8
VERSION = 1  # of these keys, in `kv_events_config` of /server_info

_sha1 = hashlib.sha1


def open_chain(seed: bytes) -> bytes:
    return _sha1(seed, usedforsecurity=False).digest()


def next_link(link: bytes, block: bytes | memoryview) -> bytes:
    return _sha1(link + block, usedforsecurity=False).digest()


def name_of(link: bytes) -> int:
    """Return the key of a prefix of whole blocks."""
    return int.from_bytes(link[:NAME_BYTES]) | 1


def block_names(names: list[int], page_size: int) -> list[int]:
    """Return the blocks' keys among consecutive pages'."""
    pages = max(1, BLOCK_TOKENS // page_size)  # per block
    first = next((place for place, name in enumerate(names[:pages]) if name & 1), len(names))
    return names[first::pages]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the hashed bytes. Raises OverflowError."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_seed(adapter: bytes = b"", namespace: Sequence[str] = ()) -> bytes:
    """Return the seed of ids. `adapter`: JSON of its name."""
    return b"ids\0" + adapter + named(namespace)


def named(namespace: Sequence[str]) -> bytes:
    """Return the namespace's part of a seed."""
    return b"\0" + msgspec.json.encode(namespace) if namespace else b""


def pages_make_blocks(page_size: int) -> bool:
    return BLOCK_TOKENS % page_size == 0


def page_names(
    link: bytes, before: Sequence[int], tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, bytes]]:
    """Yield each page's key, and the link where a block ends, else b"".

    `link` is of the block before, `before` are the tokens in between.
    """
    assert len(tokens) % page_size == 0 and len(before) % page_size == 0
    size = BLOCK_TOKENS if pages_make_blocks(page_size) else page_size
    running, end = _sha1(link + token_bytes(before), usedforsecurity=False), len(before)
    data, step = token_bytes(tokens), page_size * TOKEN_BYTES
    for at in range(0, len(data), step):
        running.update(data[at : at + step])
        digest, end = running.digest(), end + page_size
        if end % size:
            yield int.from_bytes(digest[:NAME_BYTES]) & ~1, b""
        else:
            yield name_of(digest), digest
            running = _sha1(digest, usedforsecurity=False)
