"""Recurrent states below the device: a prefix from the host or the disk ends where a state came with it."""

import random

import pytest

from engine.core.mem_cache.page_allocator import is_state, state_key
from engine.core.mem_cache.state_slots import StateSlots
from tests.core.hash_model import State, expected_tokens
from tests.core.mem_cache.tiers_in_a_test import TieredEngine

PROMPT = list(range(1, 22))  # its states are at 16, where the last chunk begins, and in the answer
POLICIES = ["write_through", "write_through_selective", "write_back"]


def engine_of(**setup: object) -> TieredEngine:
    return TieredEngine(**{"host_pages": 40, "host_states": 8, "state_slots": 3, "num_pages": 16, "chunk": 32, **setup})  # type: ignore[arg-type]


def answer(engine: TieredEngine, rid: str, prompt: list[int], *, new: int = 3) -> list[int]:
    """Run it to its end; return how many of its tokens came from each tier."""
    request = engine.add(rid, prompt, max_new_tokens=new)
    engine.disk_turn()
    while engine.turn() or engine.work:
        engine.disk_turn()
    assert engine.tokens[rid] == expected_tokens(prompt, new)
    return request.stats.cached_by_tier


def push_out(engine: TieredEngine) -> None:
    """Other prompts take the pages and the slots of the device."""
    for at in range(3):
        number = engine.scheduler.counters.requests
        answer(engine, f"other {number}", [30 + at, *(40 + (number + i) % 9 for i in range(40))])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_comes_back_from_the_host(policy: str) -> None:
    engine = engine_of(write_policy=policy)
    for at in range(2):
        answer(engine, f"first {at}", PROMPT)
    push_out(engine)
    assert answer(engine, "again", PROMPT) == [0, 16, 0]
    assert engine.model.host_states, "of it"


def test_a_state_goes_alone_and_comes_back() -> None:
    """Short of slots, the pages stay on the device; they come from the host with the state."""
    engine = engine_of(state_slots=2, num_pages=64, write_policy="write_back")
    answer(engine, "first", PROMPT)
    answer(engine, "other", PROMPT[::-1])
    assert answer(engine, "again", PROMPT) == [0, 16, 0]


def test_the_next_turn_goes_on_from_the_last_state_of_the_answer() -> None:
    engine = engine_of()
    answer(engine, "turn", PROMPT, new=12)
    push_out(engine)
    following = [*PROMPT, *engine.tokens["turn"], 50]
    assert answer(engine, "next", following) == [0, 32, 0]
    states = engine.model.host_states.values()
    assert 24 not in [state.length for state in states], "of an answer the last one alone is copied"


def test_another_worker_reads_the_state_from_the_disk() -> None:
    first = engine_of(disk_pages=40)
    answer(first, "first", PROMPT)
    assert sum(map(is_state, first.files)) == 1
    second = engine_of(disk_pages=40, files=first.files)
    assert answer(second, "again", PROMPT) == [0, 0, 16]


@pytest.mark.parametrize("lost", ["state", "page", "broken state"])
def test_what_lacks_a_part_is_computed(lost: str) -> None:
    first = engine_of(disk_pages=40)
    answer(first, "first", PROMPT)
    (state,) = filter(is_state, first.files)
    assert state[:-1] in first.files and state == state_key(state[:-1])
    second = engine_of(disk_pages=40, files=dict(first.files))
    if lost == "broken state":
        second.broken.add(state)
    else:
        third = {k: v for k, v in first.files.items() if k != (state if lost == "state" else state[:-1])}
        second = engine_of(disk_pages=40, files=third)
    assert answer(second, "again", PROMPT) == [0, 0, 0]


def test_an_earlier_state_serves_where_the_last_is_gone() -> None:
    first = engine_of(disk_pages=60, num_pages=64)
    answer(first, "short", PROMPT[:13])
    answer(first, "long", [*PROMPT, *range(30, 50)])
    states = [key for key in first.files if is_state(key)]
    deepest = max(states, key=lambda key: first.files[key].length)
    assert {first.files[key].length for key in states} >= {8, 40}
    del first.files[deepest]
    second = engine_of(disk_pages=60, num_pages=64, files=first.files)
    assert answer(second, "again", [*PROMPT, *range(30, 50)]) == [0, 0, 8]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("peers_write", [False, True])
def test_no_token_depends_on_where_states_were(policy: str, depth: int, peers_write: bool) -> None:
    draw = random.Random(f"{policy} {depth}")
    trunks = [[draw.randrange(45) for _ in range(40)] for _ in range(4)]
    prompts = [[*trunk[:cut], *(draw.randrange(45) for _ in range(5))] for trunk in trunks for cut in (10, 25, 40)]
    found = [0, 0, 0]
    engine = engine_of(
        write_policy=policy,
        depth=depth,
        peers_write=peers_write,
        host_pages=20,
        host_states=2,
        disk_pages=150,
        state_slots=3,
        num_pages=24,
        prefetch_policy="wait_complete",
    )
    asked = {}
    for number in range(150):
        prompt = draw.choice(prompts)
        asked[f"r{number}"] = engine.add(f"r{number}", prompt, max_new_tokens=draw.randrange(1, 20))
        if draw.random() < 0.1:
            engine.abort(f"r{draw.randrange(number + 1)}")
        for _ in range(draw.randrange(12)):
            engine.turn()
            if draw.random() < 0.5:
                engine.disk_turn(draw.randrange(4))
    while engine.turn() or engine.work:
        engine.disk_turn()
    for rid, request in asked.items():
        tokens = engine.tokens.get(rid, [])
        right = expected_tokens(request.message.input_ids, request.message.sampling.max_new_tokens)
        assert tokens == (right if engine.finish[rid].kind == "length" else right[: len(tokens)])
        found = [a + b for a, b in zip(found, request.stats.cached_by_tier or [0, 0, 0], strict=True)]
    assert all(found) or policy == "write_through_selective", f"tokens by tier: {found}"
    states = engine.scheduler.memory.part(StateSlots)
    assert states is not None and states.allocator.counts()["held"] == 0
    assert all(isinstance(state, State) for state in engine.model.host_states.values())


def test_a_peer_gets_no_slot_whose_copy_is_planned() -> None:
    engine = engine_of(state_slots=4, num_pages=64, peers_write=True)
    engine.add("turn", PROMPT, max_new_tokens=12)
    while "turn" not in engine.finish:
        engine.turn()
    held, tier = engine.scheduler.held, engine.scheduler.lower_tier
    landing = [engine._request(rid, [44, *PROMPT], max_new_tokens=2) for rid in "abcd"]
    assert all(held.adopt(request) is None and held.reserve(request) for request in landing)
    slots = [request.recurrent.slot for request in landing]
    assert [tier.is_settled([], state=slot) for slot in slots] == [True, True, True, False], (
        "of the answer's last state"
    )
    while engine.turn():
        pass
    assert all(tier.is_settled([], state=slot) for slot in slots)
    for request in landing:
        held.drop(request)
    engine.scheduler.check()
