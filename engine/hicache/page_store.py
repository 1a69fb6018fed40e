"""Transfers between host memory and page files; over ranks: rank_files.py."""

from collections.abc import Callable
from typing import Protocol

from engine.core.disk_index import DiskRead, DiskWrite, Files
from engine.hicache.page_folder import PageFolder

PageView = Callable[[int], memoryview]  # writable bytes of a host page


class PageStore(Protocol):
    def read(self, work: DiskRead) -> None:
        """Fill the host page. Raises FileNotFoundError, BadFile, OSError with undefined contents."""

    def write(self, work: DiskWrite) -> None:
        """Write the host page, after deletion of victims. Raises OSError."""

    def delete(self, keys: tuple[bytes, ...]) -> Files:
        """Return (key, bytes) of files that could not be deleted."""

    def close(self) -> None: ...


class FolderStore:
    def __init__(self, folder: PageFolder, *, page_of: PageView) -> None:
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
