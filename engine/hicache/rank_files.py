"""Page files over ranks: each has a directory for its part of pages."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from engine.core.mem_cache.disk_tier import DiskRead, DiskWrite, Files
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.hicache.page_files import BadFile, DirectoryStore, PageDirectory, PageView

MISSING = "no file"


class FollowerFiles:
    """Two threads. Calls return the error or ""."""

    def __init__(self, path: Path, *, page_of: PageView, identity: KVIdentity) -> None:
        self._store = DirectoryStore(PageDirectory(path), page_of=page_of)
        self._identity = identity
        self._reads, self._writes = (ThreadPoolExecutor(1, f"hicache-{name}") for name in ("read", "write"))

    def read(self, key: bytes, host_page: int, identity: dict[str, Any]) -> "Future[str]":
        work = DiskRead(key, host_page, self._own(identity))
        return self._reads.submit(_outcome, lambda: self._store.read(work))

    def write(self, key: bytes, host_page: int, identity: dict[str, Any]) -> "Future[str]":
        work = DiskWrite(key, host_page, self._own(identity))
        return self._writes.submit(_outcome, lambda: self._store.write(work))

    def _own(self, identity: dict[str, Any]) -> KVIdentity:
        """The leader's identity, perhaps of newer weights, with our layout."""
        of_leader, own = msgspec.convert(identity, KVIdentity), self._identity
        return msgspec.structs.replace(of_leader, layout=own.layout, page_bytes=own.page_bytes)


def _outcome(act: Callable[[], None]) -> str:
    try:
        act()
    except FileNotFoundError:
        return MISSING
    except Exception as error:  # a thread that ends without an answer would leave requests waiting for ever
        return str(error) or type(error).__name__
    return ""


class RankDirectories:
    """Directories of a worker's ranks, `rankR` in its locked one; a single rank has none.

    A page exists if every rank has its part.
    """

    def __init__(self, worker: PageDirectory, *, num_ranks: int) -> None:
        self._worker = worker
        self.ranks = [worker] if num_ranks == 1 else [worker.of_rank(rank) for rank in range(num_ranks)]

    @property
    def path(self) -> Path:
        return self._worker.path

    def of(self, rank: int) -> PageDirectory:
        return self.ranks[rank if len(self.ranks) > 1 else 0]

    def scan(self) -> list[tuple[bytes, int]]:
        """Scan complete pages; delete others, and those of other rank counts."""
        for folder in self._worker.all_of_it():
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

    def close(self) -> None:
        self._worker.close()


class OtherRanks(Protocol):
    """Runs an operation on followers; returns the wait for outcomes."""

    def read(self, work: DiskRead) -> Callable[[], dict[int, str]]: ...

    def write(self, work: DiskWrite) -> Callable[[], dict[int, str]]: ...


class RanksStore:
    """Files of all ranks; an operation counts if all ranks succeed."""

    def __init__(self, own: DirectoryStore, folders: RankDirectories, followers: OtherRanks) -> None:
        self._own = own
        self._folders = folders
        self._followers = followers

    def read(self, work: DiskRead) -> None:
        """A file missing on some ranks is bad: `Disk` deletes the others."""
        with _together(self._followers.read(work), BadFile):
            try:
                self._own.read(work)
            except FileNotFoundError:
                raise BadFile(MISSING) from None

    def write(self, work: DiskWrite) -> None:
        with _together(self._followers.write(work), OSError):
            self._own.write(work)

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        return self._folders.delete(keys)

    def close(self) -> None:
        self._folders.close()


@contextlib.contextmanager
def _together(theirs: Callable[[], dict[int, str]], error: type[Exception]) -> Iterator[None]:
    """Always wait for other ranks: their threads may use the page."""
    try:
        yield
    finally:
        outcomes = theirs()
    failed = [f"rank {rank}: {text}" for rank, text in sorted(outcomes.items()) if text]
    if failed:
        raise error("; ".join(failed))
