"""The scheduler with literals: what is planned, what ends when, where memory goes. (Anything at all: tests/core/proof.)"""

import pytest

from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens


def all_pages_back(engine: EngineInATest) -> bool:
    counts = engine.scheduler.memory.allocator.counts()
    return counts["held"] == counts["quarantined"] == 0 and engine.scheduler.idle


@pytest.mark.parametrize(("eos_at", "num_tokens", "wasted"), [(2, 3, 1), (None, 5, 0)])
def test_the_step_after_eos_leaves_no_trace_and_the_last_token_by_length_wastes_none(
    eos_at: int | None, num_tokens: int, wasted: int
) -> None:
    prompt = [1, 2, 3]
    eos = None if eos_at is None else expected_tokens(prompt, 5)[eos_at]
    engine = EngineInATest(depth=2)
    assert engine.answer("r", prompt, eos=eos, max_new_tokens=5) == expected_tokens(prompt, num_tokens)
    assert (engine.finish["r"].kind, engine.finish["r"].matched) == ("length" if eos is None else "stop", eos)
    assert engine.scheduler.counters.wasted_samples == wasted
    assert sum(len(p.items) for p in engine.plans) == num_tokens + wasted
    assert all_pages_back(engine)


def test_equal_prompts_side_by_side_keep_one_copy_in_the_tree() -> None:
    engine = EngineInATest(page_size=4, num_pages=32)
    for rid in ("a", "b"):
        engine.add(rid, list(range(8)), max_new_tokens=9)
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == expected_tokens(list(range(8)), 9)
    assert engine.scheduler.memory.allocator.counts()["cached"] == 4  # 16 of 17 tokens
    assert all_pages_back(engine)


def test_a_long_prompt_goes_in_whole_pages_and_first_in_line() -> None:
    engine = EngineInATest(page_size=4, chunk=10)
    engine.add("long", list(range(25)), max_new_tokens=1)
    engine.answer("short", [7, 7], max_new_tokens=1)
    shapes = [[(i.rid, i.start, i.q_len, i.sample) for i in p.items] for p in engine.plans]
    assert shapes == [
        [("long", 0, 8, False)],
        [("long", 8, 8, False)],
        [("long", 16, 9, True)],
        [("short", 0, 2, True)],
    ]


def test_short_pages_retract_one_request_at_a_time() -> None:
    """Deep in flight the victim's memory comes some collects later: no other request goes meanwhile."""
    engine = EngineInATest(page_size=4, num_pages=10, depth=4, max_running=3, clip=0)
    for i in range(3):
        engine.add(f"r{i}", [i, 1, 2, 3], max_new_tokens=13)
    engine.run()
    assert engine.scheduler.counters.retractions == 1
    assert engine.tokens == {f"r{i}": expected_tokens([i, 1, 2, 3], 13) for i in range(3)}


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [([], {}, "prompt is empty"), ([1] * 100, {"max_new_tokens": 200}, "exceeds the KV capacity of 256")],
)
def test_what_can_never_run_is_refused_by_name(prompt: list[int], sampling: dict[str, int], words: str) -> None:
    engine = EngineInATest(num_pages=64, page_size=4)
    engine.add("bad", prompt, **sampling)
    engine.answer("good", [1, 2], max_new_tokens=1)
    assert words in engine.finish["bad"].message and engine.finish["bad"].status == 400
    assert engine.tokens["good"] == expected_tokens([1, 2], 1)


def test_a_full_batch_never_pays_for_a_hopeless_judgement() -> None:
    engine = EngineInATest(num_pages=12, page_size=4, max_running=8)
    engine.add("a", [1, 2, 3], max_new_tokens=40)
    engine.turn()
    judged: list[str] = []
    admit = engine.scheduler.memory.admit
    engine.scheduler.memory.admit = lambda r, **kw: judged.append(r.rid) or admit(r, **kw)  # type: ignore[method-assign, func-returns-value]
    engine.add("b", [4, 5, 6], max_new_tokens=40)
    engine.turns(20)
    assert judged == ["b"] and engine.scheduler.stages.batch_is_full
    engine.run()
    assert judged == ["b", "b"] and engine.tokens["b"] == expected_tokens([4, 5, 6], 40)


