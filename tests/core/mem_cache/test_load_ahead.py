"""Prefixes loaded from the host while their requests wait: when, how many, and that no other request pays for it."""

import pytest

from engine.core.mem_cache.radix_cache import RadixCache
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.tiers_in_a_test import TieredEngine

PROMPT = list(range(13))  # three whole pages and a token
OTHER = [30, *range(12)]


def waiting(prompt: list[int] = PROMPT, *, num_pages: int = 16, **flags: object) -> TieredEngine:
    """The prefix of `prompt` is on the host alone; "b" wants it, and waits for the only row."""
    flags = {"ahead_pages": 100, "max_running": 1, **flags}
    engine = TieredEngine(host_pages=60, num_pages=num_pages, **flags)  # type: ignore[arg-type]
    engine.answer("a", prompt, max_new_tokens=2)
    engine.push_out()
    engine.add("runs", [40, 41], max_new_tokens=6)
    engine.turn()
    engine.add("b", prompt, max_new_tokens=2)
    return engine


def loaded_ahead(engine: TieredEngine) -> int:
    return engine.host.counted["hicache_loaded_ahead_pages"]


def num_loads(engine: TieredEngine, since: int) -> list[int]:
    return [len(plan.from_host) for plan in engine.plans[since:]]


def test_a_prefix_is_on_the_device_when_its_turn_comes() -> None:
    engine = waiting()
    before = len(engine.plans)
    engine.turn()
    assert num_loads(engine, before) == [3] and "b" in engine.scheduler.stages.waiting
    engine.run()
    assert sum(num_loads(engine, before)) == 3, "once"
    assert engine.tokens["b"] == expected_tokens(PROMPT, 2)
    hits = {k: v for k, v in engine.host.counted.items() if k.endswith("hit_tokens") and v}
    assert engine.outputs["b"][0].cached_tokens == 12 and hits == {"hicache_host_hit_tokens": 12}


def test_what_came_from_files_still_counts_as_such() -> None:
    engine = waiting(disk_pages=100)
    engine.disk_turn()
    files = dict(engine.files)
    again = TieredEngine(host_pages=60, num_pages=16, disk_pages=100, files=files, ahead_pages=2, max_running=1)
    again.add("runs", [40, 41], max_new_tokens=12)
    again.turn()
    again.add("b", PROMPT, max_new_tokens=2)
    again.disk_turn(1)
    again.turn()
    again.disk_turn()
    again.run()
    assert loaded_ahead(again) == 3 and again.host.counted["hicache_disk_hit_tokens"] == 12
    assert again.tokens["b"] == expected_tokens(PROMPT, 2)


def test_a_step_carries_no_more_than_its_share() -> None:
    engine = waiting(ahead_pages=1)
    before = len(engine.plans)
    engine.turns(4)
    assert num_loads(engine, before) == [1, 1, 1, 0]
    assert all(len(plan.items) == 1 for plan in engine.plans[before:]), "no step is made for it alone"


def test_none_is_loaded_without_the_wish() -> None:
    engine = waiting(ahead_pages=0)
    before = len(engine.plans)
    engine.run()
    assert loaded_ahead(engine) == 0 and [n for n in num_loads(engine, before) if n] == [3]


def test_admission_and_growth_find_as_many_pages_as_before() -> None:
    engine = waiting()
    memory = engine.scheduler.memory
    before = memory.available
    plan = engine.next_plan()
    assert plan is not None and len(plan.from_host) == 3 and memory.available == before
    engine.launch(plan)
    engine.run()


@pytest.mark.parametrize(("num_pages", "loaded"), [(9, 3), (6, 2), (4, 1)])
def test_at_most_half_of_what_can_be_taken_is_loaded_ahead(num_pages: int, loaded: int) -> None:
    engine = waiting(num_pages=num_pages)
    assert (num_pages - 1) // 2 >= loaded, "the running request has a page"
    engine.turn()
    assert loaded_ahead(engine) == loaded
    engine.run()
    assert engine.tokens["b"] == expected_tokens(PROMPT, 2) and engine.outputs["b"][0].cached_tokens == 12


