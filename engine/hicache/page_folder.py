"""Directory of one worker's page files: `DIR/N`, N the first unlocked number.

Files `<64 hex digits of the key>.kv` are written as `.tmp` and renamed.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.core.disk_index import Files
from engine.core.page_keys import KVIdentity
from engine.hicache.page_file import HEADER_BYTES, BadFile, check_page, encode_header, file_bytes
from service.flags import ConfigError

MAX_WORKERS = 64  # sharing a DIR
_NAME = re.compile(r"([0-9a-f]{64})\.(kv|tmp)")
_RANK = re.compile(r"rank\d+")


class PageFolder:
    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @staticmethod
    def open(directory: str) -> "PageFolder":
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
                return PageFolder(path, lock)
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {directory}: {error}") from error
        raise ConfigError(f"--hicache-storage-dir {directory}: {MAX_WORKERS} workers use it already; name another")

    def of_rank(self, rank: int) -> "PageFolder":
        """Raises ConfigError."""
        path = self.path / f"rank{rank}"
        try:
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {path}: {error}") from error
        return PageFolder(path)

    def all_of_it(self) -> list["PageFolder"]:
        """Return this directory, and its ranks'. Raises ConfigError."""
        try:
            inside = [path for path in sorted(self.path.iterdir()) if _is_of_rank(path)]
        except OSError as error:
            raise ConfigError(f"--hicache-storage-dir {self.path}: {error}") from error
        return [self, *(PageFolder(path) for path in inside)]

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


def _is_of_rank(path: Path) -> bool:
    return _RANK.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


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
