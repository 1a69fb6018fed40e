"""When steps are launched, sampled and collected: the production scheduler, the hash model, and a note of every call."""

import pytest

from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.grammar.fixed import Fixed
from tests.loop.loop_in_a_test import PipelineInATest, Recorder, RunningLoop


@pytest.mark.parametrize(
    ("depth", "order"),
    [
        (1, "launch 1, collect 1, launch 2, collect 2, launch 3, collect 3"),
        (2, "launch 1, launch 2, collect 1, launch 3, collect 2, collect 3"),
        (3, "launch 1, launch 2, launch 3, collect 1, collect 2, collect 3"),
    ],
)
def test_depth_is_how_many_steps_are_launched_before_the_oldest_is_collected(depth: int, order: str) -> None:
    rig = PipelineInATest(depth)
    rig.add("r", [1, 2, 3], max_new_tokens=3)
    rig.run()
    assert rig.executor.said == order


def test_the_forward_of_a_constrained_step_does_not_wait_for_the_token_before_it() -> None:
    rig = PipelineInATest(depth=2)
    rig.add("r", [1, 2, 3], max_new_tokens=3).grammar = Fixed(9)
    rig.run()
    assert rig.executor.said == "launch 1, forward 2, collect 1, sample 2, forward 3, collect 2, sample 3, collect 3"
    assert rig.scheduler.counters.deferred_samples == 2


@pytest.mark.parametrize("depth", [2, 3])
def test_a_grammar_that_ends_wastes_one_sample(depth: int) -> None:
    """Its request has ended when the masks are filled in: no mask for it, its token is dropped, the others go on."""
    rig = PipelineInATest(depth)
    ends, goes_on = Fixed(3), Fixed(8)
    rig.add("ends", [1, 2, 3], max_new_tokens=20).grammar = ends
    rig.add("goes-on", [4, 5, 6], max_new_tokens=20).grammar = goes_on
    rig.add("plain", [7, 8], max_new_tokens=12)
    rig.run()
    assert ends.seen == rig.tokens["ends"] == expected_tokens([1, 2, 3], 3) and ends.masks == 3
    assert goes_on.seen == rig.tokens["goes-on"] == expected_tokens([4, 5, 6], 8)
    assert rig.tokens["plain"] == expected_tokens([7, 8], 12)
    wasted = [p for p in rig.plans if p.sample_deferred and len(p.masks) < sum(i.rid != "plain" for i in p.items)]
    assert len(wasted) == rig.scheduler.counters.wasted_samples == 2  # one each
    counts = rig.scheduler.memory.allocator.counts()
    assert counts["held"] == 0 and rig.scheduler.idle


# ---- Steps whose ends are watched: the loop rests while they run, and its watchdog counts the wait.
# In time: tests/simulation/test_stages.py.


def test_depth_bounds_the_steps_in_flight_and_a_turn_waits_for_none() -> None:
    rig = PipelineInATest(2, watched=True, chunk=8, radix=False)
    rig.add("r", list(range(40)), max_new_tokens=1)
    assert [rig.move() is not None for _ in range(4)] == [True, True, False, False]
    assert rig.executor.said == "launch 1, launch 2" and not rig.pipeline.worked
    rig.end(1)
    assert rig.pipeline.worked and rig.move() is not None
    assert rig.executor.said == "launch 1, launch 2, collect 1, launch 3"


def test_a_step_whose_masks_follow_from_one_in_flight_is_sampled_when_that_has_ended() -> None:
    rig = PipelineInATest(2, watched=True)
    grammar = rig.add("r", [1, 2, 3], max_new_tokens=3).grammar = Fixed(9)
    rig.move(), rig.move(), rig.move()
    assert rig.executor.said == "launch 1, forward 2" and grammar.masks == 1
    rig.end(1)
    assert rig.executor.said == "launch 1, forward 2, collect 1, sample 2"
    rig.end(2)
    rig.move()
    rig.end(3)
    assert rig.tokens["r"] == expected_tokens([1, 2, 3], 3)


def test_the_watchdog_counts_the_wait_for_a_step_and_no_rest() -> None:
    """Else a rank that hangs would never be noticed: the loop of its leader turns."""
    engine = EngineInATest(pp_size=2)
    executor = Recorder(engine.model, watched=True)

    def until(rig: RunningLoop) -> bool:
        executor.ended_steps |= {1} if len(rig.stalls) >= 5 else set()
        return len(rig.stalls) == 12

    rig = RunningLoop(engine, executor, until=until, limit_s=3.0, depth=2)
    rig.run({"r": [1, 2, 3]}, new=1)
    assert rig.stalls == [None, None, None, 4.0, 5.0, *[None] * 7]
