"""Workers over one store that loses, delays, lies and answers with stale values: no token is wrong (tools/simulation/stores.py)."""

import random

import pytest

from tools.simulation.stores import Outcome, VirtualClient, VirtualStore, options_of, play

SHORT, LONG = range(1, 9), range(9, 80)


@pytest.mark.parametrize("seeds", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_token_is_wrong(seeds: range) -> None:

    def note(seed: int, outcome: Outcome) -> None:
        assert not outcome.problem, f"seed {seed}: {outcome.problem}"

    total = play(seeds, tell=note)
    assert total["wrong"] == 0 and total["tokens"] > 100 * len(seeds)
    for seen in (
        "tokens from the store",
        "stale or damaged values",
        "bad values refused",
        "failed calls",
        "pauses by a breaker",
        "states read",
    ):
        assert total[seen] > 0, f"nothing of {seen}: the run proves nothing"


def test_nothing_lands_in_the_memory_of_a_process_that_is_gone() -> None:
    store = VirtualStore(options_of(1), random.Random(1))
    gone, other = VirtualClient(store), VirtualClient(store)
    for begin, client in ((1000, gone), (2000, other)):
        client.register_buffer(begin, 100)
        store.late.append((0.5, begin + 50, b"late"))
    gone.close()
    assert [address for _, address, _ in store.late] == [2050]
