"""Metadata (aux) buffers: a row per transfer, written after the KV by the same engine.

It has the first token and related values. `room` is last and vouches for the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.plan import ItemResult
from engine.messages import MAX_REQUESTED_TOKEN_IDS, TokenLogprob
from transfer_backends.contract import Region, Tail

MAX_TOP = 128
MAX_ASKED = MAX_REQUESTED_TOKEN_IDS
MAX_DURATION_S = 1e6
MASK = (1 << 64) - 1

ROW = np.dtype(
    [
        ("first_token", "<i8"),
        ("bad", "<i8"),
        ("cached_tokens", "<i8"),
        ("has_logprob", "<i8"),
        ("top_num", "<i8"),
        ("requested_num", "<i8"),
        ("logprob", "<f8"),
        ("queue_s", "<f8"),
        ("prefill_s", "<f8"),
        ("has_kv_checksum", "<i8"),
        ("kv_checksum", "<i8"),
        ("weights", "<u8"),
        ("unused", "V32"),
        ("top_values", "<f8", MAX_TOP),
        ("top_ids", "<i8", MAX_TOP),
        ("requested_values", "<f8", MAX_ASKED),
        ("requested_ids", "<i8", MAX_ASKED),
        ("room", "<u8"),
        ("padding", "V56"),
    ]
)


PendingChecksum = Callable[[], int | None]  # signed, 64 bits; None while the device computes it
# (pages in order, extra state, tokens up to the end of the last page or None if pages are full)
Checksum = Callable[[Sequence[int], Tail, int | None], PendingChecksum]


class MetadataCorrupt(Exception):
    """A landed row belongs to another room."""


class KVCorrupt(Exception):
    """Landed pages differ from the sent ones."""


def verified(first: "FirstToken", pending: PendingChecksum, *, num_pages: int) -> "FirstToken | None":
    """None while pending. Raises KVCorrupt."""
    found = pending()
    if found is None:
        return None
    if first.kv_checksum != found:
        sent = "none" if first.kv_checksum is None else f"{first.kv_checksum & MASK:016x}"
        raise KVCorrupt(f"checksum of {num_pages} pages is {found & MASK:016x}, prefill sent {sent}: KV was corrupted")
    return first


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Content of a row; times are prefill's. `other_weights`: unlike ours."""

    result: ItemResult
    cached_tokens: int
    queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_checksum: int | None = None
    other_weights: bool = False


class MetadataBuffers:
    """Rows that vouch for the KV of their room, and by `checksum` for its bytes."""

    def __init__(self, num_rows: int, *, weights: Callable[[], int] = int, checksum: Checksum | None = None) -> None:
        assert num_rows >= 1
        self.checksum = checksum
        self._weights = weights
        self._rows = np.zeros(num_rows, dtype=ROW)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def region(self) -> Region:
        return Region(
            base_ptr=int(self._rows.ctypes.data), num_items=len(self._rows), item_bytes=ROW.itemsize, device=None
        )

    @property
    def num_used(self) -> int:
        return len(self._rows) - len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        row = self._free.pop()
        self._rows[row] = np.zeros((), dtype=ROW)
        return row

    def free(self, row: int) -> None:
        assert row not in self._free, f"metadata row {row} freed twice"
        self._free.append(row)

    def write(self, row: int, *, room: int, first: FirstToken) -> None:
        entry, result = self._rows[row], first.result
        entry["first_token"] = -1 if result.token is None else result.token
        entry["bad"], entry["cached_tokens"] = result.bad, first.cached_tokens
        entry["weights"] = self._weights()
        entry["queue_s"], entry["prefill_s"] = first.queue_s, first.prefill_s
        entry["has_kv_checksum"], entry["kv_checksum"] = first.kv_checksum is not None, first.kv_checksum or 0
        entry["has_logprob"] = result.logprob is not None
        if result.logprob is not None:
            top = result.logprob.top[:MAX_TOP]
            entry["logprob"], entry["top_num"] = result.logprob.logprob, len(top)
            entry["top_values"][: len(top)] = [value for value, _ in top]
            entry["top_ids"][: len(top)] = [token for _, token in top]
            requested = result.logprob.requested[:MAX_ASKED]
            entry["requested_num"] = len(requested)
            entry["requested_values"][: len(requested)] = [value for value, _ in requested]
            entry["requested_ids"][: len(requested)] = [token for _, token in requested]
        entry["room"] = room

    def read(self, row: int, *, room: int | None) -> FirstToken:
        """Raises MetadataCorrupt if the row is not of `room`; None is a fake transfer."""
        entry = self._rows[row]
        if room is not None and int(entry["room"]) != room:
            raise MetadataCorrupt(f"metadata row says room {int(entry['room'])}, expected {room}")
        token = int(entry["first_token"])
        top, requested = _pairs(entry, "top"), _pairs(entry, "requested")
        logprob = TokenLogprob(float(entry["logprob"]), token, top, requested) if entry["has_logprob"] else None
        return FirstToken(
            ItemResult(token=None if token < 0 else token, logprob=logprob, bad=bool(entry["bad"])),
            int(entry["cached_tokens"]),
            _duration(entry["queue_s"]),
            _duration(entry["prefill_s"]),
            int(entry["kv_checksum"]) if entry["has_kv_checksum"] else None,
            room is not None and int(entry["weights"]) != self._weights(),
        )

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a metadata row is free twice"


def _pairs(entry: np.void, name: str) -> list[tuple[float, int]]:
    num = int(entry[f"{name}_num"])
    return list(zip(entry[f"{name}_values"][:num].tolist(), entry[f"{name}_ids"][:num].tolist(), strict=True))


def _duration(value: float) -> float:
    """For display; invalid ones count as 0."""
    return float(value) if 0.0 <= value < MAX_DURATION_S else 0.0
