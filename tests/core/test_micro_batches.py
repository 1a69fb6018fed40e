"""Pipeline stages: who decodes in which plan, by literals. (Anything at all: tests/core/proof; in time: tests/simulation/test_stages.py.)"""

import pytest

from engine.core.plan import Plan
from engine.core.state import MicroBatches
from tests.core.engine_in_a_test import EngineInATest, plan_item
from tests.core.hash_model import expected_tokens


def decoded(engine: EngineInATest) -> list[list[str]]:
    return [[item.rid for item in plan.items] for plan in engine.plans if not plan.extend]


def running(num: int, **engine: object) -> EngineInATest:
    """An engine whose requests r0.. have their first token, at rest."""
    made = EngineInATest(**{"max_running": 16, "depth": 1, **engine})  # type: ignore[arg-type]
    for i in range(num):
        made.add(f"r{i}", [i, 1, 2], max_new_tokens=6)
    while any(not r.output_ids for r in made.scheduler.stages.live.values()):
        made.turn()
    made.plans.clear()
    return made


@pytest.mark.parametrize(
    ("num", "pp_size", "sizes"), [(8, 2, [4, 4]), (7, 2, [4, 3]), (5, 4, [2, 1, 1, 1]), (1, 4, [1]), (3, 4, [1, 1, 1])]
)
def test_running_requests_are_divided_evenly_among_the_stages(num: int, pp_size: int, sizes: list[int]) -> None:
    engine = running(num, pp_size=pp_size)
    engine.depth = pp_size + 1
    engine.turns(pp_size + 1)
    first = decoded(engine)[: len(sizes)]
    assert [len(rids) for rids in first] == sizes
    assert sorted(rid for rids in first for rid in rids) == sorted(f"r{i}" for i in range(num))
    engine.run()
    assert engine.tokens == {f"r{i}": expected_tokens([i, 1, 2], 6) for i in range(num)}
    assert decoded(engine)[len(sizes) : 2 * len(sizes)] == first  # round and round


def test_an_async_batch_depth_divides_among_more_plans_than_stages() -> None:
    engine = running(6, pp_size=2, pp_async_batch_depth=1)
    engine.depth = 3
    engine.turns(3)
    assert [len(rids) for rids in decoded(engine)] == [2, 2, 2]


def test_groups_that_have_become_uneven_become_even_again() -> None:
    batches = MicroBatches(2)
    assert batches.share(8, num_running=8) == 4
    batches.on_planned(Plan(seq=1, extend=False, items=[plan_item(extend=False)]))
    assert batches.share(4, num_running=5) == 3  # one of the other four is in flight: the next plan takes two
    batches.on_planned(Plan(seq=2, extend=False, items=[plan_item(extend=False)]))
    assert batches.share(1, num_running=5) == 0  # each stage has its plan


def test_what_a_prompt_has_sampled_waits_for_the_sample_and_no_plan_holds_a_placeholder() -> None:
    engine = EngineInATest(depth=3, pp_size=2, lag=True)
    engine.add("a", [1, 2, 3], max_new_tokens=4)
    engine.answer("b", [4, 5, 6], max_new_tokens=4)
    assert all(token >= 0 for plan in engine.plans for item in plan.items for token in item.tokens)
    assert engine.tokens == {"a": expected_tokens([1, 2, 3], 4), "b": expected_tokens([4, 5, 6], 4)}


def test_riders_of_a_mixed_step_are_the_stages_share_and_so_is_their_part_of_the_budget() -> None:
    engine = running(4, pp_size=2, mixed_chunk=True, chunk=8, page_size=1)
    engine.depth = 3
    engine.add("long", list(range(9, 29)), max_new_tokens=2)
    engine.turns(3)
    shapes = [[(item.rid, item.q_len) for item in plan.items] for plan in engine.plans[:3]]
    assert shapes == [
        [("long", 6), ("r0", 1), ("r1", 1)],
        [("long", 6), ("r2", 1), ("r3", 1)],
        [("long", 8)],
    ]


def test_the_new_token_ratio_decays_by_the_part_of_the_running_requests_that_sampled() -> None:
    values = []
    for pp_size in (1, 2):
        engine = running(4, pp_size=pp_size)
        engine.depth = pp_size
        before = engine.scheduler.ratio.value
        while len(engine.tokens["r3"]) < 3:
            engine.turn()
        values.append(before - engine.scheduler.ratio.value)
    assert values[0] == pytest.approx(values[1])
