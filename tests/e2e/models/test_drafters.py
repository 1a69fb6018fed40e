"""Drafters through two workers: the first step behind a hand-over accepts as many as a unified worker's, whatever crosses how.

The drafters are right (tests/models/recall_drafters.py), and read the model's hidden states: the first draft needs the one before the last token
of the prompt, which lies in the tail of a page.
"""

import random
from functools import cache
from typing import Any

import pytest

from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.e2e.ranks.test_rank_pairs import Cell, pair_of
from tests.e2e.two_engines import System, disaggregated, run, unified
from tests.e2e.workload import recall_prompt
from tests.engine.drafts.drafters import Fared, always, fared
from tests.engine.drafts.test_draft_trees import all_of_a_tree
from tests.models.recall_drafters import build
from tools.recall.build import build as build_model
from tools.recall.oracle import continuation

NEW = 40
RNG = random.Random(5)
ASKED = [(f"r{i}", recall_prompt(RNG, 30 + i), NEW) for i in range(4)]  # some prompts end with a page, some within
RIGHT = {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in ASKED}
FLAGS: dict[str, Any] = {"chunked_prefill_size": 32, "max_total_tokens": 8192, "num_threads": 1, "kv_units": 2}
TIGHT = {"max_total_tokens": 400, "schedule_conservativeness": 0.0}  # what runs is retracted


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafters")
    build_model("recall-hybrid", folder / "NEXTN")
    own = {kind: build(kind, folder / kind) for kind in ("EAGLE", "EAGLE3")}
    return {"STANDALONE": WIDE_MODEL_PATH, "NEXTN": str(folder / "NEXTN"), **own}


def model_of(kind: str, path: str) -> str:
    """NEXTN's is a hybrid, which brings the layer that drafts."""
    return path if kind == "NEXTN" else WIDE_MODEL_PATH


def by(kind: str, paths: dict[str, str]) -> dict[str, Any]:
    if kind == "NEXTN":
        return {"speculative_algorithm": kind, "chunked_prefill_size": 64}
    return {"speculative_algorithm": kind, "speculative_draft_model_path": paths[kind]}


def decode_all(system: System) -> tuple[dict[str, list[int]], Fared]:
    decoder = system.workers[-1]
    always(decoder.parts.scheduler)
    tokens = run(system, ASKED, together=len(ASKED), turns_between=6)
    return tokens, fared(decoder)


@cache
def alone(kind: str, path: str) -> Fared:
    """How one worker fares alone, where all drafts are right."""
    with unified(model_of(kind, path), **{**FLAGS, **by(kind, {kind: path})}) as system:
        tokens, how = decode_all(system)
    # 39 tokens behind the first: 7 steps of 5, one of 4
    assert tokens == RIGHT and how.accepted == how.drafts == 4 * 31
    return how


