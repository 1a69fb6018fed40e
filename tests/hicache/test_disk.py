"""The disk threads: every piece of work ends, and what goes wrong is said as a result."""

import errno
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.mem_cache.storage_tier import PageDelete, PageRead, PageWrite, StorageDone, StorageWork
from engine.hicache.page_files import DirectoryStore, PageDirectory, file_bytes
from engine.hicache.storage import PageStorage
from tests.hicache.test_page_folder import PAGE_BYTES, identity

NO_TIER: Any = None  # these tests give the work
KEYS = [bytes([i]) * 32 for i in range(4)]


class Rig:
    def __init__(self, path: Path) -> None:
        self.host = bytearray(4 * PAGE_BYTES)
        self.folder = PageDirectory.open(str(path))
        self.called: queue.SimpleQueue[None] = queue.SimpleQueue()
        store = DirectoryStore(self.folder, page_of=self.page)
        self.storage = PageStorage(store, tier=NO_TIER, when_done=lambda: self.called.put(None))

    def page(self, i: int) -> memoryview:
        if i > 3:
            raise IndexError(i)
        return memoryview(self.host)[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]

    def do(self, work: StorageWork) -> StorageDone:
        self.storage.submit(work)
        self.called.get(timeout=30)
        (done,) = self.storage.poll()
        return done


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.storage.close()


def test_write_read_delete(rig: Rig) -> None:
    rig.page(0)[:] = b"a" * PAGE_BYTES
    assert rig.do(PageWrite(KEYS[0], 0, identity())).ok
    assert rig.do(PageRead(KEYS[0], 1, identity())).ok and bytes(rig.page(1)) == b"a" * PAGE_BYTES
    assert rig.do(PageDelete((KEYS[0],))) == StorageDone(PageDelete((KEYS[0],)), ok=True)
    assert rig.storage.gauges()["storage_read_gb_s"] > 0
    missing = rig.do(PageRead(KEYS[0], 1, identity()))
    assert (missing.ok, missing.bad) == (False, False)


def test_a_wrong_file_is_deleted_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.do(PageWrite(KEYS[0], 0, identity()))
    path = rig.folder.path / f"{KEYS[0].hex()}.kv"
    path.write_bytes(path.read_bytes()[:-1])
    done = rig.do(PageRead(KEYS[0], 1, identity()))
    assert (done.ok, done.bad, done.undeleted) == (False, True, ())
    assert not path.exists() and "is deleted" in caplog.text


def test_victims_go_first_and_a_write_is_not_tried_while_one_stays(rig: Rig) -> None:
    rig.do(PageWrite(KEYS[0], 0, identity()))
    stuck = rig.folder.path / f"{KEYS[1].hex()}.kv"
    stuck.mkdir()  # unlink cannot remove it
    done = rig.do(PageWrite(KEYS[2], 0, identity(), victims=(KEYS[0], KEYS[1])))
    assert not done.ok and done.undeleted == ((KEYS[1], stuck.lstat().st_size),)
    assert rig.folder.scan() == []
    stuck.rmdir()
    assert rig.do(PageWrite(KEYS[2], 0, identity(), victims=(KEYS[1],))).ok
    assert rig.folder.scan() == [(KEYS[2], file_bytes(identity()))]


def test_a_disk_that_takes_nothing_is_said_once_until_it_does_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(rig.folder, "write", full)
        assert not any(rig.do(PageWrite(key, 0, identity())).ok for key in KEYS)
    assert caplog.text.count("No space left") == 1
    assert rig.do(PageWrite(KEYS[0], 0, identity())).ok


def test_what_is_queued_at_the_end_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for key in KEYS:
        rig.storage.submit(PageWrite(key, 0, identity()))
    rig.storage.close()
    assert {key for key, _ in rig.folder.scan()} == set(KEYS)


def test_even_a_bug_in_the_work_ends_as_a_result(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    assert not rig.do(PageRead(KEYS[0], 99, identity())).ok
    assert not rig.do(PageWrite(KEYS[0], 99, identity())).ok
    assert rig.do(PageWrite(KEYS[0], 0, identity())).ok, "the threads live"
