"""Index of page files, and their eviction.

A write counts from its decision, a file until its reported deletion, and victims are deleted before
the write: bytes on disk never exceed the limit.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.page_keys import KVIdentity


@dataclass(slots=True, frozen=True)
class DiskRead:
    key: bytes
    host_page: int
    identity: KVIdentity


@dataclass(slots=True, frozen=True)
class DiskWrite:
    """Delete `victims`, then write `host_page`."""

    key: bytes
    host_page: int
    identity: KVIdentity
    victims: tuple[bytes, ...] = ()


@dataclass(slots=True, frozen=True)
class DiskDelete:
    keys: tuple[bytes, ...]


DiskWork = DiskRead | DiskWrite | DiskDelete
Files = tuple[tuple[bytes, int], ...]  # (key, bytes)


@dataclass(slots=True, frozen=True)
class DiskDone:
    """Finished work; a failed read deleted its file, `bad` if corrupt.

    A write with `undeleted` victims was not tried.
    """

    work: DiskWork
    ok: bool
    bad: bool = False
    undeleted: Files = ()


class DiskIndex:
    """Index of files in LRU order; delete `excess` first."""

    def __init__(self, *, max_bytes: int, file_bytes: int, files: Iterable[tuple[bytes, int]] = ()) -> None:
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict(files)  # least recently used first
        self._writing: set[bytes] = set()
        self._doomed: set[bytes] = set()  # being written, to be deleted then
        self._reading: set[bytes] = set()
        self.num_bytes = sum(self._sizes.values())
        self.excess = self._make_room(0) or ()

    @property
    def num_files(self) -> int:
        return len(self._sizes)

    def has(self, key: bytes) -> bool:
        """The file can be read."""
        return key in self._sizes and key not in self._writing

    def holds(self, key: bytes) -> bool:
        """True if the file exists or is being written."""
        return key in self._sizes

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def begin_write(self, key: bytes) -> tuple[bytes, ...] | None:
        """Return files to delete first, or None: no room, or it exists."""
        if key in self._sizes:
            return None
        victims = self._make_room(self._file_bytes)
        if victims is None:
            return None
        self._sizes[key] = self._file_bytes
        self.num_bytes += self._file_bytes
        self._writing.add(key)
        return victims

    def end_write(self, work: DiskWrite, *, ok: bool, undeleted: Files) -> DiskDelete | None:
        """Return the file to delete if cleared meanwhile."""
        self._writing.remove(work.key)
        if not ok:
            self._drop(work.key)
        self.restore(undeleted)
        if work.key not in self._doomed:
            return None
        self._doomed.remove(work.key)
        self._drop(work.key)
        return DiskDelete((work.key,)) if ok else None

    def begin_read(self, key: bytes) -> None:
        assert self.has(key)
        self._reading.add(key)

    def end_read(self, key: bytes, *, ok: bool, undeleted: Files) -> None:
        self._reading.discard(key)
        if not ok:
            self._drop(key)
            self.restore(undeleted)

    def clear(self) -> DiskDelete:
        """Forget all files; one being written is deleted later."""
        self._doomed |= self._writing
        keys = tuple(key for key in self._sizes if key not in self._writing)
        for key in keys:
            self._drop(key)
        return DiskDelete(keys)

    def _make_room(self, size: int) -> tuple[bytes, ...] | None:
        victims, room = list[bytes](), self._max_bytes - self.num_bytes
        for key, held in self._sizes.items():
            if room >= size:
                break
            if key not in self._writing and key not in self._reading:
                victims.append(key)
                room += held
        if room < size:
            return None
        for key in victims:
            self._drop(key)
        return tuple(victims)

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)

    def restore(self, undeleted: Files) -> None:
        for key, size in undeleted:
            if key not in self._sizes:
                self._sizes[key] = size
                self.num_bytes += size

    def check(self) -> None:
        assert self.num_bytes == sum(self._sizes.values())
        assert self._writing <= set(self._sizes) and self._doomed <= self._writing
