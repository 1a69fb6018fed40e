"""Requests that move from a decode worker to another with their KV: production roles, by literals and by what a story draws."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.core.hash_model import expected_tokens
from tests.disagg.moving_roles import Trio
from tests.disagg.moving_stories import moving_stories, play
from tests.disagg.two_role_stories import TwoRoleStory

PROMPT = list(range(30))


def started(trio: Trio, rng: random.Random, *, tokens: int, rid: str = "r") -> None:
    """Until the client has so many tokens."""
    for _ in range(5000):
        trio.step(rng)
        if len(trio.asks[rid].tokens) >= tokens:
            return
    raise AssertionError("no tokens came")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("beside", [{}, {"state_slots": 8, "grid": 8}, {"window": 6, "more_window_pages": 8}])
def test_its_kv_goes_along_and_prefill_has_no_part_in_it(depth: int, beside: dict[str, object]) -> None:
    """There and back, more than once; every slot that a step reads is checked by the model."""
    trio, rng = (
        Trio(pages=(60, 60, 60), depth=depth, both={**beside, "lag": True}, decode={"peers_write": True}),
        random.Random(depth),
    )
    ask = trio.submit("r", PROMPT, new=60)
    for tokens in (5, 17, 30):
        started(trio, rng, tokens=tokens)
        steps = len(trio.by_name["p"].plans)
        trio.move("r")
        started(trio, rng, tokens=tokens + 8)
        assert len(trio.by_name["p"].plans) == steps
    trio.run(rng)
    assert ask.tokens == expected_tokens(PROMPT, 60) and trio.moved == 3 and not trio.fell_back
    counters = [trio.by_name[name].role.counters() for name in ("a", "b")]
    assert [(c["moved_out"], c["moved_in"]) for c in counters] == [(2, 1), (1, 2)]
    trio.assert_all_back()


def test_what_the_other_has_cached_is_not_sent() -> None:
    trio, rng = Trio(pages=(60, 60, 60)), random.Random(1)
    trio.submit("before", PROMPT, new=4, at="b")
    trio.run(rng)
    trio.submit("r", PROMPT, new=20)
    started(trio, rng, tokens=5)
    trio.move("r")
    trio.run(rng)
    assert trio.wire_of["a", "b"].num_skipped == 8  # of the prompt, and of the same answer
    assert trio.asks["r"].tokens == expected_tokens(PROMPT, 20)
    trio.assert_all_back()


def test_a_request_whose_last_step_is_in_flight_ends_where_it_is() -> None:
    trio, rng = Trio(pages=(60, 60, 60), depth=2), random.Random(1)
    ask = trio.submit("r", PROMPT, new=6)
    started(trio, rng, tokens=5)
    engine = trio.by_name["a"]
    while not (engine.launched and engine.scheduler.stages.live["r.0"].pending == 1):
        engine.turn()
    trio.move("r")
    trio.run(rng)
    assert ask.tokens == expected_tokens(PROMPT, 6) and ask.hop == 0 and not trio.moved
    trio.assert_all_back()


def test_what_does_not_run_moves_without_kv() -> None:
    """One that was retracted, and waits for memory: prefill computes it for the other."""
    trio, rng = Trio(pages=(200, 16, 60), both={"conservativeness": 0.0, "clip": 0}), random.Random(3)
    asks = [trio.submit(f"r{i}", [i, *range(8)], new=24) for i in range(4)]
    moved = None
    for _ in range(5000):
        trio.step(rng)
        waiting = [a for a in asks if a.read and a.name in trio.by_name["a"].scheduler.stages.waiting]
        if waiting:
            moved = waiting[0]
            break
    assert moved is not None
    trio.move(moved.rid)
    assert moved.hop == 0 or moved.at == "b"
    trio.run(rng)
    assert moved.at == "b" and not trio.moved
    assert [a.tokens for a in asks] == [expected_tokens([i, *range(8)], 24) for i in range(4)]
    trio.assert_all_back()


@pytest.mark.parametrize("when", ["before its pages are given", "while its pages land"])
def test_a_move_that_fails_leaves_nothing_behind_and_the_rest_goes_through_prefill(when: str) -> None:
    trio, rng = Trio(pages=(60, 60, 60)), random.Random(2)
    ask = trio.submit("r", PROMPT, new=20)
    started(trio, rng, tokens=5)
    trio.move("r")
    while ask.hop == 0:
        trio.step(rng)
    handovers = trio.by_name["b"].role.incoming.transfers  # type: ignore[union-attr]
    if when.startswith("while"):
        while not trio.wire_of["a", "b"].copied:
            trio.step(rng)
    handovers["r.1"].receiver.abort("the network is cut")
    trio.run(rng)
    assert ask.tokens == expected_tokens(PROMPT, 20) and trio.fell_back == 1
    assert trio.by_name["a"].role.counters()["moves_failed"] == 1
    trio.assert_all_back()


def test_whatever_happens_answers_are_right_and_memory_returns() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(moving_stories())
    def drive(story: TwoRoleStory) -> None:
        seen.update(play(story))

    drive()
    least = {"moved": 50, "moved_in": 20, "fell_back": 5, "states": 5, "windows": 20, "ends": 200, "whole_moved": 5}
    assert all(seen[kind] >= count for kind, count in least.items()), seen