def test_the_half_is_for_all_that_wait_together() -> None:
    engine = TieredEngine(host_pages=60, num_pages=10, ahead_pages=100, max_running=2)
    for rid, prompt in (("a", PROMPT), ("o", OTHER)):
        engine.answer(rid, prompt, max_new_tokens=2)
    engine.push_out()
    for rid in ("runs", "runs too"):
        engine.add(rid, [44], max_new_tokens=3)
    engine.turns(2)
    assert engine.scheduler.memory.available == 8
    engine.add("b", PROMPT, max_new_tokens=1)
    engine.add("c", OTHER, max_new_tokens=1)
    engine.turn()
    waiting = engine.scheduler.stages.waiting.values()
    assert [r.lower_tiers.ahead.num_pages for r in waiting] == [3, 1]
    engine.run()
    assert engine.tokens["b"] == expected_tokens(PROMPT, 1) and engine.tokens["c"] == expected_tokens(OTHER, 1)
    assert engine.outputs["c"][0].cached_tokens == 12


def test_it_evicts_nothing_that_one_before_it_would_find() -> None:
    engine = TieredEngine(host_pages=60, num_pages=9, ahead_pages=100, max_running=2)
    engine.answer("a", PROMPT, max_new_tokens=2)
    engine.push_out()
    engine.answer("first", OTHER, max_new_tokens=1)
    engine.add("runs", [44] * 17, max_new_tokens=4)  # five pages
    engine.add("runs too", [45], max_new_tokens=4)  # one: what can be taken is OTHER's three
    engine.turns(2)
    cache = engine.scheduler.memory.cache
    assert cache.num_cached(OTHER) == engine.scheduler.memory.available == 3
    engine.add("early", OTHER, max_new_tokens=1)
    engine.add("late", PROMPT, max_new_tokens=1)
    engine.turn()
    assert loaded_ahead(engine) == 0 and cache.num_cached(OTHER) == 3
    engine.abort("early")
    engine.turn()
    assert loaded_ahead(engine) == 1 and cache.num_cached(OTHER) == 0, "its request is gone"
    engine.run()
    assert engine.tokens["late"] == expected_tokens(PROMPT, 1)


def test_an_aborted_request_leaves_it_to_the_tree() -> None:
    engine = waiting()
    engine.turn()
    engine.abort("b")
    engine.run()
    assert engine.scheduler.memory.cache.num_cached(PROMPT) == 3
    engine.answer("c", PROMPT, max_new_tokens=1)
    assert engine.outputs["c"][0].cached_tokens == 12
    assert engine.scheduler.flush_cache() and not any(map(engine.host.pages.is_pinned, range(60)))


def test_what_is_gone_again_comes_with_the_admission() -> None:
    engine = waiting()
    engine.turn()
    engine.scheduler.memory.cache.evict(100)
    engine.add("c", [45, 46], max_new_tokens=1)  # the queue is looked through again
    engine.run()
    assert loaded_ahead(engine) == 3 and engine.host.counted["hicache_loaded_pages"] == 6
    assert engine.tokens["b"] == expected_tokens(PROMPT, 2) and engine.outputs["b"][0].cached_tokens == 12


def test_a_request_that_leaves_no_kv_behind_leaves_none_ahead() -> None:
    engine = waiting()
    engine.scheduler.stages.waiting["b"].keep_kv = False
    engine.turn()
    assert loaded_ahead(engine) == 0


def test_an_unchanged_queue_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each step of a full batch would match the prompts of those that wait."""
    engine = waiting()
    engine.turn()
    matches = list[object]()
    match = RadixCache.match
    monkeypatch.setattr(RadixCache, "match", lambda *args, **kwargs: (matches.append(args), match(*args, **kwargs))[1])
    engine.turns(3)
    assert matches == []
    engine.add("c", OTHER, max_new_tokens=1)
    engine.turn()
    assert matches
