"""Which pages of named conversations go first, through the memory that requests use."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.mem_cache.conversations import MAX_TIPS, ConversationPages
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import RANKS, TRUNK, Branch, EvictionOrder, RadixCache
from engine.core.memory import Memory
from engine.core.request import Request
from engine.messages import FinishReason, GenerateRequest
from engine.sampling_params import SamplingParams

SIZE = 2
Turns = Sequence[tuple[str, list[int]]]


class Cache:
    """A prefix cache of `num_pages` pages of SIZE tokens, at `now_s`."""

    def __init__(self, num_pages: int = 100, *, named: bool = True) -> None:
        self.allocator = PageAllocator(num_pages=num_pages, page_size=SIZE)
        self.part = ConversationPages(SIZE)
        parts = [self.part] if named else []
        order = self.part.order if named else EvictionOrder(RANKS["lru"])
        self.tree = RadixCache(self.allocator, order=order, parts=parts)
        self.memory = Memory(self.allocator, self.tree, parts)

    def at(self, now_s: float) -> "Cache":
        self.part.now_s = now_s
        return self

    def begin(self, prompt: list[int], name: str = "", **more: object) -> Request:
        fields: dict[str, object] = {"conversation": name, **more}
        message = GenerateRequest("r", prompt, SamplingParams(max_new_tokens=1), **fields)  # type: ignore[arg-type]
        request = Request(message=message, arrived_s=self.part.now_s)
        assert self.memory.admit(request, reserved_pages=0)
        request.launched_len = request.computed_len = len(prompt)
        request.admitted = True
        self.memory.share(request)
        return request

    def end(self, request: Request) -> None:
        request.finish = FinishReason(kind="stop")
        self.memory.give_back(request)
        self.check()

    def turn(self, prompt: list[int], name: str = "", **more: object) -> int:
        """The tokens of its prompt that were cached."""
        cached = self.held(prompt)
        self.end(self.begin(prompt, name, **more))
        return cached

    def held(self, prompt: list[int], branch: Branch = TRUNK) -> int:
        return self.tree.num_cached(prompt, branch=branch) * SIZE

    def evict(self, num_pages: int) -> None:
        self.tree.evict(num_pages)
        self.check()

    def check(self) -> None:
        self.tree.check()
        self.allocator.check()
        self.part.check([])


def run(token: int, pages: int = 2) -> list[int]:
    return [token] * (pages * SIZE)


def test_a_superseded_turn_goes_first_though_it_is_newer_than_others() -> None:
    cache = Cache()
    cache.at(1).turn(run(9), "other")
    cache.at(2).turn(run(1) + run(2), "c")
    cache.at(3).turn(run(1) + run(3), "c")  # instead of run(2)
    cache.evict(2)
    assert cache.held(run(1) + run(2)) == 4, "the trunk of both turns stays"
    assert cache.held(run(1) + run(3)) == 8 and cache.held(run(9)) == 4
    cache.evict(2)
    assert cache.held(run(9)) == 0, "then as without names"


def test_without_a_name_the_older_goes_first() -> None:
    cache = Cache()
    cache.at(1).turn(run(9))
    cache.at(2).turn(run(1) + run(2))
    cache.at(3).turn(run(1) + run(3))
    cache.evict(2)
    assert cache.held(run(9)) == 0 and cache.held(run(1) + run(2)) == 8


def test_the_rest_of_an_answer_that_was_cut_is_superseded() -> None:
    """The next prompt repeats most of the conversation, but not the last answer as it was generated."""
    cache = Cache()
    cache.at(1).turn(run(9), "other")
    cache.at(2).turn(run(1, 4) + run(2), "c")
    cache.at(3).turn(run(1, 4) + run(3), "c")
    cache.evict(2)
    assert cache.held(run(1, 4) + run(2)) == 8 and cache.held(run(9)) == 4


def test_a_turn_that_shares_little_with_the_last_one_supersedes_it() -> None:
    cache = Cache()
    cache.at(1).turn(run(9), "other")
    cache.at(2).turn(run(1) + run(2, 6), "c")
    cache.at(3).turn(run(1) + run(3), "c")
    cache.evict(6)
    assert cache.held(run(1) + run(2)) == 4 and cache.held(run(9)) == 4


def test_a_branch_that_goes_on_is_not_superseded() -> None:
    """A subagent under its parent's name: nothing but a trunk is shared, and the parent goes on."""
    cache = Cache()
    parent, child = run(1) + run(2, 6), run(1) + run(3)
    cache.at(1).turn(parent, "c")
    cache.at(2).turn(child, "c")
    assert cache.at(3).turn(parent + run(4), "c") == len(parent)
    assert cache.at(4).turn(child + run(5), "c") == len(child)
    cache.at(500).turn(run(9))
    cache.evict(2)
    assert cache.held(run(9)) == 4 and cache.held(child + run(5)) == 12 and cache.held(parent + run(4)) == 16, (
        "the oldest end goes, as without names"
    )


