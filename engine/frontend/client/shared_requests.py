"""Live requests over a worker's frontends: counts and tokens per DP rank, names.

A count is a cell of shared memory with one writer. A name is a locked byte of a file, at its hash,
so the kernel releases it with its process.
"""

import fcntl
import hashlib
import os
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from engine.frontend.client.dp_policy import RankLoad
from service.http.errors import ApiError, bad_field
from service.process.files import mapped


class SharedRequests:
    """Open it once per process: closing any descriptor of the file drops all locks."""

    def __init__(self, folder: str, *, row: int, num_rows: int, num_ranks: int = 1) -> None:
        self._row = row
        self._num_ranks = num_ranks
        # by row, then rank: requests, tokens
        self._counts = mapped(f"{folder}/live", 2 * 8 * num_rows * num_ranks)
        self._names = os.open(f"{folder}/names", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @property
    def num_live(self) -> int:
        """Concurrent starts may not count each other."""
        return sum(self._counts[::2])

    def loads(self) -> list[RankLoad]:
        counts, step = self._counts.tolist(), 2 * self._num_ranks
        return [RankLoad(sum(counts[2 * r :: step]), sum(counts[2 * r + 1 :: step])) for r in range(self._num_ranks)]

    def publish(self, num_live: int, *, rank: int = 0, num_tokens: int = 0) -> None:
        place = 2 * (self._row * self._num_ranks + rank)
        self._counts[place], self._counts[place + 1] = num_live, num_tokens

    def claim(self, name: str) -> bool:
        try:
            fcntl.lockf(self._names, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
        except BlockingIOError:
            return False
        return True

    def release(self, name: str) -> None:
        fcntl.lockf(self._names, fcntl.LOCK_UN, 1, _place(name))

    def close(self) -> None:
        os.close(self._names)


def _place(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) >> 2


class RankLoads:
    """Load of each rank. `shared`: with other frontends, if any."""

    def __init__(self, num_ranks: int, shared: SharedRequests | None) -> None:
        self._own = [RankLoad() for _ in range(num_ranks)]
        self._shared = shared

    @property
    def num_live(self) -> int:
        return sum(load.requests for load in self._own) if self._shared is None else self._shared.num_live

    def of_all(self) -> list[RankLoad]:
        return self._own if self._shared is None else self._shared.loads()

    def change(self, rank: int, *, requests: int = 0, tokens: int = 0) -> None:
        load = self._own[rank]
        load.requests += requests
        load.tokens += tokens
        if self._shared is not None:
            self._shared.publish(load.requests, rank=rank, num_tokens=load.tokens)


# ---- Users' names of live samples and groups, unique over a worker's frontends.

MAX_RID_CHARS = 256


class Name(NamedTuple):
    """Name of a request. `owner`: empty without key."""

    owner: str
    text: str


class LiveNames:
    """Names of running requests. `shared`: with other frontends, if any."""

    def __init__(self, shared: SharedRequests | None) -> None:
        self._shared = shared
        self._rids: dict[Name, list[str]] = {}  # wire names

    def check(self, samples: Sequence[Name], groups: Iterable[Name]) -> None:
        """Raises ApiError(400) for a duplicate, invalid or used name."""
        if len(set(samples)) < len(samples):
            raise bad_field("rid", "the same id is given twice")
        for name in sorted({*samples, *groups}):
            if not 0 < len(name.text) <= MAX_RID_CHARS:
                raise bad_field("rid", f"must have 1 to {MAX_RID_CHARS} characters")
            if name in self._rids:
                raise _in_use(name)

    def claim(self, names: Iterable[Name]) -> None:
        """Claim all names over frontends, or none. Raises ApiError(400)."""
        if self._shared is None:
            return
        claimed: list[Name] = []
        for name in set(names):
            if not self._shared.claim(_in_file(name)):
                for taken in claimed:
                    self._shared.release(_in_file(taken))
                raise _in_use(name)
            claimed.append(name)

    def add(self, name: Name, wire_rid: str) -> None:
        self._rids.setdefault(name, []).append(wire_rid)

    def of(self, text: str, owner: str | None) -> Sequence[str]:
        """Wire names. `owner` None: any."""
        if owner is not None:
            return self._rids.get(Name(owner, text), ())
        return [rid for name, rids in self._rids.items() if name.text == text for rid in rids]

    def leave(self, name: Name, gone: Container[str]) -> None:
        """Remove the samples `gone`; the last one frees the name."""
        left = [rid for rid in self._rids.get(name, ()) if rid not in gone]
        if left:
            self._rids[name] = left
            return
        self._rids.pop(name, None)
        if self._shared is not None:
            self._shared.release(_in_file(name))


def _in_file(name: Name) -> str:
    return "/".join(name)


def _in_use(name: Name) -> ApiError:
    return bad_field("rid", f"a request with id {name.text!r} is running")
