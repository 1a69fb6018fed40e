"""KV pages in files: the format, a worker's directory, the store of `PageStorage`."""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from engine.core.mem_cache.page_allocator import KVIdentity
from engine.core.mem_cache.storage_tier import Files, PageClear, PageDelete, PageLookup, PageRead, PageWrite
from engine.hicache.storage import BadPage, Outcome, PageView
from engine.kernels.checksum import checksum_kernel
from engine.kv.page_checksum import ODD, word_sums
from service.flags import ConfigError

MAGIC = b"TANDEMKV"
VERSION = 2
HEADER_BYTES = 1024
_AT = len(MAGIC) + 4


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a page file. `key`: chained hash of all tokens up to the page's end.

    | magic 8 | header length 4, little-endian | msgpack of `Header` | zeros | page or state |
    |<------------------------ HEADER_BYTES ------------------------------>|<-- bytes_of -->|
    """

    version: int
    identity: KVIdentity
    key: bytes
    checksum: bytes


def file_bytes(identity: KVIdentity, key: bytes = b"") -> int:
    return HEADER_BYTES + identity.bytes_of(key)


def encode_header(identity: KVIdentity, key: bytes, page: memoryview) -> bytes:
    """Raises ValueError if names are too long for HEADER_BYTES."""
    header = Header(version=VERSION, identity=identity, key=key, checksum=checksum(page))
    encoded = msgspec.msgpack.encode(header)
    if len(encoded) > HEADER_BYTES - _AT:
        raise ValueError(f"a page's header takes {len(encoded)} bytes, there is room for {HEADER_BYTES - _AT}")
    return (MAGIC + len(encoded).to_bytes(4, "little") + encoded).ljust(HEADER_BYTES, b"\0")


def check_page(raw: bytes, page: memoryview, *, identity: KVIdentity, key: bytes) -> None:
    """Raises BadPage unless the header `raw` matches."""
    header = header_of(raw)
    for name, expected in {"version": VERSION, "identity": identity, "key": key}.items():
        if getattr(header, name) != expected:
            raise BadPage(f"{name} is {getattr(header, name)!r}, not {expected!r}")
    if header.checksum != checksum(page):
        raise BadPage("the checksum is wrong")


def header_of(raw: bytes) -> Header:
    """Raises BadPage."""
    length = int.from_bytes(raw[len(MAGIC) : _AT], "little")
    if len(raw) != HEADER_BYTES or raw[: len(MAGIC)] != MAGIC or length > HEADER_BYTES - _AT:
        raise BadPage("not a page file")
    try:
        return msgspec.msgpack.decode(raw[_AT : _AT + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # msgspec lets broken UTF-8 through as such
        raise BadPage(f"the header cannot be read: {error}") from error


def checksum(page: memoryview) -> bytes:
    """8 bytes; six times as fast as SHA-256. `page` is writable, of whole words."""
    words, zero = torch.frombuffer(page, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    total = (checksum_kernel() or word_sums)(words, zero, zero, len(words), ODD)
    return int(total).to_bytes(8, "little", signed=True)


MAX_WORKERS = 64  # sharing a DIR
_NAME = re.compile(r"([0-9a-f]{64}(?:73)?)\.(kv|tmp)")  # with the "s" of states
_RANK = re.compile(r"rank\d+")


class PageDirectory:
    """Page files of one worker in `DIR/N`, N the first unlocked number.

    Files `<hex digits of the key>.kv` are written as `.tmp` and renamed.
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
            with _opened(temporary, "wb", flags) as file:
                file.write(encode_header(identity, key, page))
                file.write(page)
            os.replace(temporary, self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, key: bytes, page: memoryview, identity: KVIdentity) -> None:
        """Fill `page`. Raises FileNotFoundError, BadPage, OSError with undefined contents."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block
        with _opened(self._path(key), "rb", flags) as file:
            status = os.fstat(file.fileno())
            expected = file_bytes(identity, key)
            if not stat.S_ISREG(status.st_mode) or status.st_size != expected:
                raise BadPage(f"{status.st_size} bytes, expected {expected}")
            raw = file.read(HEADER_BYTES)
            if len(raw) + file.readinto(page) != status.st_size:
                raise BadPage("it ends early")
            check_page(raw, page, identity=identity, key=key)
            os.utime(file.fileno())  # LRU order, for the next process too

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


def _opened(path: Path, mode: str, flags: int) -> Any:
    return open(path, mode, opener=lambda name, _: os.open(name, flags, 0o600))


# ---- Transfers between host memory and page files; over ranks: rank_files.py.


class DirectoryStore:
    batch = 1

    def __init__(self, folder: PageDirectory, *, page_of: PageView) -> None:
        self._folder = folder
        self._page_of = page_of

    def find(self, work: PageLookup) -> tuple[bytes, ...]:
        raise NotImplementedError("an index knows the files")

    def read(self, works: Sequence[PageRead]) -> list[Outcome]:
        return [outcome_of(self._read, work) for work in works]

    def _read(self, work: PageRead) -> None:
        try:
            self._folder.read(work.key, self._page_of(work.host_page), work.identity)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise BadPage(str(error)) from error

    def write(self, works: Sequence[PageWrite]) -> list[Outcome]:
        return [outcome_of(self._write, work) for work in works]

    def _write(self, work: PageWrite) -> None:
        self._folder.write(work.key, self._page_of(work.host_page), work.identity)

    def delete(self, work: PageDelete) -> Files:
        return self._folder.delete(work.keys)

    def clear(self, work: PageClear) -> None:
        raise NotImplementedError("an index knows the files")

    def close(self) -> None:
        self._folder.close()


W = TypeVar("W")


def outcome_of(act: Callable[[W], None], work: W) -> Outcome:
    try:
        act(work)
    except Exception as error:
        return error
    return None