def test_a_conversation_whose_branches_go_on_supersedes_none() -> None:
    cache = Cache()
    cache.at(0).turn(run(8))
    parent, child = run(1) + run(2, 6), run(1) + run(3, 4)
    for number, prompt in enumerate((parent, child, parent + run(4), run(1) + run(5)), 1):
        cache.at(100.0 * number).turn(prompt, "c")
    cache.at(5000.0).evict(2)
    assert cache.held(run(8)) == 0, "the oldest goes"
    assert [cache.held(prompt) for prompt in (child, parent + run(4), run(1) + run(5))] == [12, 20, 8]


def test_a_subagent_with_another_trunk_supersedes_nothing_of_its_parent() -> None:
    cache = Cache()
    parent, child = run(1) + run(2, 4), run(5) + run(6)
    cache.at(0).turn(run(9))
    cache.at(1).turn(run(8))
    cache.at(2).turn(parent, "c")
    cache.at(3).turn(child, "c")
    cache.evict(2)
    assert cache.held(run(9)) == 0 and cache.held(parent) == len(parent) and cache.held(child) == len(child)
    cache.at(4).turn(child + run(7), "c")
    cache.at(5).turn(run(1) + run(3), "c")  # the parent, with less
    cache.evict(4)
    assert cache.held(parent) == 4 == cache.held(run(8)) and cache.held(child + run(7)) == 12


def test_each_branch_has_its_own_return() -> None:
    cache = Cache()
    cache.at(2).turn(run(1), "c", expected_return_s=98.0)
    cache.at(3).turn(run(2), "c", expected_return_s=1000.0)
    cache.at(50).turn(run(9), "other")
    cache.at(100).evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 9)] == [4, 0, 4]
    cache.evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 9)] == [4, 0, 0], "due now, though another has turned since"


def test_a_gap_is_a_branch_s_own() -> None:
    """Two take turns: each comes back after 1,000 s, a second after the other."""
    cache = Cache()
    prompts = [run(1), run(2)]
    for turn in range(6):
        for at, prompt in enumerate(prompts):
            cache.at(1000.0 * turn + at).turn(prompt, "c")
            prompt += run(10 + turn)
    (known,) = cache.part._named.values()
    assert math.exp(known.gaps.mean * 12 / 10) > 500, "the mean of 12, of which two are no gaps of a branch"


def test_a_trunk_lives_as_long_as_a_branch() -> None:
    cache = Cache()
    trunk = run(1, 3)
    cache.at(1).turn(trunk + run(2), "parent")
    cache.at(2).turn(trunk + run(3), "child")
    cache.part.announce((), "parent", None)
    cache.evict(2)
    assert cache.held(trunk + run(2)) == 6 and cache.held(trunk + run(3)) == 10
    cache.part.announce((), "child", None)
    cache.evict(2)
    assert cache.held(trunk) == 6, "of several conversations, so in its turn"


