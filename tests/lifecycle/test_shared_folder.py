"""Folders where processes meet: sockets under a long TMPDIR, and files on a file system without room."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.launcher.process import own_prefix
from engine.ipc import IpcPaths, PullSocket
from engine.messages import ToScheduler
from service.flags import ConfigError
from service.process import files as folders
from service.process.files import BELOW, LONGEST_PATH, fits, mapped, socket_folder

MOST_FRONTENDS, MOST_RANKS = 999, 999


def temp_of(monkeypatch: pytest.MonkeyPatch, parent: Path, length: int) -> str:
    """Make a temporary directory whose path has `length` bytes, with characters of two bytes in it."""
    head = f"{parent}/ä"
    folder = head + "j" * (length - len(os.fsencode(head)))
    os.makedirs(folder)
    assert len(os.fsencode(folder)) == length
    monkeypatch.setattr(tempfile, "tempdir", folder)
    return folder


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield folder


@pytest.mark.parametrize(("more", "is_short"), [(0, False), (1, True), (60, True)])
def test_sockets_of_a_long_temporary_directory_are_in_a_short_one(
    monkeypatch: pytest.MonkeyPatch, short: str, more: int, is_short: bool
) -> None:
    folder = temp_of(monkeypatch, Path(short), LONGEST_PATH - BELOW + more)
    paths = IpcPaths.create()
    assert Path(paths.dir).parent == Path("/tmp" if is_short else folder)
    assert paths.dir.startswith(f"{own_prefix()}{os.getpid()}-"), "the launcher removes what a killed worker leaves"
    last = IpcPaths(paths.dir, dp_rank=MOST_RANKS)
    assert fits(last.http_socket(MOST_FRONTENDS))
    endpoint = last.to_frontend_of(MOST_FRONTENDS)
    pull: PullSocket[ToScheduler] = PullSocket(endpoint, ToScheduler)
    pull.close()
    paths.remove()


def test_without_a_short_directory_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch, short: str) -> None:
    folder = temp_of(monkeypatch, Path(short), 100)
    monkeypatch.setattr(folders, "SHORT", f"{short}/none")
    with pytest.raises(ConfigError, match=rf"TMPDIR {folder}: too long .* at most 59 bytes by TMPDIR"):
        socket_folder()


def test_the_room_of_a_shared_file_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = mapped(tmp_path / "file", 2 * mmap.PAGESIZE)
    words[-1] = 7
    assert mapped(tmp_path / "file")[-1] == 7 and len(mapped(tmp_path / "file", 8)) == 1
    assert os.stat(tmp_path / "file").st_blocks * 512 >= 2 * mmap.PAGESIZE, "a page of which nothing was written"

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=rf"{tmp_path}: cannot keep 24 bytes there \(No space left .* by TMPDIR"):
        mapped(tmp_path / "other", 24)
