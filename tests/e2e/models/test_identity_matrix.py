"""The shipped model's answers are the oracle's in every cell of

    {depth 1, 2} x {chunked, not} x {mixed, not} x {retracted, not} x {unified, disaggregated over NIXL}

`make test` tries half of the cells, in which any four of the five meet in every way, `make slow-tests` the
others. Every answer is determined by the prompt (recall), so it needs the KV and never a tie. That each
cell really is what it says is read off its steps.
"""

import random
from contextlib import AbstractContextManager
from itertools import compress, product

import pytest

from engine.model_files.model_config import DEFAULT_MODEL_PATH
from tests.e2e.two_engines import System, disaggregated, run, unified
from tests.e2e.workload import recall_prompt
from tools.recall.oracle import continuation

NUM_PROMPTS, PAIRS = 8, 40
NEW_TOKENS = (48, 44, 40, 36)
ROOMY, TIGHT = 8192, 464  # tokens; four requests fit when they begin (96 each) and not when the first ends (128 each)
WAYS = ("chunked", "mixed", "retracted", "pd")
CELLS = [
    pytest.param(
        *cell,
        id="-".join([f"depth{cell[0]}", *compress(WAYS, cell[1:])]),
        marks=pytest.mark.slow if sum(cell) % 2 else (),
    )
    for cell in product((1, 2), *[(False, True)] * 4)
]


@pytest.mark.parametrize(("depth", *WAYS), CELLS)
def test_every_cell_gives_the_right_answer(depth: int, chunked: bool, mixed: bool, retracted: bool, pd: bool) -> None:
    rng = random.Random(3)
    asked = [(f"r{i}", recall_prompt(rng, PAIRS), NEW_TOKENS[i % len(NEW_TOKENS)]) for i in range(NUM_PROMPTS)]
    right = {rid: continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked}
    flags: dict[str, object] = {
        "stream": "threaded",
        "stream_delay_s": 0.0003,
        "disable_overlap_schedule": depth == 1,
        "chunked_prefill_size": 32 if chunked else -1,
        "enable_mixed_chunk": mixed,
        "schedule_conservativeness": 0.0,
    }
    with _system(flags, tokens=TIGHT if retracted else ROOMY, pd=pd) as system:
        assert run(system, asked, turns_between=6) == right
        _assert_is_what_it_says(system, depth=depth, chunked=chunked, mixed=mixed, retracted=retracted, pd=pd)


def test_recall_collapses_when_no_bytes_move() -> None:
    """The fake backend reports that everything has landed: the cells above can fail."""
    rng = random.Random(7)
    asked = [(f"r{i}", recall_prompt(rng, rng.randint(5, 250)), 4) for i in range(40)]
    fake = {"disaggregation_transfer_backend": "fake"}
    with disaggregated(DEFAULT_MODEL_PATH, decode={}, max_total_tokens=65536, disagg=fake) as pair:
        answers = run(pair, asked, turns_between=6)
    right = sum(answers[rid] == continuation(prompt, new, ignore_eos=True) for rid, prompt, new in asked)
    assert right < 0.1 * len(asked)


def _system(flags: dict[str, object], *, tokens: int, pd: bool) -> AbstractContextManager[System]:
    if pd:
        # A prefill worker mixes nothing: those cells show what layers do, with the checksum of all of them. A decode worker
        # mixes what it computes again: in the other cells what it retracts waits in host memory.
        layers = {
            "disaggregation_layerwise_transfer": "on" if flags["enable_mixed_chunk"] else "off",
            "disaggregation_decode_retraction_backup": "recompute" if flags["enable_mixed_chunk"] else "host",
        }
        pair = {**flags, "max_total_tokens": ROOMY, "disagg": {**layers, "disaggregation_kv_checksum": True}}
        return disaggregated(DEFAULT_MODEL_PATH, decode={"max_total_tokens": tokens}, **pair)
    return unified(DEFAULT_MODEL_PATH, **{**flags, "max_total_tokens": tokens})


def _assert_is_what_it_says(
    system: System, *, depth: int, chunked: bool, mixed: bool, retracted: bool, pd: bool
) -> None:
    first, last = system.workers[0], system.workers[-1]
    retractions = last.parts.scheduler.counters.retractions
    assert (retractions > 0) == retracted, f"{retractions} retractions"
    restored = last.role.counters().get("backup_restored_tokens", 0)
    assert (restored > 0) == (retracted and pd and not mixed), f"{restored} tokens came back from the host"
    for worker in system.workers:
        assert worker.parts.depth == depth
        if worker is last or chunked:  # a prefill worker with one whole prompt at a time has nothing to overlap
            assert (worker.seen.overlapped > 0) == (depth == 2)
    assert (first.seen.chunks > 0) == chunked
    # A prefill worker has no decodes to mix in; a decode worker computes prompts only of those it retracted.
    assert (last.seen.mixed > 0) == (mixed and (retracted or not pd)), f"{last.seen.mixed} mixed steps"
