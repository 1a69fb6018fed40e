"""Prefill gets the pages of earlier turns from a decode worker of another shape: each of its ranks, by a real transfer engine."""

import json

import pytest

from disagg.features.prefix_fetching import FetchPolicy, PrefixFetches
from engine.messages import PrefixSource
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.disagg.two_roles import part_of
from tests.e2e.ranks.test_rank_pairs import FLAGS, Cell, pair_of
from tests.e2e.turns import conversation
from tests.e2e.two_engines import System, turning

CELLS = [
    pytest.param(Cell("nixl", (2, 1), (1, 1), "off", "recompute"), id="TP 2 and one"),
    pytest.param(Cell("mooncake", (1, 1), (1, 2), "off", "recompute"), id="one and PP 2", marks=pytest.mark.slow),
    pytest.param(Cell("nixl", (1, 2), (2, 1), "on", "host"), id="PP 2 and TP 2", marks=pytest.mark.slow),
]
PAGE = 16


@pytest.mark.parametrize("cell", CELLS)
def test_answers_are_found_again_whatever_the_shapes(cell: Cell) -> None:
    flags = {**FLAGS, "page_size": PAGE}
    with pair_of(cell, WIDE_MODEL_PATH, flags=flags, decode={}, disagg={"prefix_fetch": True}) as pair:
        known, counted = 0, pair.workers[0].parts.scheduler.counters
        for i, turn in enumerate(conversation(3, first=90, words=10, new=37, circle=40)):
            before = counted.cached_tokens
            assert say(pair, f"t{i}", turn.prompt, new=len(turn.answer), known=known) == turn.answer
            assert counted.cached_tokens - before == known // PAGE * PAGE
            known = turn.known
        fetched = pair.workers[0].role.counters()
        assert fetched["prefix_fetched"] == 2 and not fetched["prefix_fetches_refused"]


def say(pair: System, rid: str, prompt: list[int], *, new: int, known: int) -> list[int]:
    prefill, decode = pair.workers
    part_of(prefill.role, PrefixFetches)._policy = FetchPolicy(token_bytes=1)  # type: ignore[arg-type]  # it fetches what it has not measured
    at = json.loads(decode.role.info()["prefix_source"])
    source = PrefixSource(at["control"], at["incarnation"], known) if known else None
    pair.submit(rid, prompt, new=new, wanted={"prefix_source": source})
    for _ in turning(pair.workers):
        pass
    assert not prefill.aborted and not decode.aborted
    return decode.tokens[rid]
