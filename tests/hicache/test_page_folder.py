"""Page files: what is written comes back; anything else under that name is a BadPage, and never bytes of another page."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.mem_cache.page_allocator import KVIdentity
from engine.hicache.build import open_index
from engine.hicache.page_files import HEADER_BYTES, PageDirectory, file_bytes
from engine.hicache.rank_files import RankDirectories
from engine.hicache.storage import BadPage
from service.flags import ConfigError

PAGE_BYTES = 256
KEY = bytes(range(32))
PAGE = bytes(range(256))


def identity(**changes: object) -> KVIdentity:
    values = {"layout": "v1/cpu/2x2x16:float32", "dtype": "float32", "page_size": 4, "page_bytes": PAGE_BYTES}
    return KVIdentity(**{**values, "model": "M/L2", "weights": "default/abc", **changes})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> PageDirectory:
    folder = PageDirectory.open(str(tmp_path))
    folder.write(KEY, memoryview(bytearray(PAGE)), identity())
    return folder


def read(folder: PageDirectory, who: KVIdentity | None = None, key: bytes = KEY) -> bytes:
    page = bytearray(PAGE_BYTES)
    folder.read(key, memoryview(page), who or identity())
    return bytes(page)


def file_of(folder: PageDirectory) -> Path:
    return folder.path / f"{KEY.hex()}.kv"


def test_what_was_written_comes_back(folder: PageDirectory) -> None:
    assert read(folder) == PAGE
    assert folder.scan() == [(KEY, file_bytes(identity()))] == [(KEY, HEADER_BYTES + PAGE_BYTES)]
    assert file_of(folder).stat().st_mode & 0o077 == 0 == folder.path.stat().st_mode & 0o077, "KV gives prompts away"


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "header only": lambda data: data[:HEADER_BYTES],
    "a byte short": lambda data: data[:-1],
    "a byte long": lambda data: data + b"x",
    "magic": flip(0),
    "length": lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
    "header": flip(30),
    "no msgpack": lambda data: data[:12] + b"\xc1" * (HEADER_BYTES - 12) + data[HEADER_BYTES:],
    "first byte of the page": flip(HEADER_BYTES),
    "last byte of the page": flip(HEADER_BYTES + PAGE_BYTES - 1),
    "somebody's notes": lambda data: b"dear diary".ljust(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused(folder: PageDirectory, damage: Callable[[bytes], bytes]) -> None:
    file_of(folder).write_bytes(damage(file_of(folder).read_bytes()))
    with pytest.raises(BadPage):
        read(folder)


@pytest.mark.parametrize(
    "changes",
    [{"layout": "v2"}, {"dtype": "bfloat16"}, {"page_size": 8}, {"model": "N/L2"}, {"weights": "default/abd"}],
)
def test_a_file_of_another_engine_is_refused(folder: PageDirectory, changes: dict[str, object]) -> None:
    with pytest.raises(BadPage, match="identity"):
        read(folder, identity(**changes))


def test_a_page_under_another_key_is_refused(folder: PageDirectory) -> None:
    other = bytes(32)
    file_of(folder).rename(folder.path / f"{other.hex()}.kv")
    with pytest.raises(BadPage, match="key"):
        read(folder, key=other)


def test_pipes_links_and_folders_neither_block_nor_count(folder: PageDirectory) -> None:
    names = [bytes([i]) * 32 for i in range(3)]
    pipe, link, directory = (folder.path / f"{name.hex()}.kv" for name in names)
    os.mkfifo(pipe)
    link.symlink_to(file_of(folder))
    directory.mkdir()
    for name in names:
        with pytest.raises((BadPage, OSError)):
            read(folder, key=name)
    assert [key for key, _ in folder.scan()] == [KEY]


def test_scan_orders_by_use_clears_half_written_ones_and_leaves_the_rest_alone(folder: PageDirectory) -> None:
    young, half, foreign = bytes(32), folder.path / f"{KEY.hex()}.tmp", folder.path / "notes.kv"
    folder.write(young, memoryview(bytearray(PAGE)), identity())
    os.utime(file_of(folder), ns=(1, 1))
    half.write_bytes(b"half")
    foreign.write_bytes(b"mine")
    assert [key for key, _ in folder.scan()] == [KEY, young]
    assert foreign.exists() and not half.exists()
    read(folder)
    assert [key for key, _ in folder.scan()] == [young, KEY], "a read is a use, in the next process too"


def test_a_write_that_fails_leaves_nothing(folder: PageDirectory) -> None:
    blocked = bytes([7]) * 32
    (folder.path / f"{blocked.hex()}.kv").mkdir()
    with pytest.raises(OSError):
        folder.write(blocked, memoryview(bytearray(PAGE)), identity())
    assert not list(folder.path.glob("*.tmp"))


def test_each_worker_takes_a_folder_of_its_own_and_gets_it_back(tmp_path: Path) -> None:
    first, second = PageDirectory.open(str(tmp_path)), PageDirectory.open(str(tmp_path))
    assert [first.path.name, second.path.name] == ["0", "1"]
    first.close()
    again = PageDirectory.open(str(tmp_path))
    assert again.path.name == "0"
    again.close()
    second.close()


def test_a_folder_that_cannot_be_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="--hicache-storage-dir"):
        PageDirectory.open(str(file))


PAGE_GB = file_bytes(identity()) / 1e9


def test_a_folder_over_the_limit_is_cut_at_the_start_oldest_first(tmp_path: Path) -> None:
    folder = PageDirectory.open(str(tmp_path))
    keys = [bytes([i]) * 32 for i in range(6)]
    for i, key in enumerate(keys):
        folder.write(key, memoryview(bytearray(PAGE)), identity())
        os.utime(folder.path / f"{key.hex()}.kv", ns=(i, i))
    index = open_index(RankDirectories(folder, num_ranks=1), file_bytes=file_bytes(identity()), max_gb=2.5 * PAGE_GB)
    assert index.num_files == 2 and index.num_bytes == 2 * file_bytes(identity())
    assert {key for key, _ in folder.scan()} == set(keys[4:])


def test_a_limit_below_one_page_names_the_flag(folder: PageDirectory) -> None:
    with pytest.raises(ConfigError, match="--hicache-storage-size-gb"):
        open_index(RankDirectories(folder, num_ranks=1), file_bytes=file_bytes(identity()), max_gb=0.5 * PAGE_GB)
