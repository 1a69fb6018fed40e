"""The radix tree against a dictionary of prefixes, and its rules by literals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.eviction import EVICTION_POLICIES
from engine.core.page_allocator import PageAllocator
from engine.core.radix_cache import RadixCache
from engine.core.radix_node import TRUNK, Branch


def make(num_pages: int = 64, page_size: int = 2, policy: str = "lru") -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages=num_pages, page_size=page_size)
    return allocator, RadixCache(allocator, policy=policy)


def put(allocator: PageAllocator, cache: RadixCache, tokens: list[int], branch: Branch = TRUNK) -> list[int]:
    """Insert fresh pages for `tokens`, give duplicates back; returns the pages offered."""
    pages = allocator.allocate(len(tokens) // allocator.page_size)
    inserted = cache.insert(tokens, pages, branch=branch)
    allocator.free(pages[: inserted.existing])
    return pages


def test_a_match_ends_at_a_whole_page() -> None:
    allocator, cache = make()
    pages = put(allocator, cache, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 9]).pages == pages[:2]
    assert cache.match([1, 2, 3]).pages == pages[:1]
    assert cache.match([9, 2, 3, 4]).pages == []
    cache.check()


def test_a_split_keeps_both_branches() -> None:
    allocator, cache = make()
    first = put(allocator, cache, [1, 2, 3, 4])
    second = put(allocator, cache, [1, 2, 7, 8])
    assert cache.match([1, 2, 3, 4]).pages == first
    assert cache.match([1, 2, 7, 8]).pages == [first[0], second[1]]
    cache.check()


def test_a_split_in_the_middle_of_a_match_ends_it() -> None:
    allocator, cache = make(page_size=1)
    put(allocator, cache, [1, 1])
    put(allocator, cache, [1, 1, 0])
    assert len(cache.match([1, 0]).pages) == 1


def test_least_recently_used_goes_first_and_locked_stays() -> None:
    allocator, cache = make(num_pages=6)
    put(allocator, cache, [1, 1, 2, 2])
    put(allocator, cache, [3, 3, 4, 4])
    put(allocator, cache, [5, 5, 6, 6])
    cache.match([1, 1, 2, 2])
    cache.lock(node := cache.match([5, 5, 6, 6]).node)
    assert cache.evict(2) == 2
    assert cache.match([3, 3, 4, 4]).pages == [] and len(cache.match([1, 1, 2, 2]).pages) == 2
    assert cache.evict(100) == 2 and cache.num_evictable == 0
    cache.unlock(node)
    assert cache.evict(100) == 2 and allocator.num_free == 6
    cache.check()


def test_a_double_free_asserts_and_changes_nothing() -> None:
    allocator, _ = make(num_pages=4)
    (page,) = allocator.allocate(1)
    allocator.free([page])
    with pytest.raises(AssertionError, match="is free"):
        allocator.free([page])
    allocator.check()


def test_pages_of_a_prompt_are_adjacent_where_they_can_be() -> None:
    allocator, _ = make(num_pages=10)
    a, b = allocator.allocate(4), allocator.allocate(4)
    allocator.free(a)
    assert allocator.allocate(3) == [1, 2, 3] and b == [5, 6, 7, 8]


# Names that would meet if they were joined to one, or read as an adapter.
BRANCHES = [
    *(TRUNK, Branch(1), Branch(0, ("1",)), Branch(1, ("1",)), Branch(0, ("a", "bc")), Branch(0, ("ab", "c"))),
    *(Branch(0, ("abc",)), Branch(0, ("",)), Branch(11)),
]


def test_an_unloaded_adapter_leaves_all_its_namespaces() -> None:
    allocator, cache = make()
    kept = put(allocator, cache, [1, 2], Branch(0, ("a",)))
    for branch in (Branch(1), Branch(1, ("a",))):
        put(allocator, cache, [1, 2], branch)
    cache.forget(1)
    assert cache.num_pages == 1 and cache.match([1, 2], branch=Branch(0, ("a",))).pages == kept
    cache.evict(9)
    cache.evict(0)
    cache.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_namespaces_without_pages_are_forgotten(policy: str) -> None:
    """Clients name them: there must not be more of them than pages."""
    allocator, cache = make(num_pages=4, policy=policy)
    for i in range(100):
        cache.evict(2)
        put(allocator, cache, [1, 2, 3, 4], Branch(0, (f"tenant {i}",)))
        assert len(cache._tops) <= 4
        cache.check()


TOKENS = st.lists(st.integers(0, 2), max_size=12)
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "evict", "lock", "unlock"]), TOKENS, st.sampled_from(BRANCHES)),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(EVICTION_POLICIES))
def test_against_a_dictionary(steps: list[tuple[str, list[int], Branch]], page_size: int, policy: str) -> None:
    allocator, cache = make(num_pages=40, page_size=page_size, policy=policy)
    owner: dict[int, tuple[Branch, tuple[int, ...]]] = {}  # page -> the prefix whose end it holds
    locked = []
    for kind, tokens, branch in steps:
        whole = tokens[: len(tokens) // page_size * page_size]
        if kind == "insert":
            if allocator.num_free < len(whole) // page_size:
                continue
            for i, page in enumerate(put(allocator, cache, whole, branch)):
                if allocator.state_of(page) == "cached":
                    owner[page] = branch, tuple(whole[: (i + 1) * page_size])
        elif kind == "evict":
            cache.evict(len(tokens))
        elif kind == "unlock" and locked:
            cache.unlock(locked.pop())
        else:
            match = cache.match(tokens, branch=branch)
            assert len(match.pages) == cache.num_cached(tokens, branch=branch)
            for i, page in enumerate(match.pages):
                assert owner[page] == (branch, tuple(tokens[: (i + 1) * page_size]))
            if kind == "lock":
                cache.lock(match.node)
                cache.use(match.node, priority=len(tokens))
                locked.append(match.node)
        cache.check()
        allocator.check()
    for node in locked:
        cache.unlock(node)
    cache.flush()
    assert allocator.num_free == 40
