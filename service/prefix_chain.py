"""Names of prompt prefixes that routers and workers compute alike: a worker's KV events then say what a router looks up. Pure.

    link[-1] = H(seed)     link[i] = H(link[i - 1], the next BLOCK_BYTES of the prompt)     name = the first 8 bytes of a link

The bytes of token ids are four each, little-endian. A page of a worker is named by H(the last link before its end, the bytes from there
on), so the last page of a block has the block's link. The lowest bit of a name tells: 1 where a block ends, 0 inside of one.

SHA-1 is the fastest of hashlib; a client that makes two prompts collide misroutes one of its own requests.
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
VERSION = 1  # of these names, in `kv_events_config` of /server_info

_sha1 = hashlib.sha1


def open_chain(seed: bytes) -> bytes:
    """Return the link before the first."""
    return _sha1(seed, usedforsecurity=False).digest()


def next_link(link: bytes, block: bytes | memoryview) -> bytes:
    return _sha1(link + block, usedforsecurity=False).digest()


def name_of(link: bytes) -> int:
    """Return the name of the prefix that ends with a block."""
    return int.from_bytes(link[:NAME_BYTES]) | 1


def block_names(names: list[int], page_size: int) -> list[int]:
    """Return the names of blocks among the names of consecutive pages."""
    pages = max(1, BLOCK_TOKENS // page_size)  # of a block
    first = next((place for place, name in enumerate(names[:pages]) if name & 1), len(names))
    return names[first::pages]


def token_bytes(tokens: Sequence[int]) -> bytes:
    """`tokens` as links hash them. OverflowError for what is no token id."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def token_seed(adapter: bytes = b"", namespace: Sequence[str] = ()) -> bytes:
    """The seed for token ids. `adapter`: JSON text of the LoRA adapter's name."""
    return b"ids\0" + adapter + named(namespace)


def named(namespace: Sequence[str]) -> bytes:
    """The part of a seed that a namespace is."""
    return b"\0" + msgspec.json.encode(namespace) if namespace else b""


def pages_make_blocks(page_size: int) -> bool:
    """Whether a block ends with a page, so that workers can name it."""
    return BLOCK_TOKENS % page_size == 0


def page_names(
    link: bytes, before: Sequence[int], tokens: Sequence[int], page_size: int
) -> Iterator[tuple[int, bytes]]:
    """Yield the name of each page that holds `tokens`, and the link where a block ends with it (else nothing).

    `link`: of the last block before; `before`: the tokens between. Pages that make no blocks are a block each.
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
