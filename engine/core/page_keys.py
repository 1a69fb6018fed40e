"""Names of whole KV pages by what they hold: a chained hash over everything that decides their bytes.

    seed = H(identity of the KV, extra key)     key[0] = H(seed, tokens of page 0)     key[i] = H(key[i-1], tokens of page i)

Equal keys mean equal KV, in this process and in the next one: host memory and disk find pages by them. Chained hashes
are vLLM's and SGLang's way too; SHA-256, because a prompt that collides on purpose would read another client's KV.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What KV depends on besides tokens. `layout`: how a page's bytes are laid out, and for which device they were made.

    `model`: signature of its shape; `weights`: which ones (name of the version, and a fingerprint of their files).
    """

    layout: str
    dtype: str
    page_size: int
    page_bytes: int
    model: str
    weights: str

    def seed(self, extra_key: str = "") -> bytes:
        """Start of a chain. `extra_key`: KV under different ones is never shared (a load of an adapter)."""
        return hashlib.sha256(msgspec.msgpack.encode((msgspec.structs.astuple(self), extra_key))).digest()


def next_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of the pages that hold `tokens` (whole pages only), after the page with key `before` (or the seed)."""
    assert len(tokens) % page_size == 0
    keys = []
    for at in range(0, len(tokens), page_size):
        before = hashlib.sha256(before + array("q", tokens[at : at + page_size]).tobytes()).digest()
        keys.append(before)
    return keys
