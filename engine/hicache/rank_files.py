"""Page files over ranks: each has a directory for its part of pages."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.storage_tier import Files, PageClear, PageDelete, PageLookup, PageRead, PageWrite
from engine.hicache.page_files import PageDirectory, outcome_of
from engine.hicache.storage import BadPage, Outcome, PageStore

MISSING = "no file"


class FollowerFiles:
    """Two threads. Calls return the error or ""."""

    def __init__(self, store: PageStore, *, identity: KVIdentity) -> None:
        self._store = store
        self._identity = identity
        self._reads, self._writes = (ThreadPoolExecutor(1, f"hicache-{name}") for name in ("read", "write"))

    def read(self, key: bytes, host_page: int, identity: dict[str, Any]) -> "Future[str]":
        work = PageRead(key, host_page, self._own(identity))
        return self._reads.submit(lambda: _said(self._store.read([work])[0]))

    def write(self, key: bytes, host_page: int, identity: dict[str, Any]) -> "Future[str]":
        work = PageWrite(key, host_page, self._own(identity))
        return self._writes.submit(lambda: _said(self._store.write([work])[0]))

    def _own(self, identity: dict[str, Any]) -> KVIdentity:
        """The leader's identity, perhaps of newer weights, with our layout."""
        of_leader, own = msgspec.convert(identity, KVIdentity), self._identity
        sizes = {"page_bytes": own.page_bytes, "state_bytes": own.state_bytes}
        return msgspec.structs.replace(of_leader, layout=own.layout, **sizes)


def _said(outcome: Outcome) -> str:
    if isinstance(outcome, FileNotFoundError):
        return MISSING
    return "" if outcome is None else str(outcome) or type(outcome).__name__


class RankDirectories:
    """Directories of a worker's ranks, `rankR` in its locked one; a single rank has none.

    A page exists if every rank has its part.
    """

    def __init__(self, worker: PageDirectory, *, num_ranks: int) -> None:
        self.worker = worker
        self.ranks = [worker] if num_ranks == 1 else [worker.of_rank(rank) for rank in range(num_ranks)]

    def of(self, rank: int) -> PageDirectory:
        return self.ranks[rank if len(self.ranks) > 1 else 0]

    def scan(self) -> list[tuple[bytes, int]]:
        """Scan complete pages; delete others, and those of other rank counts."""
        for folder in self.worker.all_of_it():
            if folder.path not in [rank.path for rank in self.ranks]:
                folder.delete(tuple(key for key, _ in folder.scan()))
        first, *others = [folder.scan() for folder in self.ranks]
        sizes = [dict(files) for files in others]
        whole = [(key, size) for key, size in first if all(key in of_one for of_one in sizes)]
        kept = {key for key, _ in whole}
        for folder, files in zip(self.ranks, (first, *others), strict=True):
            folder.delete(tuple(key for key, _ in files if key not in kept))
        return [(key, size + sum(of_one[key] for of_one in sizes)) for key, size in whole]

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        left: dict[bytes, int] = {}
        for folder in self.ranks:
            for key, size in folder.delete(keys):
                left[key] = left.get(key, 0) + size
        return tuple(left.items())


class OtherRanks(Protocol):
    def read(self, work: PageRead) -> Callable[[], dict[int, str]]: ...

    def write(self, work: PageWrite) -> Callable[[], dict[int, str]]: ...


class RanksStore:
    """Pages of all ranks; an operation counts if all ranks succeed.

    A failure of some ranks makes the page bad: `PageStorage` deletes the other parts.
    """

    batch = 1

    def __init__(self, own: PageStore, followers: OtherRanks, *, folders: RankDirectories | None) -> None:
        self._own = own
        self._followers = followers
        self._folders = folders

    def find(self, work: PageLookup) -> tuple[bytes, ...]:
        return self._own.find(work)

    def read(self, works: Sequence[PageRead]) -> list[Outcome]:
        return [outcome_of(self._read, work) for work in works]

    def _read(self, work: PageRead) -> None:
        with _together(self._followers.read(work)):
            self._check(self._own.read([work])[0])

    def write(self, works: Sequence[PageWrite]) -> list[Outcome]:
        return [outcome_of(self._write, work) for work in works]

    def _write(self, work: PageWrite) -> None:
        with _together(self._followers.write(work)):
            self._check(self._own.write([work])[0])

    def _check(self, outcome: Outcome) -> None:
        """Raises BadPage; a shared store may fail without being wrong."""
        if said := _said(outcome):
            lost = self._folders is None and isinstance(outcome, OSError) and said != MISSING
            raise OSError(said) if lost else BadPage(said)

    def delete(self, work: PageDelete) -> Files:
        return self._own.delete(work) if self._folders is None else self._folders.delete(work.keys)

    def clear(self, work: PageClear) -> None:
        self._own.clear(work)

    def close(self) -> None:
        self._own.close()
        if self._folders is not None:
            self._folders.worker.close()


@contextlib.contextmanager
def _together(theirs: Callable[[], dict[int, str]]) -> Iterator[None]:
    """Always wait for other ranks: their threads may use the page. Raises BadPage."""
    try:
        yield
    finally:
        outcomes = theirs()
    failed = [f"rank {rank}: {text}" for rank, text in sorted(outcomes.items()) if text]
    if failed:
        raise BadPage("; ".join(failed))
