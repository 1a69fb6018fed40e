"""Retraction with KV copied to the host: the same tokens, no copy left, memory given back only after its copy."""

from typing import Any

import pytest

from engine.core.mem_cache.backups import CopySize
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens

PROMPTS = {f"r{i}": [i, *range(9 + i)] for i in range(5)}


def filled(*, depth: int, radix: bool, backup_pages: int, **groups: int) -> EngineInATest:
    made: dict[str, Any] = {"num_pages": 22, "page_size": 4, "clip": 0, **groups}
    engine = EngineInATest(depth=depth, radix=radix, backup_pages=backup_pages, **made)
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, max_new_tokens=30)
    return engine


GROUPS = {"windows": {"window": 6, "more_window_pages": 64, "chunk": 4}, "states": {"state_slots": 12}}
GROUPS["both"] = {**GROUPS["windows"], **GROUPS["states"]}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("radix", [True, False])
def test_a_copy_has_the_last_window_and_the_state(groups: str, radix: bool) -> None:
    engine = filled(depth=2, radix=radix, backup_pages=1000, **GROUPS[groups])
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, 30) for rid, p in PROMPTS.items()}
    backups = engine.scheduler.backups
    assert backups.restored_tokens == backups.saved_tokens > 0 and engine.model.copies == {}
    saves = [save for plan in engine.plans for save in plan.saves]
    assert all((1 <= len(save.window) <= 3) == (groups != "states") for save in saves)
    assert all((save.state > 0) == (groups != "windows") for save in saves)
    computed = sum(item.q_len for plan in engine.plans for item in plan.items)
    assert computed == sum(len(p) + 29 for p in PROMPTS.values()) + engine.scheduler.counters.wasted_samples


@pytest.mark.parametrize("room", [CopySize(1000, 2, 0), CopySize(1000, 1000, 0)])
def test_what_has_no_room_in_one_pool_is_computed_again(room: CopySize) -> None:
    engine = filled(depth=1, radix=False, backup_pages=1000, **GROUPS["both"])
    engine.scheduler.backups._room = room
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, 30) for rid, p in PROMPTS.items()}
    assert engine.scheduler.counters.retractions > 0 and engine.scheduler.backups.saved_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("radix", [True, False])
def test_a_copy_comes_back_and_nothing_is_computed_again(depth: int, radix: bool) -> None:
    engine = filled(depth=depth, radix=radix, backup_pages=1000)
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, 30) for rid, p in PROMPTS.items()}
    backups, counters = engine.scheduler.backups, engine.scheduler.counters
    assert counters.retractions > 0 and backups.restored_tokens == backups.saved_tokens > 0
    computed = sum(item.q_len for plan in engine.plans for item in plan.items)
    assert computed == sum(len(p) + 29 for p in PROMPTS.values()) + counters.wasted_samples
    assert engine.model.copies == {} and backups.num_pages == 0


def test_a_request_that_comes_back_samples_in_that_step() -> None:
    """Else it could be retracted again and again without progress."""
    engine = filled(depth=2, radix=False, backup_pages=1000)
    engine.run()
    loads = [plan for plan in engine.plans if plan.loads]
    assert loads
    for plan in loads:
        slots = {opened.slot for opened in plan.opens}
        assert sum(item.slot in slots and item.sample and item.q_len == 1 for item in plan.items) >= len(plan.loads)
