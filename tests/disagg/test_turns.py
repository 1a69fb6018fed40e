"""What a conversation has computed is not computed again: production roles that exchange prefixes, every interleaving a seed can draw."""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.disagg.turn_roles import Turns, TurnStory, play, turn_stories

WORDS = [i * 7 % 50 for i in range(30)]
MORE = [[9, 8, 7, turn] * 3 for turn in range(5)]


def computed(turns: Turns) -> int:
    """Tokens of prompts, anywhere."""
    items = [item for engine in turns.engines for plan in engine.plans for item in plan.items]
    return sum(item.kv_len - item.start for item in items if item.extend)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_three_turns_compute_each_token_once(seed: int, depth: int) -> None:
    """Prefill gets pages of the prompt and of the answer from decode, whose own pages it does not send again."""
    turns, rng = Turns(pages=(200, 200, 200), depth=depth, both={"lag": True}), random.Random(seed)
    turns.say("c", WORDS, new=13)
    turns.until_said(rng)
    for words in MORE[:3]:
        before, skipped = computed(turns), turns.wire_of["p", "a"].num_skipped
        history = len(turns.conversations["c"].tokens) - 1  # the KV of the last one was not needed
        turns.say("c", words, new=13)
        turns.until_said(rng)
        whole = history // 4 * 4
        assert computed(turns) - before == history + 1 + len(words) - whole
        assert turns.wire_of["p", "a"].num_skipped - skipped == whole // 4
    turns.run(rng)
    turns.assert_all_back()


def test_a_fetch_does_not_wait_for_memory_beside_the_request_that_waits_for_it() -> None:
    """There is room for one of both, beside a request that grows."""
    turns, rng = Turns(pages=(200, 200, 30), both={"conservativeness": 0.0, "clip": 0}), random.Random(1)
    turns.say("c", [*WORDS, *WORDS], new=5)
    turns.until_said(rng)
    grows = turns.submit("grows", [1, 2, 3], new=40, at="b")
    while not grows.tokens:
        turns.step(rng)
    turns.say("c", [3], new=2, at="b", whole=True)
    turns.until_said(rng)
    assert turns.by_name["b"].role.counters()["prefix_fetched_tokens"] == 64
    turns.run(rng)
    turns.assert_all_back()


@pytest.mark.parametrize("roomy", [True, False])
def test_whatever_happens_history_is_computed_once_and_events_say_what_is_there(roomy: bool) -> None:
    """While turns move, end early and are retracted; where memory is short, answers are right all the same."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(turn_stories(roomy=roomy))
    def drive(story: TurnStory) -> None:
        seen.update(play(story))

    drive()
    least = {"found": 50, "by_prefill": 15, "by_decode": 8, "moved": 1} | (
        {} if roomy else {"retractions": 2, "removed": 100}
    )
    assert all(seen[kind] >= count for kind, count in least.items()), seen
