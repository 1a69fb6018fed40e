"""Adapters in the core: the registry's states, who has a place in a batch, and KV that no other adapter ever sees."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.adapters import AdapterBudget, AdapterRefused, Adapters, AdapterState
from engine.core.policy import POLICIES, Limits
from engine.core.request import Request
from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens


def loaded(*names: str, max_loaded: int | None = None) -> Adapters:
    adapters = Adapters(max_loaded=max_loaded)
    for name in names:
        adapters.begin_load(name, f"/{name}")
        adapters.finish_load(name)
    return adapters


def test_another_load_of_a_name_is_another_adapter() -> None:
    adapters = loaded("a")
    assert adapters.acquire("r1", "a") == 1
    adapters.begin_unload("a")
    assert adapters.take_left() == []
    adapters.release("r1")
    assert [a.number for a in adapters.take_left()] == [1] and adapters.loaded() == {}
    adapters.begin_load("a", "/other")
    assert adapters.finish_load("a") == 2 and adapters.acquire("r2", "a") == 2
    assert adapters.loaded() == {"a": "/other"}


def test_requests_of_an_unloading_adapter_go_on_and_no_new_one_enters() -> None:
    adapters = loaded("a")
    adapters.acquire("old", "a")
    adapters.begin_unload("a")
    with pytest.raises(AdapterRefused, match=r"lora_path: .* is being unloaded"):
        adapters.acquire("new", "a")
    assert adapters.acquire("old", "a") == 1  # it waited, and asks again
    adapters.check()
    adapters.release("old")
    adapters.release("new")  # used none
    assert [a.name for a in adapters.take_left()] == ["a"]


def acquire_while_loading(adapters: Adapters) -> None:
    adapters.begin_load("b", "/b")
    adapters.acquire("r", "b")


def load_while_leaving(adapters: Adapters) -> None:
    adapters.acquire("r", "a")
    adapters.begin_unload("a")
    adapters.begin_load("a", "/a")


REFUSED: dict[str, tuple[Callable[[Adapters], object], str, int]] = {
    "loaded twice": (lambda a: a.begin_load("a", "/a"), "lora_name: 'a' is loaded already .from /a.", 400),
    "one too many": (
        lambda a: [a.begin_load(n, "") for n in "bc"],
        "2 adapters are loaded, as many as --max-loaded-loras",
        400,
    ),
    "loading": (lambda a: [a.begin_load("b", "") for _ in range(2)], "lora_name: 'b' is loading just now", 409),
    "not loaded yet": (acquire_while_loading, "lora_path: no adapter 'b' is loaded; loaded: a", 400),
    "unload unknown": (lambda a: a.begin_unload("x"), "lora_name: 'x' is not loaded; loaded: a", 400),
    "unload twice": (lambda a: [a.acquire("r", "a"), a.begin_unload("a"), a.begin_unload("a")], "is leaving", 409),
    "load while leaving": (load_while_leaving, "lora_name: 'a' is leaving just now", 409),
    "use unknown": (lambda a: a.acquire("r", "x"), "lora_path: no adapter 'x' is loaded; loaded: a", 400),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    act, message, status = REFUSED[case]
    adapters = loaded("a", max_loaded=2)
    with pytest.raises(AdapterRefused, match=message) as refused:
        act(adapters)
    assert refused.value.status == status
    adapters.check()


def test_a_failed_load_leaves_no_trace() -> None:
    adapters = loaded("a", max_loaded=2)
    adapters.begin_load("b", "/b")
    adapters.fail_load("b")
    assert adapters.loaded() == {"a": "/a"} and adapters.counts()[AdapterState.LOADING] == 0
    adapters.begin_load("b", "/b")
    assert adapters.finish_load("b") == 3


def request(rid: str, adapter: int, *, arrived_s: float = 0.0, new: int = 8) -> Request:
    return request_of([1, 2, 3], rid=rid, arrived_s=arrived_s, adapter=adapter, max_new_tokens=new)


def limits(places: int, wait_s: float | None = None) -> Limits:
    return Limits(
        page_size=4,
        max_running_requests=8,
        max_queued_requests=100,
        max_loras_per_batch=places,
        lora_drain_wait_s=wait_s,
    )


def fits(budget: AdapterBudget, *adapters: int) -> list[bool]:
    return [budget.has_place(request("x", adapter)) for adapter in adapters]


def test_a_batch_holds_so_many_adapters_and_the_model_alone_is_none() -> None:
    budget = AdapterBudget(limits(2), growing=[request("a", 5), request("m", 0)], waiting=[])
    assert fits(budget, 5, 6, 7, 0) == [True, True, True, True]
    budget.take(request("b", 6))
    assert fits(budget, 5, 6, 7, 0) == [True, True, False, True]
    budget.take(request("c", 0))
    assert fits(budget, 6, 7) == [True, False]


def test_who_waits_too_long_gets_the_place_of_the_adapter_that_ends_soonest() -> None:
    running = [request("a", 1, new=50), request("b", 2, new=9), request("b2", 2, new=20)]
    waiting = [request("m", 0, arrived_s=1.0), request("again", 1, arrived_s=1.5), request("late", 3, arrived_s=2.0)]
    patient = AdapterBudget(limits(2, wait_s=10.0), growing=running, waiting=waiting, now_s=11.9)
    assert fits(patient, 1, 2, 3, 4, 0) == [True, True, False, False, True]
    overdue = AdapterBudget(limits(2, wait_s=10.0), growing=running, waiting=waiting, now_s=12.0)
    assert fits(overdue, 1, 2, 3, 4, 0) == [True, False, False, False, True]  # 2 ends first: nobody new for it
    freed = AdapterBudget(limits(2, wait_s=10.0), growing=running[:1], waiting=waiting, now_s=12.0)
    assert fits(freed, 1, 2, 3, 4, 0) == [True, False, True, False, True]  # the place is for 3
    never = AdapterBudget(limits(2), growing=running, waiting=waiting, now_s=1e9)
    assert fits(never, 1, 2, 3) == [True, True, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_without_a_place_is_skipped_and_blocks_no_other(policy: str) -> None:
    engine = EngineInATest(policy=policy, max_loras_per_batch=1, max_running=3)
    engine.add("first", [1, 2], adapter=1, max_new_tokens=30)
    engine.turn()
    for i in range(5):  # more than a step looks at in the queue
        engine.add(f"other-{i}", [1, 2, i], adapter=2, max_new_tokens=4)
    engine.add("same", [1, 2], adapter=1, max_new_tokens=30)
    engine.add("model", [1, 2], max_new_tokens=4)
    engine.turns(2)
    assert {item.rid for item in engine.plans[-1].items} <= {"first", "same", "model"}
    assert not engine.scheduler.stages.batch_is_full or engine.scheduler.num_running == 3
    engine.run()
    assert engine.tokens["model"] == expected_tokens([1, 2], 4)
    assert engine.tokens["other-3"] == expected_tokens([1, 2, 3], 4, adapter=2)
    ends = list(engine.finish)
    assert ends.index("model") < ends.index("first") < min(ends.index(f"other-{i}") for i in range(5))


def test_the_tokens_of_an_adapter_lie_together() -> None:
    engine = EngineInATest(max_loras_per_batch=2)
    for i, adapter in enumerate((2, 0, 1, 2, 1)):
        engine.add(f"{i}", [i], adapter=adapter)
    engine.turns(2)
    assert [item.rid for item in engine.plans[-1].items] == ["1", "2", "4", "0", "3"]


def test_the_step_that_fills_the_last_place_goes_on_behind_it() -> None:
    engine = EngineInATest(max_loras_per_batch=1)
    for rid, adapter in (("a", 1), ("b", 2), ("model", 0), ("a2", 1)):
        engine.add(rid, [1, 2], adapter=adapter)
    engine.turn()
    assert [item.rid for item in engine.plans[0].items] == ["a", "model", "a2"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_no_request_waits_for_a_prefix_of_another_adapter(policy: str) -> None:
    """Of two that share an uncached prefix the second goes last; other adapters share nothing."""
    engine = EngineInATest(policy=policy, max_loras_per_batch=2, chunk=None, max_prefill_tokens=1000)
    for rid, adapter in (("a", 1), ("a2", 1), ("b", 2)):
        engine.add(rid, list(range(40)), adapter=adapter)
    engine.turn()
    assert [item.rid for item in engine.plans[0].items] == ["a", "b", "a2"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_no_request_waits_for_a_prefix_of_another_namespace(policy: str) -> None:
    engine = EngineInATest(policy=policy, chunk=None, max_prefill_tokens=1000, num_pages=200)
    for rid, namespace in (("a", ("a",)), ("a2", ("a",)), ("b", ("b",))):
        engine.add(rid, list(range(200)), namespace=namespace)
    engine.turn()
    assert {item.rid for item in engine.plans[0].items} == {"a", "b"}


def test_no_request_starves_while_others_keep_coming() -> None:
    engine = EngineInATest(max_loras_per_batch=1, max_running=2, lora_drain_wait_s=20.0)
    for turn in range(200):
        if turn % 4 == 0:
            engine.add(f"busy-{turn}", [turn, 1], adapter=1, max_new_tokens=8)
        if turn == 10:
            engine.add("rare", [7, 7], adapter=2, max_new_tokens=3)
        engine.turn()
        engine.now_s += 1.0
        if "rare" in engine.finish:
            break
    assert engine.finish["rare"].kind == "length" and engine.now_s > 20.0
    assert engine.tokens["rare"] == expected_tokens([7, 7], 3, adapter=2)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    places=st.integers(1, 3),
    num_pages=st.integers(12, 40),
    mixed=st.booleans(),
    policy=st.sampled_from(POLICIES),
    wait_s=st.sampled_from([None, 5.0]),
)
def test_each_adapter_sees_its_own_kv_only_in_any_batch(
    seed: int, depth: int, places: int, num_pages: int, mixed: bool, policy: str, wait_s: float | None
) -> None:
    """Shared prompts, tiny pools (retractions, evictions), adapters that come and go: `check()` bounds every batch."""
    rng = random.Random(seed)
    engine = EngineInATest(
        depth=depth,
        num_pages=num_pages,
        max_running=4,
        chunk=8,
        mixed_chunk=mixed,
        policy=policy,
        max_loras_per_batch=places,
        lora_drain_wait_s=wait_s,
    )
    asked = {}
    for i in range(14):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6][: rng.randint(1, 8)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        asked[f"r{i}"] = prompt, rng.randint(1, 12), rng.randint(0, 4)
        engine.add(f"r{i}", prompt, max_new_tokens=asked[f"r{i}"][1], adapter=asked[f"r{i}"][2])
        for _ in range(rng.randint(0, 3)):
            engine.turn()
            engine.now_s += 1.0
        if rng.random() < 0.3:
            engine.scheduler.memory.cache.forget(str(rng.randint(1, 4)))
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, n, adapter=a) for rid, (p, n, a) in asked.items()}
    for plan in engine.plans:
        assert len({asked[item.rid][2] for item in plan.items} - {0}) <= places


def test_a_request_with_an_adapter_resumes_here() -> None:
    """A recompute request to a prefill worker names no adapter."""
    engine = EngineInATest(num_pages=8, max_loras_per_batch=1, resume_elsewhere=True, clip=0)
    for rid in ("a", "b"):
        engine.add(rid, [ord(rid)] * 4, adapter=1, max_new_tokens=20)
    engine.run()
    assert engine.scheduler.counters.retractions > 0 and not engine.scheduler.stages.newly_retracted
    assert engine.tokens == {rid: expected_tokens([ord(rid)] * 4, 20, adapter=1) for rid in ("a", "b")}
