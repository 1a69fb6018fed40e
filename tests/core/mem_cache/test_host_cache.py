"""Host tier: what each policy copies and when, what comes back, and that any load under tiny pools reads right KV."""

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.mem_cache.host_cache import WRITE_POLICIES
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.tiers_in_a_test import TieredEngine, identity

PROMPT = list(range(13))  # three whole pages and a token


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def copied(engine: TieredEngine) -> int:
    return engine.host.counted["hicache_saved_pages"]


def pinned(engine: TieredEngine) -> list[int]:
    return [page for page in range(engine.host.pages.num_pages) if engine.host.pages.is_pinned(page)]


def test_write_through_copies_a_page_once_when_it_is_computed() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8)
    engine.answer("a", PROMPT, max_new_tokens=2)
    assert copied(engine) == 3
    engine.answer("b", PROMPT, max_new_tokens=2)
    assert copied(engine) == 3


def test_selective_copies_what_a_second_request_reads() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, write_policy="write_through_selective")
    engine.answer("a", PROMPT, max_new_tokens=2)
    assert copied(engine) == 0
    engine.answer("b", [*PROMPT[:8], 40, 41, 42, 43, 44], max_new_tokens=2)
    assert copied(engine) == 2  # the shared pages alone


def test_write_back_copies_what_is_evicted() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, write_policy="write_back")
    engine.answer("a", PROMPT, max_new_tokens=2)
    assert copied(engine) == 0
    engine.push_out()
    assert copied(engine) == 3


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_an_evicted_prefix_comes_back_instead_of_being_computed(policy: str) -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, write_policy=policy)
    engine.answer("a", PROMPT, max_new_tokens=2)
    engine.push_out()
    before = len(engine.plans)
    assert engine.answer("b", PROMPT, max_new_tokens=2) == expected_tokens(PROMPT, 2)
    plan = engine.plans[before]
    assert len(plan.from_host) == 3 and [(i.start, i.q_len) for i in plan.items] == [(12, 1)]
    assert engine.outputs["b"][0].cached_tokens == 12
    assert {k: v for k, v in engine.host.counted.items() if k.endswith("hit_tokens") and v} == {
        "hicache_host_hit_tokens": 12
    }


def test_two_requests_of_one_step_load_a_prefix_once() -> None:
    engine = TieredEngine(host_pages=40, num_pages=16)
    engine.answer("a", PROMPT, max_new_tokens=2)
    engine.push_out()
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.add("c", PROMPT, max_new_tokens=2)
    before = len(engine.plans)
    engine.run()
    assert len(engine.plans[before].items) == 2 and len(engine.plans[before].from_host) == 3
    assert engine.tokens["b"] == engine.tokens["c"] == expected_tokens(PROMPT, 2)


def test_kv_of_an_adapter_comes_back_to_that_adapter_alone() -> None:
    engine = TieredEngine(host_pages=40, num_pages=8, max_loras_per_batch=2)
    for adapter in (0, 1, 2):
        engine.answer(f"first {adapter}", PROMPT, max_new_tokens=2, adapter=adapter)
    engine.push_out()
    assert copied(engine) >= 9
    for adapter in (2, 0, 1):
        assert engine.answer(f"{adapter}", PROMPT, max_new_tokens=2, adapter=adapter) == expected_tokens(
            PROMPT, 2, adapter=adapter
        )
        assert engine.outputs[f"{adapter}"][0].cached_tokens == 12


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from([(), ("a",), ("a", "b"), ("ab",)]), st.integers(0, 1), st.integers(1, 17)),
        min_size=2,
        max_size=14,
    ),
    write_policy=st.sampled_from(WRITE_POLICIES),
)
def test_tenants_share_no_page_on_any_tier(asked: list[tuple[tuple[str, ...], int, int]], write_policy: str) -> None:
    """What a request finds on device, host or disk is what earlier requests of its own namespace have left there."""
    engine = TieredEngine(host_pages=6, num_pages=8, disk_pages=12, write_policy=write_policy)
    left: dict[tuple[str, ...], list[list[int]]] = {}
    for i, (namespace, family, length) in enumerate(asked):
        prompt = [family * 7 + k for k in range(length)]
        request = engine.add(f"{i}", prompt, max_new_tokens=2, namespace=namespace)
        engine.disk_turn()
        engine.run()
        assert engine.tokens[f"{i}"] == expected_tokens(prompt, 2)
        known = max((common(prompt[:-1], other) for other in left.get(namespace, [])), default=0)
        assert engine.outputs[f"{i}"][0].cached_tokens <= known // 4 * 4
        left.setdefault(namespace, []).append(prompt + request.output_ids)
        engine.disk_turn()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_tenant_finds_its_own_prefix(place: str) -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, disk_pages=100)
    engine.answer("a", PROMPT, max_new_tokens=2, namespace=("a",))
    engine.disk_turn()
    if place == "host":
        engine.push_out()
    if place == "disk":
        engine.scheduler.forget_prefixes()
    for rid, namespace, cached in (("b", ("b",), 0), ("plain", (), 0), ("again", ("a",), 12)):
        engine.add(rid, PROMPT, max_new_tokens=2, namespace=namespace)
        engine.disk_turn()
        engine.run()
        assert engine.outputs[rid][0].cached_tokens == cached


