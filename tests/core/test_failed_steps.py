"""A step without device memory ends its own requests; nothing that it, or a step in flight behind it, wrote is found by others."""

import pytest

from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import NO_MEMORY, expected_tokens
from tests.core.mem_cache.test_backups import PROMPTS, filled

PROMPT = list(range(40))


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("failing", [1, 2, 3, 4, 6])
def test_its_requests_end_and_the_next_ones_compute_anew(depth: int, lag: bool, failing: int) -> None:
    """Steps 1 to 3 are chunks of one prompt, the others decode."""
    engine = EngineInATest(depth=depth, lag=lag, chunk=16)
    engine.model.fails = lambda plan: plan.seq == failing
    engine.answer("first", PROMPT, max_new_tokens=8)
    reason = engine.finish["first"]
    assert (reason.kind, reason.message, reason.status) == ("abort", NO_MEMORY, 503)
    assert engine.tokens["first"] == expected_tokens(PROMPT, 8)[: max(0, failing - 3)]
    assert engine.answer("again", PROMPT, max_new_tokens=8) == expected_tokens(PROMPT, 8)
    assert engine.scheduler.counters.failed_steps == 1
    assert engine.scheduler.memory.allocator.counts()["held"] == 0 and engine.scheduler.idle


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_outside_the_step_go_on(depth: int) -> None:
    """Prefill goes alone here: what decodes is in no failed step."""
    engine = EngineInATest(depth=depth)
    engine.add("decodes", [7, 8, 9], max_new_tokens=20)
    engine.turns(4)
    engine.model.fails = lambda plan: plan.extend
    engine.answer("fails", PROMPT, max_new_tokens=4)
    assert engine.finish["fails"].status == 503
    assert engine.tokens["decodes"] == expected_tokens([7, 8, 9], 20)


@pytest.mark.parametrize("backup_pages", [0, 1000])
@pytest.mark.parametrize("depth", [1, 2])
def test_any_step_may_fail_while_memory_is_short(depth: int, backup_pages: int) -> None:
    """Among retractions, their copies and resumptions: each request ends once, none says a wrong token."""
    retracted = 0
    for failing in range(1, 60):
        engine = filled(depth=depth, radix=True, backup_pages=backup_pages)
        engine.model.fails = lambda plan, failing=failing: plan.seq == failing  # type: ignore[misc]
        engine.run()
        assert engine.scheduler.counters.failed_steps == 1
        for rid, prompt in PROMPTS.items():
            tokens, right = engine.tokens[rid], expected_tokens(prompt, 30)
            assert tokens == right if engine.finish[rid].kind == "length" else tokens == right[: len(tokens)]
        assert engine.scheduler.memory.allocator.counts()["held"] == 0 and engine.scheduler.idle
        assert engine.model.copies == {} and engine.scheduler.backups.num_pages == 0
        retracted += engine.scheduler.counters.retractions
    assert retracted > 100
