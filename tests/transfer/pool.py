"""Memory of a worker in a test: pages and metadata rows whose bytes name their worker."""

import hashlib
from collections.abc import Sequence

import numpy as np

from transfer_backends.contract import KVArgs, Region

CANARY = 0xA5


class Pool:
    """`num_pages` pages and 64 metadata rows. `seed` fills them; None: every byte is the canary."""

    def __init__(self, *, num_pages: int, page_bytes: int, seed: int | None, signature: str = "model-a") -> None:
        self.num_pages = num_pages
        self.kv = np.full((num_pages, page_bytes), CANARY, np.uint8)
        self.aux = np.full((64, 512), CANARY, np.uint8)
        if seed is not None:
            draw = np.random.default_rng(seed)
            self.kv[:] = draw.integers(0, 256, self.kv.shape, dtype=np.uint8)
            self.aux[:] = draw.integers(0, 256, self.aux.shape, dtype=np.uint8)
        self.args = KVArgs(_region(self.kv), _region(self.aux), signature, 16, "float32")

    def pages(self, ids: Sequence[int]) -> str:
        return hashlib.sha256(self.kv[list(ids)].tobytes()).hexdigest()

    def rows(self, ids: Sequence[int]) -> str:
        return hashlib.sha256(self.aux[list(ids)].tobytes()).hexdigest()

    def others(self, ids: Sequence[int]) -> list[int]:
        """Pages beside `ids` that are not canary any more."""
        touched = np.flatnonzero((self.kv != CANARY).any(axis=1))
        return sorted(set(touched.tolist()) - set(ids))

    def wipe(self) -> None:
        self.kv[:] = CANARY
        self.aux[:] = CANARY


def _region(rows: np.ndarray) -> Region:
    return Region(rows.ctypes.data, rows.shape[0], rows.shape[1], None)
