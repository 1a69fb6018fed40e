"""Retraction with KV copied to the host: the same tokens, no copy left, memory given back only after its copy."""

import pytest

from tests.core.engine_in_a_test import EngineInATest, request_of
from tests.core.hash_model import expected_tokens

PROMPTS = {f"r{i}": [i, *range(9 + i)] for i in range(5)}


def filled(*, depth: int, radix: bool, backup_pages: int) -> EngineInATest:
    engine = EngineInATest(num_pages=22, page_size=4, depth=depth, radix=radix, backup_pages=backup_pages)
    for rid, prompt in PROMPTS.items():
        engine.add(rid, prompt, max_new_tokens=30)
    return engine


@pytest.mark.usefixtures("hopeful")
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


@pytest.mark.usefixtures("hopeful")
def test_pages_leave_only_after_their_copy_was_collected() -> None:
    engine = filled(depth=1, radix=False, backup_pages=1000)
    while not (engine.plans and engine.plans[-1].saves):
        plan = engine.scheduler.schedule()
        assert plan is not None
        engine.plans.append(plan)
        if plan.saves:
            break
        engine.launched.append((plan, engine.model.run(plan)))
        engine.collect()
    (save,) = plan.saves
    request = next(r for r in engine.scheduler.stages.live.values() if r.serial == save.key)
    assert request.pages == save.pages and engine.scheduler.held.num_retracted == 1
    engine.launched.append((plan, engine.model.run(plan)))
    engine.collect()
    assert request.pages == [] and engine.scheduler.num_waiting == 1


@pytest.mark.usefixtures("hopeful")
def test_what_does_not_fit_is_computed_again() -> None:
    engine = filled(depth=2, radix=False, backup_pages=3)
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, 30) for rid, p in PROMPTS.items()}
    assert engine.scheduler.counters.retractions > 0 and engine.scheduler.backups.saved_tokens == 0


@pytest.mark.usefixtures("hopeful")
def test_an_abort_while_retracted_forgets_the_copy() -> None:
    engine = filled(depth=1, radix=True, backup_pages=1000)
    while not engine.model.copies:
        engine.turn()
    for rid in PROMPTS:
        engine.abort(rid)
    engine.run()
    assert engine.model.copies == {} and engine.scheduler.idle


@pytest.mark.parametrize(("floor", "taken"), [(0, [True, True, True]), (8, [True, True, False])])
def test_a_floor_keeps_room_for_those_that_grow(floor: int, taken: list[bool]) -> None:
    """Two pages each, in ten: with room for two more pages each only two fit beside the growth of all."""
    engine = EngineInATest(num_pages=10, page_size=4, conservativeness=0.0, reserve_floor=floor)
    got = []
    for i in range(3):
        request = request_of(list(range(8)), rid=f"r{i}", max_new_tokens=12)
        assert engine.scheduler.held.adopt(request) is None
        got.append(engine.scheduler.held.reserve(request))
    assert got == taken


@pytest.mark.usefixtures("hopeful")
def test_a_request_that_comes_back_samples_in_that_step() -> None:
    """Else it could be retracted again and again without progress."""
    engine = filled(depth=2, radix=False, backup_pages=1000)
    engine.run()
    loads = [plan for plan in engine.plans if plan.loads]
    assert loads
    for plan in loads:
        slots = {opened.slot for opened in plan.opens}
        assert sum(item.slot in slots and item.sample and item.q_len == 1 for item in plan.items) >= len(plan.loads)


@pytest.mark.usefixtures("hopeful")
def test_retracting_all_forgets_every_copy() -> None:
    """Weights may change: what is kept would be wrong."""
    engine = filled(depth=1, radix=False, backup_pages=1000)
    while not engine.model.copies:
        engine.turn()
    saved = engine.scheduler.backups.restored_tokens
    engine.scheduler.retract_all()
    assert engine.scheduler.holds_no_kv and engine.scheduler.backups.num_pages == 0
    engine.scheduler.forget_prefixes()
    while engine.turn() and not engine.plans[-1].items:
        pass
    assert engine.scheduler.backups.restored_tokens == saved and engine.model.copies == {}
    engine.run()
    assert engine.tokens == {rid: expected_tokens(p, 30) for rid, p in PROMPTS.items()}
