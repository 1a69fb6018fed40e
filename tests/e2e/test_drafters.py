"""Drafters through two workers: the first step behind a hand-over accepts as many as a unified worker does."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import System, run, unified
from tests.e2e.workload import recall_prompt
from tests.engine.drafters import always
from tools.recall.oracle import continuation

NEW = 40
RNG = random.Random(5)
ASKED = [(f"r{i}", recall_prompt(RNG, 30 + i), NEW) for i in range(4)]  # some prompts end with a page, some within
RIGHT = {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in ASKED}
FLAGS: dict[str, Any] = {"chunked_prefill_size": 32, "max_total_tokens": 8192, "num_threads": 1}
TIGHT = {"max_total_tokens": 400, "schedule_conservativeness": 0.0}  # what runs is retracted
STANDALONE: dict[str, Any] = {
    "speculative_algorithm": "STANDALONE",
    "speculative_draft_model_path": WIDE_MODEL_PATH,
    "speculative_num_steps": 4,
}


@dataclass(frozen=True)
class Steps:
    """Of the worker that decodes: drafts in them, and how many were right: each saves a request a step."""

    drafts: int
    accepted: int


def decode_all(system: System) -> tuple[dict[str, list[int]], Steps]:
    scheduler = system.workers[-1].parts.scheduler
    always(scheduler)
    tokens = run(system, ASKED, together=len(ASKED), turns_between=6)
    counters = scheduler.counters
    return tokens, Steps(counters.drafts, counters.accepted_drafts)


@pytest.fixture(scope="module")
def alone() -> Steps:
    with unified(WIDE_MODEL_PATH, **FLAGS, **STANDALONE) as system:
        tokens, steps = decode_all(system)
    assert tokens == RIGHT and steps.accepted == steps.drafts
    return steps


CELLS = {
    "NIXL, layer by layer": Cell("nixl", (1, 1), (1, 1), "on", "recompute"),
    "Mooncake": Cell("mooncake", (1, 1), (1, 1), "off", "recompute"),
    "TP 2": Cell("nixl", (1, 1), (2, 1), "on", "recompute"),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_handed_over_prompt_is_drafted_as_well_as_ones_own(name: str, alone: Steps) -> None:
    flags = {**FLAGS, **STANDALONE, "kv_units": 2}
    with pair_of(CELLS[name], flags=flags, decode={}) as pair:
        tokens, steps = decode_all(pair)
    assert tokens == RIGHT
    assert steps == alone
