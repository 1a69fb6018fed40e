"""KV pages in files: the format, a worker's directory, the store used by `Disk`, its threads."""

import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from engine.core.mem_cache.disk_tier import DiskDelete, DiskDone, DiskRead, DiskTier, DiskWork, DiskWrite, Files
from engine.core.mem_cache.page_allocator import KVIdentity
from engine.loop.listeners import LoopListener
from service.flags import ConfigError

MAGIC = b"TANDEMKV"
VERSION = 1
HEADER_BYTES = 1024
_AT = len(MAGIC) + 4


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a page file. `key`: chained hash of all tokens up to the page's end.

    | magic 8 | header length 4, little-endian | msgpack of `Header` | zeros | page bytes |
    |<------------------------ HEADER_BYTES ------------------------------>|<- page_bytes ->|
    """

    version: int
    identity: KVIdentity
    key: bytes
    checksum: bytes


class BadFile(ValueError):
    """The file is not the page of its name."""


def file_bytes(identity: KVIdentity) -> int:
    return HEADER_BYTES + identity.page_bytes


def encode_header(identity: KVIdentity, key: bytes, page: memoryview) -> bytes:
    """Raises ValueError if names are too long for HEADER_BYTES."""
    header = Header(version=VERSION, identity=identity, key=key, checksum=checksum(page))
    encoded = msgspec.msgpack.encode(header)
    if len(encoded) > HEADER_BYTES - _AT:
        raise ValueError(f"a page's header takes {len(encoded)} bytes, there is room for {HEADER_BYTES - _AT}")
    return (MAGIC + len(encoded).to_bytes(4, "little") + encoded).ljust(HEADER_BYTES, b"\0")


def check_page(raw: bytes, page: memoryview, *, identity: KVIdentity, key: bytes) -> None:
    """Raises BadFile unless the header `raw` matches."""
    header = _decode(raw)
    for name, expected in {"version": VERSION, "identity": identity, "key": key}.items():
        if getattr(header, name) != expected:
            raise BadFile(f"{name} is {getattr(header, name)!r}, not {expected!r}")
    if header.checksum != checksum(page):
        raise BadFile("the checksum is wrong")


def _decode(raw: bytes) -> Header:
    length = int.from_bytes(raw[len(MAGIC) : _AT], "little")
    if len(raw) != HEADER_BYTES or raw[: len(MAGIC)] != MAGIC or length > HEADER_BYTES - _AT:
        raise BadFile("not a page file")
    try:
        return msgspec.msgpack.decode(raw[_AT : _AT + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec lets broken UTF-8 through as such
        raise BadFile(f"the header cannot be read: {error}") from error


def checksum(page: memoryview) -> bytes:
    return hashlib.sha256(page).digest()


MAX_WORKERS = 64  # sharing a DIR
_NAME = re.compile(r"([0-9a-f]{64})\.(kv|tmp)")
_RANK = re.compile(r"rank\d+")


class PageDirectory:
    """Page files of one worker in `DIR/N`, N the first unlocked number.

    Files `<64 hex digits of the key>.kv` are written as `.tmp` and renamed.
    """

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @staticmethod
    def open(directory: str) -> "PageDirectory":
        """Raises ConfigError."""
        try:
            for number in range(MAX_WORKERS):
                path = Path(directory) / str(number)
                path.mkdir(parents=True, exist_ok=True, mode=0o700)  # KV gives prompts away
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    continue
                return PageDirectory(path, lock)
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {directory}: {error}") from error
        raise ConfigError(f"--hicache-storage-dir {directory}: {MAX_WORKERS} workers use it already; name another")

    def of_rank(self, rank: int) -> "PageDirectory":
        """Raises ConfigError."""
        path = self.path / f"rank{rank}"
        try:
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {path}: {error}") from error
        return PageDirectory(path)

    def all_of_it(self) -> list["PageDirectory"]:
        """This directory, and its ranks'. Raises ConfigError."""
        try:
            named = [path for path in sorted(self.path.iterdir()) if _RANK.fullmatch(path.name)]
            inside = [path for path in named if path.is_dir() and not path.is_symlink()]
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {self.path}: {error}") from error
        return [self, *(PageDirectory(path) for path in inside)]

    def scan(self) -> list[tuple[bytes, int]]:
        """Return (key, bytes) in LRU order; delete partial files. Raises ConfigError."""
        found = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    name = _NAME.fullmatch(entry.name)
                    if name is None or not entry.is_file(follow_symlinks=False):
                        continue
                    if name[2] == "tmp":
                        os.unlink(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, bytes.fromhex(name[1]), status.st_size))
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {self.path}: {error}") from error
        return [(key, size) for _, key, size in sorted(found)]

    def write(self, key: bytes, page: memoryview, identity: KVIdentity) -> None:
        """Raises OSError, leaving nothing."""
        temporary = self.path / f"{key.hex()}.tmp"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with _opened(temporary, flags) as fd:
                _write_all(fd, encode_header(identity, key, page))
                _write_all(fd, page)
            os.replace(temporary, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, key: bytes, page: memoryview, identity: KVIdentity) -> None:
        """Fill `page`. Raises FileNotFoundError, BadFile, OSError with undefined contents."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block
        with _opened(self._path(key), flags) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != file_bytes(identity):
                raise BadFile(f"{status.st_size} bytes, expected {file_bytes(identity)}")
            raw = bytearray(HEADER_BYTES)
            if _read_all(fd, memoryview(raw)) + _read_all(fd, page) != status.st_size:
                raise BadFile("it ends early")
            check_page(bytes(raw), page, identity=identity, key=key)
            os.utime(fd)  # LRU order, for the next process too

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        left = []
        for key in keys:
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError:
                left.append((key, self._size(key)))
        return tuple(left)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)

    def _size(self, key: bytes) -> int:
        try:
            return self._path(key).lstat().st_size
        except OSError:
            return 0

    def _path(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}.kv"


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def _read_all(fd: int, into: memoryview) -> int:
    done = 0
    while done < len(into) and (n := os.readv(fd, [into[done:]])):
        done += n
    return done


# ---- Transfers between host memory and page files; over ranks: rank_files.py.

PageView = Callable[[int], memoryview]  # writable bytes of a host page


class PageStore(Protocol):
    def read(self, work: DiskRead) -> None:
        """Fill the host page. FileNotFoundError, BadFile and OSError leave undefined contents."""

    def write(self, work: DiskWrite) -> None:
        """After deletion of victims. Raises OSError."""

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        """(key, bytes) of files that could not be deleted."""

    def close(self) -> None: ...


class DirectoryStore:
    def __init__(self, folder: PageDirectory, *, page_of: PageView) -> None:
        self._folder = folder
        self._page_of = page_of

    def read(self, work: DiskRead) -> None:
        self._folder.read(work.key, self._page_of(work.host_page), work.identity)

    def write(self, work: DiskWrite) -> None:
        self._folder.write(work.key, self._page_of(work.host_page), work.identity)

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        return self._folder.delete(keys)

    def close(self) -> None:
        self._folder.close()


# ---- Disk threads for reads and for writes. A bad file or disk fails a transfer, never a request.

log = logging.getLogger(__name__)

END_S = 2.0


class Disk(LoopListener):
    """`when_done` is called in a disk thread."""

    def __init__(self, store: PageStore, *, tier: DiskTier, when_done: Callable[[], None]) -> None:
        self._store = store
        self._tier = tier
        self._when_done = when_done
        self._done: queue.SimpleQueue[DiskDone] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[DiskWork | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[DiskWork | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._write_fails = False  # the last one failed; owned by the writing thread
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"hicache-{name}", daemon=True)
            for name, work in (("read", self._reads), ("write", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def on_turn(self, now_s: float) -> None:
        for done in self.poll():
            self._tier.on_done(done)
        for work in self._tier.take_work():
            self.submit(work)

    def waits_for_outside(self) -> bool:
        return self._tier.busy

    def submit(self, work: DiskWork) -> None:
        (self._reads if isinstance(work, DiskRead) else self._writes).put(work)

    def poll(self) -> list[DiskDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Write queued pages for at most END_S per thread."""
        for work in (self._reads, self._writes):
            work.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self._closing.set()
        self._store.close()

    def _run(self, queue_: "queue.SimpleQueue[DiskWork | None]") -> None:
        while (work := queue_.get()) is not None and not self._closing.is_set():
            self._done.put(self._do(work))
            self._when_done()

    def _do(self, work: DiskWork) -> DiskDone:
        try:
            match work:
                case DiskRead():
                    return self._read(work)
                case DiskWrite():
                    return self._write(work)
                case DiskDelete(keys):
                    return DiskDone(work, ok=True, undeleted=self._store.delete(keys))
        except Exception:  # a thread that ends would leave requests waiting for ever
            log.exception("hierarchical cache: %s failed", type(work).__name__)
            return DiskDone(work, ok=False)

    def _read(self, work: DiskRead) -> DiskDone:
        try:
            self._store.read(work)
            return DiskDone(work, ok=True)
        except FileNotFoundError:
            return DiskDone(work, ok=False)
        except (BadFile, OSError) as error:
            log.warning("hierarchical cache: %s.kv is deleted: %s", work.key.hex(), error)
            return DiskDone(work, ok=False, bad=True, undeleted=self._store.delete((work.key,)))

    def _write(self, work: DiskWrite) -> DiskDone:
        if undeleted := self._store.delete(work.victims):
            return DiskDone(work, ok=False, undeleted=undeleted)
        try:
            self._store.write(work)
            self._write_fails = False
            return DiskDone(work, ok=True)
        except OSError as error:
            if not self._write_fails:  # a full disk is one line, not one per page
                log.warning("hierarchical cache: pages cannot be written: %s", error)
            self._write_fails = True
            return DiskDone(work, ok=False, undeleted=self._store.delete((work.key,)))  # from ranks that could write it
