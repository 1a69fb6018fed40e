"""Keys of prompt prefixes, computed alike by routers and workers, so that KV events match. Pure.

    link[-1] = H(seed)     link[i] = H(link[i - 1], next BLOCK_BYTES of the prompt)
    key = first 8 bytes of a link

A token id is four bytes, little-endian. A worker's page has the key of H(last link before its end,
bytes from there on), so the last page of a block has the block's key. The lowest bit is 1 at the
end of a block, else 0. SHA-1 is hashlib's fastest; a client that makes prompts collide misroutes
only its own.
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
    """Return the link before the first."""
    return _sha1(seed, usedforsecurity=False).digest()


def next_link(link: bytes, block: bytes | memoryview) -> bytes:
    return _sha1(link + block, usedforsecurity=False).digest()


def name_of(link: bytes) -> int:
    """Return the key of the prefix that ends with a block."""
    return int.from_bytes(link[:NAME_BYTES]) | 1


def block_names(names: list[int], page_size: int) -> list[int]:
    """Return the keys of blocks among those of consecutive pages."""
    pages = max(1, BLOCK_TOKENS // page_size)  # per block
    first = next((place for place, name in enumerate(names[:pages]) if name & 1), len(names))
    return names[first::pages]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the hashed bytes of `tokens`. Raises OverflowError for an invalid id."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_seed(adapter: bytes = b"", namespace: Sequence[str] = ()) -> bytes:
    """Return the seed of token ids. `adapter`: JSON of the LoRA adapter's name."""
    return b"ids\0" + adapter + named(namespace)


def named(namespace: Sequence[str]) -> bytes:
    """Return a namespace's part of a seed."""
    return b"\0" + msgspec.json.encode(namespace) if namespace else b""


def pages_make_blocks(page_size: int) -> bool:
    """Return whether blocks end with pages."""
    return BLOCK_TOKENS % page_size == 0


def page_names(
    link: bytes, before: Sequence[int], tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, bytes]]:
    """Yield each page's key, and the link where a block ends with it, else b"".

    `link` is of the last block before `tokens`, `before` are the tokens in between.
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