def test_a_step_takes_no_more_prompts_than_allowed() -> None:
    engine = EngineInATest(prefill_max_requests=2)
    for i in range(5):
        engine.add(f"r{i}", [i + 1], max_new_tokens=1)
    engine.run()
    assert [len(p.items) for p in engine.plans] == [2, 2, 1]


def test_without_chunks_a_prompt_may_overdraw_the_budget_alone() -> None:
    engine = EngineInATest(chunk=None, max_prefill_tokens=10)
    for rid, length in (("small", 4), ("large", 30), ("tiny", 2)):
        engine.add(rid, list(range(length)), max_new_tokens=1)
    engine.run()
    assert [[item.rid for item in p.items] for p in engine.plans] == [["small"], ["large"], ["tiny"]]


def test_mixed_steps_lower_the_new_token_ratio_as_decode_steps_do() -> None:
    """A short prompt comes every turn: there are next to no pure decode steps."""
    engine = EngineInATest(page_size=4, num_pages=400, chunk=16, mixed_chunk=True)
    engine.add("long", [1, 2, 3], max_new_tokens=710)
    engine.turn()
    for i in range(700):
        engine.add(f"r{i}", [i % 50], max_new_tokens=1)
        engine.turn()
    assert engine.scheduler.counters.mixed_steps == 700
    assert engine.scheduler.ratio.value == pytest.approx(0.7 * 0.14)


def test_a_step_of_prompts_alone_leaves_the_new_token_ratio() -> None:
    engine = EngineInATest(page_size=4)
    for i in range(5):
        engine.add(f"r{i}", [i], max_new_tokens=4)
    engine.turn()
    assert engine.scheduler.ratio.value == pytest.approx(0.7)