def test_a_request_that_leaves_no_kv_behind_reads_the_host_and_leaves_none() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8)
    engine.answer("a", PROMPT, max_new_tokens=2)
    engine.scheduler.memory.cache.flush()
    request = engine.add("b", PROMPT, max_new_tokens=2)
    request.keep_kv = False
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 12 and engine.tokens["b"] == expected_tokens(PROMPT, 2)
    assert engine.scheduler.memory.cache.num_pages == 0 and pinned(engine) == []


def test_a_full_host_forgets_the_ends_of_chains_first() -> None:
    engine = TieredEngine(host_pages=4, num_pages=8)
    engine.answer("a", PROMPT, max_new_tokens=1)
    engine.answer("b", [30, *PROMPT], max_new_tokens=1)  # three pages, one is free: two of a's go
    engine.scheduler.memory.cache.flush()
    engine.answer("c", PROMPT, max_new_tokens=1)
    assert engine.outputs["c"][0].cached_tokens == 4


def test_other_weights_find_nothing() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, disk_pages=100)
    engine.answer("a", PROMPT, max_new_tokens=2)
    engine.disk_turn()
    engine.scheduler.forget_prefixes()
    engine.host.use_identity(identity("w1"))
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.disk_turn()
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 0 and len(engine.files) == 3
    engine.scheduler.forget_prefixes()
    engine.host.use_identity(identity("w0"))
    engine.add("c", PROMPT, max_new_tokens=2)
    engine.disk_turn()
    engine.run()
    assert engine.outputs["c"][0].cached_tokens == 12, "the first weights' files are still right"


def test_a_flush_empties_host_and_disk_even_while_files_are_written() -> None:
    engine = TieredEngine(host_pages=16, num_pages=8, disk_pages=100)
    engine.answer("a", PROMPT, max_new_tokens=2)
    assert engine.work, "three files wait to be written"
    engine.disk_turn(1)
    assert engine.scheduler.flush_cache()
    engine.disk_turn()
    engine.disk_turn()
    assert engine.files == {} and engine.host.storage is not None and engine.host.storage.index.num_bytes == 0
    assert engine.host.pages.num_named == 0 and pinned(engine) == []
    engine.answer("b", PROMPT, max_new_tokens=2)
    assert engine.outputs["b"][0].cached_tokens == 0


def test_a_read_that_ends_after_a_flush_is_dropped() -> None:
    engine = restarted(written())
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.abort("b")
    engine.take_work()
    reads = list(engine.work)
    assert len(reads) == 3 and engine.scheduler.flush_cache()
    engine.disk_turn()
    assert engine.files == {} and engine.host.pages.num_named == 0 and pinned(engine) == []


def restarted(engine: TieredEngine, **flags: object) -> TieredEngine:
    engine.disk_turn()
    return TieredEngine(host_pages=16, num_pages=8, disk_pages=100, files=engine.files, **flags)  # type: ignore[arg-type]


def written() -> TieredEngine:
    engine = TieredEngine(host_pages=16, num_pages=8, disk_pages=100)
    engine.answer("a", PROMPT, max_new_tokens=2)
    return engine


def test_best_effort_uses_what_has_been_read_when_the_request_is_judged() -> None:
    engine = restarted(written())
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.disk_turn(2)
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 8 and engine.tokens["b"] == expected_tokens(PROMPT, 2)
    assert engine.host.counted["hicache_disk_hit_tokens"] == 8
    engine.disk_turn()  # the third page has been computed meanwhile: what was read is not needed


def test_wait_complete_waits_and_lets_others_pass() -> None:
    engine = restarted(written(), prefetch_policy="wait_complete")
    engine.now_s = 1e6
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.answer("c", [40, 41], max_new_tokens=2)
    assert engine.tokens == {"c": expected_tokens([40, 41], 2)}
    engine.disk_turn(2)
    engine.run()
    assert "b" not in engine.tokens
    engine.disk_turn(1)
    engine.run()
    assert engine.tokens["b"] == expected_tokens(PROMPT, 2)
    assert engine.outputs["b"][0].cached_tokens == 12


def test_timeout_waits_so_long_and_no_longer() -> None:
    engine = restarted(written(), prefetch_policy="timeout", timeout_s=2.0)
    engine.now_s = 10.0
    engine.add("b", PROMPT, max_new_tokens=2)
    engine.disk_turn(1)
    engine.run()
    engine.now_s = 11.9
    engine.run()
    assert engine.tokens == {}
    engine.now_s = 12.0
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 4


