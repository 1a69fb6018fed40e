"""Graphs of drafters: which, and (by the interpreter, in a process of its own) that they give what passes launched one by one give."""

from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.device.graphs import DRAFT_GRAPH_BYTES, GRAPH_BYTES, LOGIT_BYTES, graph_bytes
from engine.executor.graphs import graph_sizes
from engine.model_files.model_config import DEFAULT_MODEL_PATH, load_model_config
from engine.speculative.draft_graphs import DraftSizes
from tests.attention.triton.interpreted import TIMEOUT_S, run_interpreted

SIZES = DraftSizes(requests=[1, 2], rows=[1, 2, 4], passes=4, topk=1, request_rows=5)


@pytest.mark.parametrize(
    ("passes", "counts"), [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5]), (12, [1, 2, 3, 4, 8, 12])]
)
def test_few_passes_have_graphs_of_their_own(passes: int, counts: list[int]) -> None:
    assert replace(SIZES, passes=passes).counts == counts


def test_chains_and_trees_have_graphs() -> None:
    assert (SIZES.widths, SIZES.num_graphs) == ([1], 2 * 4 + 3)
    trees = replace(SIZES, topk=3)
    assert (trees.widths, trees.num_graphs) == ([1, 3], 2 * 2 * 4 + 3)


@pytest.mark.parametrize("topk", [1, 2])
def test_the_reserve_for_graphs_knows_those_of_drafters(topk: int) -> None:
    model, drafts = (
        load_model_config(DEFAULT_MODEL_PATH),
        {"speculative_num_draft_tokens": 5, "max_running_requests": 8},
    )
    by_model, by_ngrams = (
        graph_bytes(EngineConfig(**drafts, **flags), model, prefills=True, row_bytes=0)
        for flags in (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": topk},
            {"speculative_algorithm": "NGRAM"},
        )
    )
    passes, accepts = 4 * 4 * topk, len(graph_sizes(sizes=(), max_bs=None, max_running=8, rows=5))
    logits = LOGIT_BYTES * 8 * topk * model.vocab_size
    assert by_model - by_ngrams == (passes + accepts) * DRAFT_GRAPH_BYTES + logits


def test_the_reserve_for_graphs_knows_what_recurrent_layers_keep() -> None:
    """Of each row of each size, where grammars draft."""
    model = load_model_config(DEFAULT_MODEL_PATH)
    for backend, rows in (("llguidance", 1 + 2 + 4), ("none", 0)):
        config = EngineConfig(max_running_requests=4, grammar_backend=backend)
        kept, without = (graph_bytes(config, model, prefills=False, row_bytes=n) for n in (1000, 0))
        assert kept - without == 1000 * rows and without > 3 * GRAPH_BYTES


@pytest.mark.timeout(TIMEOUT_S)
def test_recorded_passes_draft_and_keep_the_same() -> None:
    run_interpreted("tests.engine.device.draft_graphs_by_the_interpreter")