CELLS = [  # `make test`: each kind of drafter once, and each transfer engine with and without ranks
    ("EAGLE", Cell("nixl", (1, 1), (1, 1), "on", "recompute")),
    ("EAGLE3", Cell("mooncake", (2, 1), (1, 1), "off", "recompute")),
    ("STANDALONE", Cell("nixl", (2, 1), (2, 1), "on", "recompute")),
    ("NEXTN", Cell("mooncake", (1, 1), (1, 1), "off", "recompute")),
    pytest.param("EAGLE", Cell("mooncake", (2, 1), (1, 1), "off", "recompute"), marks=pytest.mark.slow),
    pytest.param("EAGLE3", Cell("nixl", (1, 1), (2, 1), "on", "recompute"), marks=pytest.mark.slow),
    pytest.param("NEXTN", Cell("nixl", (1, 1), (1, 1), "on", "recompute"), marks=pytest.mark.slow),
    pytest.param("NEXTN", Cell("nixl", (2, 1), (2, 1), "off", "recompute"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "cell"), CELLS)
def test_a_handed_over_prompt_is_drafted_as_well_as_ones_own(kind: str, cell: Cell, paths: dict[str, str]) -> None:
    path = model_of(kind, paths[kind])
    with pair_of(cell, path, flags={**FLAGS, **by(kind, paths)}, decode={}) as pair:
        tokens, how = decode_all(pair)
    assert tokens == RIGHT
    assert (how.drafts, how.accepted) == (alone(kind, paths[kind]).drafts, alone(kind, paths[kind]).accepted)


OVERLAPPED = {"stream": "threaded", "stream_delay_s": 0.001}


@pytest.mark.parametrize(
    ("kind", "cell", "decode"),
    [
        ("EAGLE", Cell("nixl", (1, 1), (2, 1), "on", "recompute"), {}),
        ("NEXTN", Cell("mooncake", (1, 1), (1, 1), "off", "recompute"), {}),
        ("STANDALONE", Cell("nixl", (1, 1), (1, 1), "off", "prefill"), TIGHT),
    ],
)
def test_overlapped_steps_behind_a_hand_over_begin_where_they_should(
    kind: str, cell: Cell, decode: dict[str, Any], paths: dict[str, str]
) -> None:
    """A request comes, and comes back, while steps of others are in flight that the host has not seen."""
    path, flags = model_of(kind, paths[kind]), {**FLAGS, **by(kind, paths), **OVERLAPPED}
    with pair_of(cell, path, flags=flags, decode=decode) as pair:
        tokens, how = decode_all(pair)
        decoder = pair.workers[-1]
    assert tokens == RIGHT and how.accepted == how.drafts > 50
    assert decoder.seen.overlapped > how.passes > 0
    assert decode == {} or decoder.parts.scheduler.counters.retractions > 0


@pytest.mark.parametrize(("backend", "tp_size"), [("nixl", 2), pytest.param("mooncake", 1, marks=pytest.mark.slow)])
def test_trees_behind_a_hand_over_are_as_right(backend: str, tp_size: int, paths: dict[str, str]) -> None:
    trees = {**by("EAGLE", paths), "speculative_eagle_topk": 2}
    with unified(WIDE_MODEL_PATH, **FLAGS, **trees) as system:
        all_of_a_tree(system.workers[-1].parts.scheduler)
        _, own = decode_all(system)
    cell = Cell(backend, (1, 1), (tp_size, 1), "on", "recompute")
    with pair_of(cell, flags={**FLAGS, **trees}, decode={}) as pair:
        all_of_a_tree(pair.workers[-1].parts.scheduler)
        tokens, how = decode_all(pair)
    assert tokens == RIGHT and (how.drafts, how.accepted) == (own.drafts, own.accepted)
    assert 0 < 2 * how.accepted < how.drafts


@pytest.mark.parametrize(("backend", "backup"), [("nixl", "host"), ("mooncake", "prefill"), ("nixl", "recompute")])
def test_a_retracted_request_is_drafted_as_well_as_before(backend: str, backup: str, paths: dict[str, str]) -> None:
    """Its pages come back from the host, from a prefill worker, or are computed again: with what the drafter keeps."""
    cell = Cell(backend, (1, 1), (1, 1), "off", backup)
    with pair_of(cell, flags={**FLAGS, **by("EAGLE", paths)}, decode=TIGHT) as pair:
        tokens, how = decode_all(pair)
        assert pair.workers[-1].parts.scheduler.counters.retractions > 0
    assert tokens == RIGHT and how.accepted == how.drafts > 0


@pytest.mark.parametrize("kind", ["EAGLE3", None])
def test_a_pair_with_other_drafters_is_refused_with_both_names(kind: str | None, paths: dict[str, str]) -> None:
    other = {"speculative_algorithm": None, "speculative_draft_model_path": None} if kind is None else by(kind, paths)
    with disaggregated(WIDE_MODEL_PATH, decode=other, **FLAGS, **by("EAGLE", paths)) as pair:
        rid, prompt, new = ASKED[0]
        pair.submit(rid, prompt, new=new)
        while not pair.workers[-1].finish:
            for worker in pair.workers:
                worker.turn()
        why = pair.workers[-1].aborted[rid]
        assert pair.conflict is not None and pair.conflict in why, "a router knows before"
    theirs = "drafts by EAGLE3 of 1,2,3 LlamaForCausalLM/L1" if kind else "/kv4x128"
    assert "signature differs" in why and "drafts by EAGLE LlamaForCausalLM/L1" in why and theirs in why
