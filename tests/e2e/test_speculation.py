"""Speculation through two workers: the tokens of plain decoding in a part of the steps, also after a retraction and between ranks."""

import random
from typing import Any

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import disaggregated, run
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

NEW = 60
RNG = random.Random(5)
ASKED = [(f"r{i}", recall_prompt(RNG, 40), NEW) for i in range(4)]
RIGHT = {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in ASKED}
NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
FLAGS: dict[str, Any] = {"chunked_prefill_size": 32, "max_total_tokens": 8192}
TIGHT = {"max_total_tokens": 464, "schedule_conservativeness": 0.0}  # what runs is retracted


@pytest.mark.parametrize(("backend", "backup"), [("nixl", "host"), ("mooncake", "recompute")])
def test_a_pair_gives_the_tokens_of_plain_decoding(backend: str, backup: str) -> None:
    """The model repeats its prompt, so nearly every draft is right, from the first step after the hand-over on."""
    disagg = {"disaggregation_transfer_backend": backend, "disaggregation_decode_retraction_backup": backup}
    with disaggregated(WIDE_MODEL_PATH, decode={**TIGHT, **NGRAM}, disagg=disagg, **FLAGS) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == RIGHT
        counters = pair.workers[1].parts.scheduler.counters
    assert counters.retractions > 0 and counters.accepted_drafts > 0.8 * counters.drafts
    assert counters.steps < NEW


def test_ranks_of_a_pair_verify_the_same_drafts() -> None:
    cell = Cell("nixl", (1, 1), (2, 1), "on", "host")
    with pair_of(cell, flags={**FLAGS, "num_threads": 1, "kv_units": 2}, decode=NGRAM) as pair:
        assert run(pair, ASKED, together=len(ASKED), turns_between=6) == RIGHT
        counters = pair.workers[1].parts.scheduler.counters
    assert counters.accepted_drafts > 0.8 * counters.drafts > 0 and counters.steps < NEW
