"""Recurrent states: where prompts are cut, what a later request begins from, and which slots go when they are short."""

import pytest

from engine.config import EngineConfig
from engine.core.mem_cache.state_slots import StateSlots
from engine.flags.resolve import limits
from engine.recurrent import check_recurrent, cut_on_grid, with_states
from service.flags import ConfigError
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.core.mem_cache.tiers_in_a_test import identity

PROMPT = list(range(1, 22))  # 21 tokens: the last length on the grid is 16


def engine_of(**setup: object) -> EngineInATest:
    return EngineInATest(**{"state_slots": 6, "grid": 8, "chunk": 32, "num_pages": 64, **setup})  # type: ignore[arg-type]


def answer(engine: EngineInATest, rid: str, prompt: list[int]) -> int:
    """Run a request to its end; return how many of its tokens came from the cache."""
    request = engine.add(rid, prompt, max_new_tokens=3)
    while engine.turn():
        pass
    assert engine.tokens[rid] == expected_tokens(prompt, 3)
    return request.stats.cached_tokens


def parts_of(engine: EngineInATest, rid: str) -> list[tuple[int, int]]:
    return [
        (item.start, item.kv_len) for plan in engine.plans for item in plan.items if item.rid == rid and item.extend
    ]


def test_a_prompt_is_cut_where_its_state_is_kept() -> None:
    engine = engine_of()
    assert answer(engine, "first", PROMPT) == 0 and parts_of(engine, "first") == [(0, 16), (16, 21)]
    assert answer(engine, "again", PROMPT) == 16 and parts_of(engine, "again") == [(16, 21)]
    assert answer(engine, "longer", [*PROMPT, 30, 31, 32, 33]) == 16
    assert answer(engine, "shorter", PROMPT[:16]) == 0, "no state is kept before its last token"


def test_a_short_prompt_is_not_cut() -> None:
    engine = engine_of()
    answer(engine, "short", PROMPT[:8])
    assert parts_of(engine, "short") == [(0, 8)] and not any(plan.snapshots for plan in engine.plans)


def test_a_state_is_kept_where_prompts_part() -> None:
    """The second one finds pages of 12 tokens and no state; the third begins from the one that the second left."""
    engine = engine_of()
    prompts = [[*PROMPT[:12], *range(at, at + 9)] for at in (60, 70, 80)]
    assert [answer(engine, str(at), prompt) for at, prompt in enumerate(prompts)] == [0, 0, 8]
    assert parts_of(engine, "1") == [(0, 8), (8, 16), (16, 21)] and parts_of(engine, "2") == [(8, 16), (16, 21)]


def test_the_least_recently_used_snapshot_goes() -> None:
    """Two slots: the live one, and room for one snapshot; with one slot the snapshot itself becomes the live state."""
    engine = engine_of(state_slots=2)
    answer(engine, "a", PROMPT)
    answer(engine, "b", PROMPT[::-1])
    assert (answer(engine, "b again", PROMPT[::-1]), answer(engine, "a again", PROMPT)) == (16, 0)
    alone = engine_of(state_slots=1)
    assert (answer(alone, "a", PROMPT), answer(alone, "a again", PROMPT)) == (0, 0)


def test_more_requests_than_slots_wait() -> None:
    engine = engine_of(state_slots=2, radix=False)
    for at in range(5):
        engine.add(str(at), [at + 1, *PROMPT], max_new_tokens=4)
    while engine.turn():
        assert engine.scheduler.num_running <= 2
    assert all(engine.tokens[str(at)] == expected_tokens([at + 1, *PROMPT], 4) for at in range(5))
    assert not any(plan.snapshots for plan in engine.plans), "nothing is kept without a prefix cache"


def test_a_full_page_takes_its_state_along() -> None:
    engine = engine_of(num_pages=12, page_size=4)
    answer(engine, "a", PROMPT)
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None and states.allocator.counts()["cached"] == 1
    answer(engine, "b", list(range(100, 140)))
    engine.scheduler.check()
    assert answer(engine, "a again", PROMPT) == 0


def test_chunks_that_end_off_the_grid_are_refused() -> None:
    config = EngineConfig(model_path="m", page_size=48, chunked_prefill_size=144)
    with pytest.raises(ConfigError, match=r"--chunked-prefill-size 144: .* 192 tokens .*give 192"):
        check_recurrent(config)


def test_the_layout_of_states_is_in_the_name_of_pages() -> None:
    """So a worker with other states finds neither."""
    pages = identity()
    names = [with_states(pages, layout, size) for layout, size in (("", 0), ("4 heads", 64), ("2 heads", 64))]
    assert names[0] == pages and len({name.seed() for name in names}) == 3


def test_chunks_end_on_the_grid() -> None:
    flags = {"page_size": 16, "chunked_prefill_size": 144, "max_prefill_tokens": 16384, "max_running_requests": 4}
    config = EngineConfig(model_path="m", **flags)  # type: ignore[arg-type]
    own = cut_on_grid(limits(config), 64)
    assert (own.chunked_prefill_size, own.part_tokens) == (128, 64)
    assert limits(config).part_tokens == 16


def test_the_next_turn_of_a_chat_begins_in_the_answer() -> None:
    """At 24 of 21 + 12 tokens; of an answer the last snapshot stays."""
    engine = engine_of()
    engine.add("turn", PROMPT, max_new_tokens=12)
    while engine.turn():
        pass
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None and states.allocator.counts()["cached"] == 2, "at 16 and at 32"
    assert answer(engine, "next", [*PROMPT, *engine.tokens["turn"], 50]) == 32
    branch = [*PROMPT, *engine.tokens["turn"][:8], 60, 61]
    assert answer(engine, "branch", branch) == 16, "the one at 24 went when the one at 32 came"
    engine.scheduler.check()


def test_the_last_snapshot_that_may_go_is_the_requests_own() -> None:
    """Where peers write, a snapshot that a request reads stays; the one that it begins from may become its live state."""
    engine = engine_of(state_slots=2, peers_write=True)
    answer(engine, "first", PROMPT)
    beside = PROMPT[:4:-1][:8]  # too short for a snapshot of its own
    engine.add("beside", beside, max_new_tokens=6)
    engine.turn()
    assert answer(engine, "again", PROMPT) == 16, "in the slot of the snapshot itself"
    assert engine.tokens["beside"] == expected_tokens(beside, 6)
    engine.scheduler.check()


def test_what_another_request_reads_stays_where_peers_write() -> None:
    """The copy from the snapshot is in flight: the slot must not go to one that a peer writes at once."""
    engine = engine_of(state_slots=3, peers_write=True, depth=2)
    answer(engine, "first", PROMPT)
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None and states.num_available == 3
    request = engine.add("again", [*PROMPT, 40], max_new_tokens=30)
    engine.turn()
    assert request.recurrent.slot and states.num_available == 1, (
        "one slot is its own, one is the snapshot that it reads"
    )
    while engine.turn():
        engine.scheduler.check()
    assert states.num_available == 3
