"""The radix tree against a dictionary of prefixes, and its rules by literals."""

import random
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import EVICTION_POLICIES, RANKS, TRUNK, Branch, EvictionOrder, RadixCache
from engine.flags.resolve import resolve
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError


def make(num_pages: int = 64, page_size: int = 2, policy: str = "lru") -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(num_pages=num_pages, page_size=page_size)
    return allocator, RadixCache(allocator, order=EvictionOrder(RANKS[policy]))


def put(allocator: PageAllocator, cache: RadixCache, tokens: list[int], branch: Branch = TRUNK) -> list[int]:
    """Insert fresh pages for `tokens`, give duplicates back; returns the pages offered."""
    pages = allocator.allocate(len(tokens) // allocator.page_size)
    inserted = cache.insert(tokens, pages, branch=branch)
    allocator.free(pages[: inserted.existing])
    return pages


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
    *(TRUNK, Branch("1"), Branch("", ("1",)), Branch("1", ("1",)), Branch("", ("a", "bc")), Branch("", ("ab", "c"))),
    *(Branch("", ("abc",)), Branch("", ("",)), Branch("11")),
]


def test_an_unloaded_adapter_leaves_all_its_namespaces() -> None:
    allocator, cache = make()
    kept = put(allocator, cache, [1, 2], Branch("", ("a",)))
    for branch in (Branch("x"), Branch("x", ("a",))):
        put(allocator, cache, [1, 2], branch)
    cache.forget("x")
    assert cache.num_pages == 1 and cache.match([1, 2], branch=Branch("", ("a",))).pages == kept
    cache.evict(9)
    cache.evict(0)
    cache.check()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_namespaces_without_pages_are_forgotten(policy: str) -> None:
    """Clients name them: there must not be more of them than pages."""
    allocator, cache = make(num_pages=4, policy=policy)
    for i in range(100):
        cache.evict(2)
        put(allocator, cache, [1, 2, 3, 4], Branch("", (f"tenant {i}",)))
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
            cached = {owner[page] for page in owner if allocator.state_of(page) == "cached"}
            ends = range(page_size, len(tokens) + 1, page_size)
            known = len(list(takewhile(lambda end: (branch, tuple(tokens[:end])) in cached, ends)))  # noqa: B023
            assert len(match.pages) == cache.num_cached(tokens, branch=branch) == known
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


# ---- Which cached prefix makes room first, by --radix-eviction-policy.

A, B, C = [1, 1], [2, 2], [3, 3]


def admit(cache: RadixCache, tokens: list[int], *, priority: int = 0) -> None:
    """What an admitted request does that reads `tokens` and ends."""
    node = cache.match(tokens).node
    cache.lock(node)
    cache.use(node, priority=priority)
    cache.unlock(node)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [B, C, A]),
        ("mru", [A, C, B]),
        ("lfu", [C, A, B]),
        ("fifo", [A, B, C]),
        ("filo", [C, B, A]),
        ("priority", [A, B, C]),
    ],
)
def test_the_order_of_eviction(policy: str, order: list[list[int]]) -> None:
    """A is the oldest and was read last, B most often, C has the highest priority."""
    allocator = PageAllocator(num_pages=3, page_size=2)
    cache = RadixCache(allocator, order=EvictionOrder(RANKS[policy]))
    for tokens, priority in ((A, 0), (B, 1), (C, 2)):
        cache.insert(tokens, allocator.allocate(1), priority=priority)
    for tokens in (B, B, C, A):
        admit(cache, tokens)
    for at, tokens in enumerate(order, 1):
        assert cache.evict(1) == 1
        gone = [t for t in (A, B, C) if cache.num_cached(t) == 0]
        assert sorted(gone) == sorted(order[:at]), tokens
        cache.check()


def test_priority_needs_priorities() -> None:
    flags = {"device": "cpu", "radix_eviction_policy": "priority"}
    model = load_model_config(DEFAULT_MODEL_PATH)
    with pytest.raises(ConfigError, match="--radix-eviction-policy priority: needs --enable-priority-scheduling"):
        resolve(EngineConfig(**flags), model, cuda=False)
    resolve(EngineConfig(**flags, enable_priority_scheduling=True), model, cuda=False)


# ---- Pages of a prompt lie together, however long others have been growing page by page: each run
# is one piece of a transfer.

NUM_PAGES = 4000


def runs(pages: list[int]) -> int:
    return 1 + int((np.diff(pages) != 1).sum())


def test_requests_that_grow_by_single_pages_leave_runs_for_prompts() -> None:
    """85 % are used. Taking single pages from the same end as prompts made 43 runs of a prompt of 100."""
    draw, allocator = random.Random(1), PageAllocator(num_pages=NUM_PAGES, page_size=16)
    live: list[list[int]] = []
    found: list[int] = []
    for turn in range(1000):
        while allocator.num_free < 0.15 * NUM_PAGES + 116:
            allocator.free(live.pop(draw.randrange(len(live))))
        live.append(allocator.allocate(100))
        if turn >= 300:
            found.append(runs(live[-1]))
        for pages in draw.sample(live, min(16, len(live))):
            pages += allocator.allocate(1)
    allocator.check()
    assert sum(found) / len(found) < 4


def test_single_pages_that_were_set_aside_are_there_for_a_prompt() -> None:
    allocator = PageAllocator(num_pages=100, page_size=16)
    one = allocator.allocate(1)
    rest = allocator.allocate(99)
    assert sorted(one + rest) == list(range(1, 101)) and allocator.num_free == 0
    allocator.check()
    allocator.free(rest)
    assert allocator.allocate(99) == sorted(rest)
    allocator.check()
