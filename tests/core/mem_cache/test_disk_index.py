"""The disk index: bytes never exceed the limit, and what cannot be deleted goes on to count."""

from engine.core.mem_cache.page_allocator import next_keys
from engine.core.mem_cache.storage_tier import FileIndex, PageDelete, PageWrite
from tests.core.mem_cache.tiers_in_a_test import identity

A, B, C, D = (bytes([i]) * 32 for i in range(4))


def written(index: FileIndex, key: bytes, **result: object) -> PageDelete | None:
    victims = index.begin_write(key)
    assert victims is not None
    work = PageWrite(key, 0, identity(), victims)
    return index.end_write(work, **{"ok": True, "undeleted": (), **result})  # type: ignore[arg-type]


def test_a_file_is_readable_when_it_is_complete() -> None:
    index = FileIndex(max_bytes=30, file_bytes=10)
    assert index.begin_write(A) == ()
    assert index.holds(A) and not index.has(A) and index.num_bytes == 10
    index.end_write(PageWrite(A, 0, identity()), ok=True, undeleted=())
    assert index.has(A) and index.begin_write(A) is None
    index.check()


def test_the_least_recently_used_go_for_a_new_one() -> None:
    index = FileIndex(max_bytes=30, file_bytes=10, files=[(A, 10), (B, 10), (C, 10)])
    index.touch([A])
    assert index.begin_write(D) == (B,)
    assert index.num_bytes == 30


def test_sizes_of_other_layouts_count_as_they_are() -> None:
    index = FileIndex(max_bytes=30, file_bytes=10, files=[(A, 3), (B, 3), (C, 20)])
    assert index.begin_write(D) == (A, B)
    assert index.num_bytes == 30


def test_what_is_read_or_written_does_not_go() -> None:
    index = FileIndex(max_bytes=20, file_bytes=10, files=[(A, 10)])
    index.begin_read(A)
    assert index.begin_write(B) == ()
    assert index.begin_write(C) is None and index.num_bytes == 20
    index.end_read(A, ok=True, undeleted=())
    assert index.begin_write(C) == (A,)


def test_a_failed_write_leaves_its_room_and_undeleted_victims_take_theirs() -> None:
    index = FileIndex(max_bytes=20, file_bytes=10, files=[(A, 10), (B, 10)])
    written(index, C, ok=False, undeleted=((A, 10),))
    assert index.num_bytes == 20 and index.holds(A) and index.holds(B) and not index.holds(C)
    index.check()


def test_a_bad_file_is_gone() -> None:
    index = FileIndex(max_bytes=20, file_bytes=10, files=[(A, 10), (B, 10)])
    index.begin_read(A)
    index.end_read(A, ok=False, undeleted=())
    index.begin_read(B)
    index.end_read(B, ok=False, undeleted=((B, 10),))
    assert not index.holds(A) and index.holds(B) and index.num_bytes == 10


def test_clear_takes_what_is_being_written_when_it_is_complete() -> None:
    index = FileIndex(max_bytes=50, file_bytes=10, files=[(A, 10)])
    assert index.begin_write(B) == ()
    assert index.clear(identity()) == PageDelete((A,))
    assert index.end_write(PageWrite(B, 0, identity()), ok=True, undeleted=()) == PageDelete((B,))
    assert index.num_bytes == 0
    index.check()


def test_keys_are_chained_and_start_from_everything_that_kv_depends_on() -> None:
    keys = next_keys(identity().seed(), [1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert keys[:1] == next_keys(identity().seed(), [1, 2, 3, 4], 4)
    assert keys[1:] == next_keys(keys[0], [5, 6, 7, 8], 4)
    assert keys[1:] != next_keys(identity().seed(), [5, 6, 7, 8], 4), "the same tokens after others"
    seeds = {identity().seed(), identity("w1").seed(), identity(page_size=8).seed(), identity().seed("adapter")}
    assert len(seeds) == 4