def test_a_chunked_prompt_goes_on_by_a_page_although_riders_have_the_budget() -> None:
    """They may have come since its first chunk: from a prefill worker, or resumed."""
    engine = EngineInATest(page_size=4, chunk=8, max_running=20, mixed_chunk=True)
    engine.add("long", list(range(20)), max_new_tokens=2)
    engine.turn()
    for i in range(7):
        engine.land(f"r{i}", [i], max_new_tokens=20)
    engine.run()
    parts = [item.q_len for plan in engine.plans for item in plan.items if item.rid == "long" and item.extend]
    assert parts == [8, 4, 4, 4] and engine.tokens["long"] == expected_tokens(list(range(20)), 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_has_a_row_goes_on_although_others_have_none(depth: int) -> None:
    """A decode worker adopts more than it has rows; after a retraction those without one stand before the one that has."""
    engine = EngineInATest(page_size=4, max_running=1, depth=depth)
    engine.land("first", [1], max_new_tokens=9)
    engine.turn()
    engine.land("second", [2], max_new_tokens=9)
    while engine.launched:
        engine.collect()
    engine.scheduler.retract_all()
    engine.land("third", [3], max_new_tokens=9)
    engine.run()
    assert engine.tokens == {rid: expected_tokens([i], 9) for i, rid in enumerate(("first", "second", "third"), 1)}


@pytest.mark.parametrize(
    ("length", "parts"), [(64, [64]), (68, [68]), (69, [64, 5]), (132, [64, 68]), (133, [64, 64, 5])]
)
def test_the_end_of_a_prompt_may_overdraw_the_chunk_budget_by_a_16th(length: int, parts: list[int]) -> None:
    engine = EngineInATest(page_size=4, chunk=64)
    prompt = [i % 50 for i in range(length)]
    engine.answer("r", prompt, max_new_tokens=2)
    assert [item.q_len for plan in engine.plans for item in plan.items if item.extend] == parts
    assert engine.tokens["r"] == expected_tokens(prompt, 2)


def test_only_one_prompt_of_a_step_overdraws_it() -> None:
    engine = EngineInATest(page_size=4, chunk=64)
    for rid in ("a", "b", "c"):
        engine.add(rid, [ord(rid) % 50 + i % 9 for i in range(33)], max_new_tokens=1)
    engine.run()
    assert [[item.q_len for item in plan.items] for plan in engine.plans if plan.extend] == [[33, 33], [33]]


def test_prompts_come_in_although_riders_have_the_budget() -> None:
    engine = EngineInATest(page_size=4, chunk=4, max_running=20, mixed_chunk=True)
    for i in range(5):
        engine.land(f"r{i}", [i], max_new_tokens=30)
    engine.turn()
    engine.add("new", [1, 2, 3], max_new_tokens=2)
    engine.turn()
    assert any(item.rid == "new" for item in engine.plans[-1].items) and len(engine.plans[-1].items) == 6
    engine.run()
    assert engine.tokens["new"] == expected_tokens([1, 2, 3], 2)


PREFIX = [i % 50 for i in range(200)]


def plan_ids(engine: EngineInATest) -> list[list[str]]:
    return [[item.rid for item in plan.items] for plan in engine.plans if plan.extend]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_shares_a_prefix_that_is_being_computed_waits_a_step_and_finds_it(depth: int) -> None:
    """Whatever the policy; nobody else is held up."""
    engine = EngineInATest(depth=depth, page_size=4, chunk=1024, max_prefill_tokens=4096, num_pages=512, max_running=8)
    prompts = {"first": [*PREFIX, 1], "second": [*PREFIX, 2], "other": [9, 9, 9], "third": [*PREFIX, 3]}
    for rid, prompt in prompts.items():
        engine.add(rid, prompt, max_new_tokens=3)
    engine.run()
    assert plan_ids(engine)[0] == ["first", "other"]
    found = [item for plan in engine.plans for item in plan.items if item.rid in ("second", "third") and item.extend]
    assert [item.start for item in found] == [200, 200]
    assert engine.tokens == {rid: expected_tokens(prompt, 3) for rid, prompt in prompts.items()}


def test_a_request_that_shares_little_or_cannot_find_it_does_not_wait() -> None:
    short = [i % 50 for i in range(124)]
    engine = EngineInATest(page_size=4, chunk=1024, max_prefill_tokens=4096, num_pages=512)
    for rid in ("first", "second"):
        engine.add(rid, [*short, ord(rid[0]) % 50, *range(40)], max_new_tokens=1)
    engine.run()
    assert plan_ids(engine) == [["first", "second"]]
    for kept in (True, False):
        engine = EngineInATest(page_size=4, chunk=1024, max_prefill_tokens=4096, num_pages=512)
        for rid in ("first", "second"):
            engine.add(rid, PREFIX, max_new_tokens=1).keep_kv = kept
        engine.run()
        assert plan_ids(engine) == ([["first"], ["second"]] if kept else [["first", "second"]])


def test_who_waits_for_a_long_prompt_goes_when_that_is_aborted() -> None:
    engine = EngineInATest(page_size=4, chunk=256, max_prefill_tokens=4096, num_pages=512)
    long = [i % 50 for i in range(600)]
    engine.add("first", long, max_new_tokens=1)
    engine.turn()
    engine.add("second", [*long, 7], max_new_tokens=2)
    engine.turn()
    engine.abort("first")
    engine.run()
    assert engine.tokens["second"] == expected_tokens([*long, 7], 2)
    assert next(item.start for plan in engine.plans for item in plan.items if item.rid == "second") == 512


def test_of_many_requests_with_one_prefix_a_plan_looks_at_some() -> None:
    engine = EngineInATest(page_size=4, chunk=1024, max_prefill_tokens=4096, num_pages=512, max_running=64)
    for i in range(40):
        engine.add(f"r{i}", [*PREFIX, i], max_new_tokens=1)
    engine.answer("other", [9, 9, 9], max_new_tokens=1)
    assert plan_ids(engine)[0] == ["r0"] and len(plan_ids(engine)[1]) == 40


def test_who_finds_all_that_it_shares_already_does_not_wait() -> None:
    engine = EngineInATest(page_size=4, chunk=1024, max_prefill_tokens=4096, num_pages=512)
    engine.answer("before", PREFIX, max_new_tokens=1)
    engine.add("first", [*PREFIX, *range(1, 160)], max_new_tokens=1)
    engine.answer("second", [*PREFIX, *range(7, 20)], max_new_tokens=1)
    assert plan_ids(engine) == [["before"], ["first", "second"]]
