"""Names of whole KV pages by what they hold: a chained hash over everything that decides their bytes.

    seed = H(identity of the KV, branch)     key[0] = H(seed, tokens of page 0)     key[i] = H(key[i-1], tokens of page i)

Equal keys mean equal KV, in this process and in the next one. SHA-256, because a prompt that collides on purpose would read
another client's KV.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from engine.core.request import Request
from engine.images import KEY_BYTES


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of KV besides its tokens. `layout`: of a page's bytes, with the kind of device.

    `model`: signature of its shape; `weights`: name of their version, and a fingerprint of their files.
    """

    layout: str
    dtype: str
    page_size: int
    page_bytes: int
    model: str
    weights: str

    def seed(self, adapter: str = "", namespace: tuple[str, ...] = ()) -> bytes:
        """Return the start of a chain. KV of different adapters or namespaces is never shared. `adapter`: name of its load."""
        return hashlib.sha256(msgspec.msgpack.encode((msgspec.structs.astuple(self), adapter, *namespace))).digest()


def next_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Return the keys of the whole pages that hold `tokens`, after the page with key `before` (or the seed)."""
    assert len(tokens) % page_size == 0
    keys = []
    for at in range(0, len(tokens), page_size):
        before = hashlib.sha256(before + _packed(tokens[at : at + page_size])).digest()
        keys.append(before)
    return keys


def _packed(tokens: Sequence[int]) -> bytes:
    """Return bytes that no other page of as many tokens has: ids of images take more bytes, and so do all beside them."""
    try:
        return array("q", tokens).tobytes()
    except OverflowError:
        return b"".join([token.to_bytes(KEY_BYTES + 1, "little", signed=True) for token in tokens])


class RequestKeys:
    """Page keys of requests, computed once each.

    `run_id`: unique to this process: files outlive it, and an adapter's number means nothing in another.
    """

    def __init__(self, identity: KVIdentity, *, run_id: str) -> None:
        self.identity = identity
        self._run_id = run_id

    def of(self, request: Request, num_pages: int) -> list[bytes]:
        """Return the keys of the first `num_pages` pages of `request`, which are whole."""
        adapter = f"adapter {request.adapter} of {self._run_id}" if request.adapter else ""
        seed = self.identity.seed(adapter, request.namespace)
        size, known = self.identity.page_size, request.lower_tiers
        if known.seed != seed:
            known.keys, known.seed = [], seed
        keys = known.keys
        if len(keys) < num_pages:
            tokens = request.key_tokens(len(keys) * size, num_pages * size)
            keys += next_keys(keys[-1] if keys else seed, tokens, size)
        return keys[:num_pages]