def test_what_was_read_for_one_that_waits_is_not_lost_to_reads_for_later_ones() -> None:
    files = restarted(written()).files
    second = [30, *PROMPT]
    engine = TieredEngine(host_pages=40, num_pages=8, disk_pages=100, files=files)
    engine.answer("x", second, max_new_tokens=1)
    engine.disk_turn()
    small = TieredEngine(host_pages=4, num_pages=8, disk_pages=100, files=files)
    for rid, prompt in (("b", PROMPT), ("c", second), ("d", PROMPT)):
        small.add(rid, prompt, max_new_tokens=2)
        small.disk_turn()
    small.run()
    assert small.outputs["b"][0].cached_tokens == 8, "half of the host at once"
    assert small.tokens["c"] == expected_tokens(second, 2)


LOADS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 26), st.integers(1, 6)), min_size=2, max_size=14)


DISK_DOES = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    loads=LOADS,
    disk_does=DISK_DOES,
    aborts=st.booleans(),
    setup=st.fixed_dictionaries(
        dict(
            depth=st.integers(1, 2),
            num_pages=st.integers(9, 14),
            host_pages=st.integers(1, 16),
            disk_pages=st.sampled_from([0, 1, 5, 40]),
            write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
            prefetch_policy=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
            chunk=st.sampled_from([4, 16]),
            max_running=st.sampled_from([1, 2, 8]),
            ahead_pages=st.sampled_from([0, 1, 3, 100]),
        )
    ),
)
def test_any_load_reads_right_kv_from_any_tier(
    loads: list[tuple[int, int, int]], disk_does: list[int], aborts: bool, setup: dict[str, Any]
) -> None:
    """Pools so small that prefixes come and go all the time; what tests/core/mem_cache/tiers_in_a_test.py verifies is every slot."""
    engine = TieredEngine(conservativeness=0.0, **setup)
    prompts = {f"r{i}": [family, *range(length)] for i, (family, length, _) in enumerate(loads)}
    for turn in range(3000):
        if turn % 2 == 0 and turn // 2 < len(loads):
            rid = f"r{turn // 2}"
            engine.add(rid, prompts[rid], max_new_tokens=loads[turn // 2][2])
        if aborts and turn % 7 == 3:
            engine.abort(f"r{turn // 7}")
        engine.now_s += 0.1
        engine.disk_turn(disk_does[turn % len(disk_does)])
        if not engine.turn() and turn // 2 > len(loads):
            engine.disk_turn()
            if engine.scheduler.idle:
                break
    assert engine.scheduler.idle
    for i, (rid, prompt) in enumerate(prompts.items()):
        want = expected_tokens(prompt, loads[i][2])
        assert engine.tokens[rid] == (want if engine.finish[rid].kind == "length" else want[: len(engine.tokens[rid])])
    while engine.turn():
        pass
    engine.disk_turn()
    engine.disk_turn()
    assert pinned(engine) == [], "a pin is left when nothing is under way"


@settings(max_examples=60, deadline=None)
@given(
    loads=LOADS,
    disk_does=DISK_DOES,
    every=st.integers(2, 9),
    flush=st.booleans(),
    setup=st.fixed_dictionaries(
        dict(
            depth=st.integers(1, 2),
            host_pages=st.integers(1, 16),
            disk_pages=st.sampled_from([5, 40]),
            write_policy=st.sampled_from(["write_through", "write_back"]),
            max_running=st.sampled_from([1, 8]),
            ahead_pages=st.sampled_from([0, 2, 100]),
        )
    ),
)
def test_weights_that_change_at_any_moment_never_read_kv_of_others(
    loads: list[tuple[int, int, int]], disk_does: list[int], every: int, flush: bool, setup: dict[str, Any]
) -> None:
    """Two sets of weights in turns, whose KV differs, while files are read and written; every slot is verified."""
    engine = TieredEngine(num_pages=12, **setup)
    for turn in range(3000):
        if turn % 2 == 0 and turn // 2 < len(loads):
            family, length, new = loads[turn // 2]
            engine.add(f"r{turn // 2}", [family, *range(length)], max_new_tokens=new)
        engine.disk_turn(disk_does[turn % len(disk_does)])
        if turn % every == every - 1 and turn < 8 * len(loads):
            while engine.launched:
                engine.collect()
            engine.scheduler.retract_all()
            engine.scheduler.memory.forget_prefixes(files=flush)
            engine.model.weights = 1 - engine.model.weights
            engine.host.use_identity(identity(f"w{engine.model.weights}"))
        if not engine.turn() and turn > 8 * len(loads):
            break
    assert engine.scheduler.idle and len(engine.finish) == len(loads)
