"""Keys of whole KV pages: chained hashes of everything that decides their bytes.

  seed = H(identity of the KV, branch)     key[0] = H(seed, tokens of page 0)
  key[i] = H(key[i-1], tokens of page i)

Equal keys mean equal KV, across processes. SHA-256 prevents deliberate collisions, which would read
another client's KV.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from engine.core.request import Request
from engine.images import KEY_BYTES


class KVIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of KV besides tokens; `weights` is version and fingerprint."""

    layout: str
    dtype: str
    page_size: int
    page_bytes: int
    model: str
    weights: str

    def seed(self, adapter: str = "", namespace: tuple[str, ...] = ()) -> bytes:
        """Chain start per adapter load and namespace."""
        return hashlib.sha256(msgspec.msgpack.encode((msgspec.structs.astuple(self), adapter, *namespace))).digest()


def next_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of whole pages after key `before` or the seed."""
    assert len(tokens) % page_size == 0
    keys = []
    for at in range(0, len(tokens), page_size):
        before = hashlib.sha256(before + _packed(tokens[at : at + page_size])).digest()
        keys.append(before)
    return keys


def _packed(tokens: Sequence[int]) -> bytes:
    """Return unique bytes; pages with image ids use more bytes."""
    try:
        return array("q", tokens).tobytes()
    except OverflowError:
        return b"".join([token.to_bytes(KEY_BYTES + 1, "little", signed=True) for token in tokens])


class RequestKeys:
    """Cached page keys of requests.

    `run_id` separates processes: files outlive one, adapter numbers do not.
    """

    def __init__(self, identity: KVIdentity, *, run_id: str) -> None:
        self.identity = identity
        self._run_id = run_id

    def of(self, request: Request, num_pages: int) -> list[bytes]:
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
