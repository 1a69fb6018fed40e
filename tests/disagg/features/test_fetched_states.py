"""Recurrent states that come with prefixes of another worker: every interleaving a seed can draw, in one thread."""

import random
from typing import Any

import pytest

from tests.disagg.prefix_roles import PrefixCluster
from tests.disagg.test_prefix_fetch import PREFIX, PROMPT, assert_right, computed

WINDOW = {"window": 10, "more_window_pages": 40}
STATES = {"state_slots": 6, "grid": 8, "peers_write": True}
LAST = (len(PROMPT) - 1) // 8 * 8  # where the source has a state


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_last_window_comes_with_the_prefix(seed: int, depth: int) -> None:
    """The source has more than the router knows, or less."""
    own = {**WINDOW, "depth": depth, "lag": True}
    cluster = PrefixCluster(both=own, of_source=own)
    warm = PROMPT[: (70, 33, 9)[seed % 3]]
    cluster.warm(warm)
    cluster.ask("a", PROMPT, 1, known=8)
    cluster.run(random.Random(seed))
    assert_right(cluster, {"a": PROMPT})
    fetched = min(len(warm), PREFIX) // 4 * 4
    assert cluster.counter("prefix_fetched_tokens") == fetched and computed(cluster) == len(PROMPT) - fetched


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_recurrent_state_comes_with_the_prefix(seed: int, depth: int) -> None:
    own = {**STATES, "depth": depth, "lag": True}
    cluster = PrefixCluster(both=own, of_source=own)
    cluster.warm(PROMPT)
    cluster.ask("a", PROMPT, 1, known=PREFIX)
    cluster.run(random.Random(seed))
    assert_right(cluster, {"a": PROMPT})
    assert cluster.counter("prefix_fetched_tokens") == LAST
    assert computed(cluster) == len(PROMPT) - LAST


FEW: dict[str, dict[str, Any]] = {
    "states": {**STATES, "state_slots": 4},
    "windows": {**WINDOW, "more_window_pages": 2},
    "both": {**STATES, **WINDOW, "state_slots": 4, "more_window_pages": 2},
}


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("seed", range(10))
def test_what_peers_read_stays(seed: int, few: str) -> None:
    """Of few slots or window pages, which other prompts of the source want meanwhile."""
    own = {**FEW[few], "lag": True, "depth": 2}
    cluster = PrefixCluster(pages=(60, 60, 200), both=own, of_source=own)
    rng = random.Random(seed)
    prompts = {f"r{i}": [i % 3, *PROMPT[: 40 + i]] for i in range(9)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        cluster.warm(prompt)
        cluster.ask(rid, prompt, 1 + i, known=len(prompt) // 4 * 4)
        for _ in range(rng.randrange(40)):
            cluster.step(rng)
            if rng.random() < 0.2:
                cluster.source.turn()
    cluster.run(rng)
    assert_right(cluster, prompts)
    assert cluster.counter("prefix_fetched") > 0
