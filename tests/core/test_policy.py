"""The order of the waiting queue, and the estimate that admission leans on, by literals."""

import pytest

from engine.core.estimates import NewTokenRatio, RatioRule
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import RadixCache
from engine.core.policy import order
from engine.core.request import Request
from tests.core.engine_in_a_test import request_of


def request(rid: str, prompt: list[int], *, new: int = 8, out: int = 0) -> Request:
    return request_of(prompt, rid=rid, generated=out, max_new_tokens=new)


class Tree:
    def __init__(self, *cached: list[int]) -> None:
        self.allocator = PageAllocator(num_pages=500, page_size=1)
        self.cache = RadixCache(self.allocator)
        for tokens in cached:
            pages = self.allocator.allocate(len(tokens))
            self.allocator.free(pages[: self.cache.insert(tokens, pages).existing])

    def order(self, policy: str, *requests: Request) -> list[str]:
        lots = iter([0.5, 0.1, 0.9, 0.3] * 100)
        ordered = order(
            policy,
            requests,
            match_prefix=lambda r: self.cache.match(r.input_ids),
            uniform=lambda: next(lots),
            shared_tokens=32,
        )
        return [r.rid for r in ordered]


def test_each_policy_by_its_rule() -> None:
    tree = Tree([1, 2, 3, 4], [1, 2, 9])
    requests = [
        request("none", [7, 7], new=3),
        request("two", [1, 2, 5], new=9),
        request("four", [1, 2, 3, 4, 6], new=5),
    ]
    assert tree.order("fcfs", *requests) == ["none", "two", "four"]
    assert tree.order("lpm", *requests) == ["four", "two", "none"]
    assert tree.order("lof", *requests) == ["two", "four", "none"]
    assert tree.order("random", *requests) == ["two", "none", "four"]


def test_depth_first_takes_the_heaviest_branch_whole() -> None:
    tree = Tree([1, 2], [3, 4], [3, 4, 5])
    requests = [request("a", [1, 2, 0]), request("b", [3, 4, 0]), request("c", [9]), request("d", [3, 4, 5, 0])]
    assert tree.order("dfs-weight", *requests) == ["c", "b", "d", "a"]


def test_a_long_queue_is_not_matched() -> None:
    tree = Tree([1, 2, 3])
    requests = [request(f"r{i}", [0]) for i in range(128)] + [request("cached", [1, 2, 3, 4])]
    assert tree.order("lpm", *requests)[-1] == "cached"
    assert tree.order("lpm", *requests[1:])[0] == "cached"


def test_the_ratio_decays_is_reestimated_and_starts_again() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == pytest.approx(0.7)
    for _ in range(300):
        ratio.decay(1.0)
    assert ratio.value == pytest.approx(0.7 * (1 - 0.86 / 2))
    for _ in range(400):
        ratio.decay(1.0)
    assert ratio.value == pytest.approx(0.7 * 0.14)
    ratio.on_retraction([request("a", [1], new=100, out=30), request("b", [1], new=99, out=10)])
    assert ratio.value == pytest.approx((30 + 10 + 40) / 200)
    ratio.reset()
    assert ratio.value == pytest.approx(0.7)


def test_conservativeness_scales_the_start_and_is_capped() -> None:
    assert NewTokenRatio(RatioRule(conservativeness=0.5)).value == pytest.approx(0.35)
    assert NewTokenRatio(RatioRule(conservativeness=9.0)).value == 1.0
