"""Which cached prefix makes room first, by --radix-eviction-policy."""

import pytest

from engine.config import EngineConfig
from engine.core.page_allocator import PageAllocator
from engine.core.radix_cache import RadixCache
from engine.flags.resolve import resolve
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from service.flags import ConfigError

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
    cache = RadixCache(allocator, policy=policy)
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