def test_a_closed_conversation_goes_first_and_may_come_back() -> None:
    cache = Cache()
    cache.at(1).turn(run(9), "other")
    cache.at(2).turn(run(1), "c")
    cache.part.announce((), "c", None)
    cache.at(3).turn(run(1), "c")
    cache.evict(2)
    assert cache.held(run(1)) == 4 and cache.held(run(9)) == 0, "it came back"
    cache.at(4).turn(run(9), "other")
    cache.part.announce((), "other", None)
    cache.evict(1)
    assert cache.held(run(9)) == 0 and cache.held(run(1)) == 4


def test_pages_that_others_read_since_outlive_their_conversation() -> None:
    cache = Cache()
    cache.at(1).turn(run(1), "c")
    cache.at(2).turn(run(9))
    cache.part.announce((), "c", None)
    cache.at(3).turn(run(1) + run(2))
    cache.evict(2)
    assert cache.held(run(9)) == 0 and cache.held(run(1)) == 4
    cache.evict(2)
    cache.at(4).turn(run(9))
    cache.at(5).turn(run(1))
    cache.evict(2)
    assert cache.held(run(9)) == 0 and cache.held(run(1)) == 4, "read, but not longer"


def test_a_trunk_that_is_divided_still_belongs_to_several() -> None:
    cache = Cache()
    for at_s, name in enumerate(("a", "b"), 1):
        cache.at(at_s).turn(run(1) + run(2), name)
    cache.at(3).turn(run(9))
    cache.at(4).turn(run(1) + run(3), "c")
    cache.part.announce((), "c", None)
    cache.evict(2)
    assert cache.held(run(1) + run(3)) == 4, "the end of c goes first"
    cache.evict(4)
    assert cache.held(run(9)) == 0 and cache.held(run(1)) == 4


def test_what_is_left_of_an_evicted_turn_is_still_expected() -> None:
    cache = Cache()
    cache.at(1).turn(run(1), "c")
    cache.at(2).turn(run(1) + run(2), "c", expected_return_s=1000.0)
    cache.at(3).turn(run(9))
    cache.evict(2)
    assert cache.held(run(1) + run(2)) == 4, "it returns late"
    cache.part.announce((), "c", 0.0)
    cache.evict(2)
    assert cache.held(run(1)) == 4 and cache.held(run(9)) == 0


def test_of_two_announced_returns_the_later_goes_first() -> None:
    cache = Cache()
    cache.at(1).turn(run(1), "late", expected_return_s=500.0)
    cache.at(2).turn(run(2), "soon", expected_return_s=5.0)
    cache.at(3).turn(run(3), "later still")
    cache.part.announce((), "later still", 5000.0)
    cache.evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 3)] == [4, 4, 0]
    cache.at(4).evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 3)] == [0, 4, 0]


def test_an_announced_return_is_as_a_use_then_and_no_more() -> None:
    cache = Cache()
    cache.at(0).turn(run(1), "c", expected_return_s=100.0)
    cache.at(60).turn(run(2))
    cache.at(99).turn(run(3))
    cache.at(100).evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 3)] == [4, 0, 4], "due now: more recent than a use 40 s ago"
    cache.at(150).turn(run(4))
    cache.at(400).evict(4)
    assert [cache.held(run(n)) for n in (1, 3, 4)] == [0, 0, 4], "it did not return"


@pytest.mark.parametrize("slow_first", [True, False])
def test_the_gap_is_learnt_from_the_conversation(*, slow_first: bool) -> None:
    """Both ended now; one returns every two seconds, one every half hour."""
    cache, prompts, now_s = Cache(1000), {1800.0: run(1), 2.0: run(2)}, 0.0
    for gap_s in sorted(prompts, reverse=slow_first):
        for number in range(30):
            prompts[gap_s] += run(100 + number)
            now_s += gap_s
            cache.at(now_s).turn(prompts[gap_s], f"{gap_s}")
    cache.at(now_s + 60).evict(1)
    slow, quick = prompts.values()
    assert cache.held(slow) < len(slow) and cache.held(quick) == len(quick)


def test_a_bound_of_the_gap_is_believed() -> None:
    def first_gone(within_s: float | None) -> int:
        cache, prompt = Cache(1000), run(1)
        for number in range(20):
            prompt += run(100 + number)
            cache.at(900.0 * number).turn(prompt, "c", returns_within_s=within_s)
            cache.at(900.0 * number + 500).turn(run(2))
        cache.at(900.0 * 20).turn(prompt, "c", returns_within_s=within_s)
        cache.evict(1)
        return 1 if cache.held(prompt) < len(prompt) else 2

    assert first_gone(None) == 1 and first_gone(300.0) == 2


def test_names_are_of_their_namespace() -> None:
    cache, branch = Cache(), Branch(namespace=("tenant",))
    cache.at(1).turn(run(9))
    cache.at(2).turn(run(1), "c", namespace=("tenant",))
    cache.part.announce((), "c", None)
    cache.evict(2)
    assert cache.held(run(9)) == 0 and cache.held(run(1), branch) == 4, "another's conversation of that name is closed"


def test_what_is_counted() -> None:
    cache = Cache()
    cache.at(1).turn(run(1), "c")
    cache.at(2).turn(run(1) + run(2), "c")
    cache.at(3).turn(run(1) + run(2))
    assert cache.part.counters() == {"conversation_turns": 1, "conversation_hit_tokens": 4}
    assert cache.part.gauges() == {"conversations": 1}


def test_conversations_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.mem_cache.conversations.MAX_CONVERSATIONS", 2)
    cache = Cache()
    for number in range(3):
        cache.at(number).turn(run(number + 1), f"c{number}")
    assert cache.part.gauges() == {"conversations": 2}
    cache.part.announce((), "c2", None)
    cache.evict(2)
    assert [cache.held(run(n)) for n in (1, 2, 3)] == [4, 4, 0], "a forgotten one's pages go by age"


FAMILIES, LETTERS = 3, 3
NAMES = ("", "", "a", "b")
acts = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "begin", "end", "evict", "close", "expect", "flush"]),
        st.sampled_from(NAMES),
        st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=8),
        st.integers(0, 40),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(acts=acts)
def test_whatever_happens_nothing_is_lost_and_all_can_be_evicted(acts: list[tuple[str, str, list[int], int]]) -> None:
    cache = Cache(60)
    running: list[Request] = []
    for kind, name, letters, number in acts:
        cache.at(cache.part.now_s + number)
        prompt = [token for letter in letters for token in run(letter + 1, 1)]
        if kind in ("turn", "begin") and len(running) < 3:
            running.append(cache.begin(prompt, name, expected_return_s=number if number % 3 else None))
            if kind == "turn":
                cache.end(running.pop())
        elif kind == "end" and running:
            cache.end(running.pop(number % len(running)))
        elif kind == "evict":
            cache.evict(number % 5)
        elif kind in ("close", "expect"):
            cache.part.announce((), name, None if kind == "close" else number)
        elif kind == "flush" and not running:
            cache.tree.flush()
        cache.check()
    for request in running:
        cache.end(request)
    cache.evict(1000)
    assert cache.allocator.num_free == 60 and cache.tree.num_pages == 0, "no name pins a page"


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=3, max_size=25),
    seed=st.integers(0, 99),
)
def test_without_names_the_order_is_lru(prompts: list[list[int]], seed: int) -> None:
    draw, caches = random.Random(seed), (Cache(40), Cache(40, named=False))
    for letters in prompts:
        prompt, pages, gap_s = [t for letter in letters for t in run(letter, 1)], draw.randrange(4), draw.random()
        held = []
        for cache in caches:
            cache.at(cache.part.now_s + gap_s).turn(prompt)
            cache.evict(pages)
            held.append(sorted(page for page in range(1, 41) if cache.allocator.states_of([page]) == {"cached"}))
        assert held[0] == held[1]


def test_a_conversation_of_many_branches_is_bounded() -> None:
    cache = Cache(400)
    for number in range(3 * MAX_TIPS):
        cache.at(number).turn(run(number + 10, 4), "c")
    cache.evict(1000)
    assert cache.tree.num_pages == 0
