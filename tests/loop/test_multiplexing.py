"""The loop of two lanes: it waits for no step, decodes go first where they are due, and each phase's steps are timed by themselves."""

from collections.abc import Callable, Mapping

import pytest

from engine.core.outputs import StepEffects
from engine.core.plan import Phase, Plan
from engine.core.scheduler import Scheduler
from engine.loop.listeners import StepDurations
from engine.messages import TokenOutput
from engine.pdmux.multiplexing import POLL_S, Multiplexing
from engine.pdmux.phases import PACE, LaneShare
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import expected_tokens
from tests.grammar.fixed import Fixed
from tests.loop.loop_in_a_test import Launched, PipelineInATest, Recorder, RunningLoop, services_of

ITL_S = 0.1
DUE_S = PACE * ITL_S


class Rig(PipelineInATest):
    def __init__(
        self, *, depth: int = 1, itl_s: float | None = ITL_S, parts: int = 2, waits: bool = True, **limits: object
    ) -> None:
        self.given: list[int] = []
        self.share = LaneShare(parts=parts, itl_s=itl_s, waits=waits)
        super().__init__(depth, watched=True, strategy=self._strategy, streams=2, multiplexed=True, **limits)
        self.beside_prompts: list[bool] = []  # for each step that was collected

    def _strategy(self, scheduler: Scheduler) -> Multiplexing:
        self.strategy = Multiplexing(scheduler, share=self.share, give=self.given.append)
        return self.strategy

    def collected(self, effects: StepEffects) -> list[TokenOutput]:
        self.beside_prompts.append(self.strategy.beside_prompts)
        return effects.outputs

    def beside_a_prompt(self) -> "Rig":
        """Request a decodes its third token in step 2 beside the prompt of b, step 3."""
        self.add("a", [1, 2, 3])
        self.move()
        self.end(1)
        self.add("b", list(range(40)))
        assert [self.move().phase for _ in range(2)] == [Phase.DECODE, Phase.PREFILL]  # type: ignore[union-attr]
        return self


def test_both_lanes_have_a_step_in_flight_and_a_turn_waits_for_none() -> None:
    rig = Rig().beside_a_prompt()
    assert rig.pipeline.num_launched == 2 and rig.pipeline.last is not None and rig.pipeline.last.seq == 3
    assert rig.move() is None and not rig.pipeline.worked


def test_a_step_of_one_lane_is_collected_while_the_other_s_older_one_runs() -> None:
    rig = Rig().beside_a_prompt()
    rig.end(3)
    assert rig.pipeline.worked and rig.pipeline.num_launched == 1
    assert rig.tokens == {"a": expected_tokens([1, 2, 3], 1)}


def test_beside_a_prompt_the_next_decode_step_waits_until_it_is_due() -> None:
    rig = Rig().beside_a_prompt()
    rig.end(2)
    assert rig.move(0.0) is None
    assert rig.strategy.shorten(1.0, 0.0) == DUE_S + POLL_S and rig.strategy.shorten(0.01, 0.0) == 0.01
    plan = rig.move(DUE_S)
    assert plan is not None and plan.phase is Phase.DECODE
    rig.end(4)
    rig.move(DUE_S)
    assert rig.strategy.shorten(1.0, DUE_S) == DUE_S + POLL_S


def test_without_a_prompt_in_flight_decode_steps_follow_at_once_and_nothing_shortens_the_rest() -> None:
    rig = Rig().beside_a_prompt()
    rig.scheduler.abort("b")
    rig.end(2, 3)
    plan = rig.move(0.0)
    assert plan is not None and plan.phase is Phase.DECODE and rig.strategy.shorten(1.0, 0.0) == 1.0


def test_a_request_that_comes_from_the_prefill_lane_has_its_next_token_in_time() -> None:
    rig = Rig(depth=2, prefill_max_requests=1)
    rig.add("a", [1, 2, 3])
    rig.move()
    rig.end(1)
    rig.add("b", [7])
    rig.add("c", list(range(60)))
    lanes = [plan.phase for _ in range(4) if (plan := rig.move()) is not None]
    assert lanes == [Phase.DECODE, Phase.DECODE, Phase.PREFILL, Phase.PREFILL]
    for _ in range(3):
        rig.share.note(0.5 * DUE_S)
    rig.end(2, 3)
    assert rig.move(0.01) is None
    rig.end(4)
    plan = rig.move(0.01)
    assert "b" in rig.tokens and plan is not None and plan.phase is Phase.PREFILL
    assert rig.move(0.02) is None
    assert rig.strategy.shorten(1.0, 0.02) == pytest.approx(0.01 + 0.5 * DUE_S - 0.02 + POLL_S)


def test_the_executor_gets_the_share_at_first_and_when_it_changes() -> None:
    rig = Rig(parts=4).beside_a_prompt()
    plan = rig.pipeline.last
    assert rig.given == [2] and plan is not None
    for _ in range(3):
        rig.strategy.note(plan, 2 * ITL_S)
    assert rig.given == [2, 3]
    rig.scheduler.abort("b")
    rig.end(2, 3)
    for _ in range(3):
        rig.strategy.note(plan, 2 * ITL_S)
    assert rig.given == [2, 3], "a step alone says nothing"


def test_on_a_gpu_steps_beside_the_other_lane_get_a_division_and_others_the_whole() -> None:
    rig = Rig(depth=2, parts=4, waits=False, prefill_max_requests=1)
    given = []

    def moves(count: int) -> list[Phase | None]:
        found = []
        for _ in range(count):
            plan = rig.move()
            assert plan is not None
            found.append(plan.phase)
            given.append((plan.seq, rig.given[-1]))
        return found

    rig.add("a", [1, 2, 3])
    rig.add("b", list(range(40)))
    assert moves(2) == [Phase.PREFILL, Phase.PREFILL]
    rig.end(1)
    assert moves(1) == [Phase.DECODE]
    rig.end(2)
    rig.end(3)
    assert moves(1) == [Phase.DECODE]
    # a alone; b, while a will decode; a decodes beside b; both decode alone
    assert given == [(1, 0), (2, 2), (3, 2), (4, 0)]


def test_a_decode_step_that_ends_as_a_prompt_is_launched_was_not_beside_it() -> None:
    rig = Rig()
    rig.add("a", [1, 2, 3])
    rig.move()
    rig.end(1)
    rig.move()
    rig.add("b", list(range(40)))
    rig.executor.ended_steps.add(2)
    plan = rig.move()
    assert plan is not None and plan.phase is Phase.PREFILL and rig.beside_prompts == [False, False]
    rig.end(3)
    assert rig.beside_prompts == [False, False, False]
    assert Rig().beside_a_prompt().strategy.beside_prompts


def test_a_lane_that_stands_still_is_seen_while_the_other_goes_on() -> None:
    rig = Rig(itl_s=None, parts=2).beside_a_prompt()
    for seq, now_s in ((2, 1.0), (4, 2.0), (5, 3.0)):
        rig.end(seq)
        rig.move(now_s)
    assert rig.strategy.since_s(9.0) == rig.pipeline.since_s(9.0) == 0.0
    rig.end(3)
    rig.move(4.0)
    assert rig.strategy.since_s(9.0) > 0.0
    assert Rig().strategy.since_s(9.0) == 9.0


def test_a_pause_plans_for_neither_lane() -> None:
    rig = Rig()
    rig.add("a", [1])
    assert rig.pipeline.next_plan(0.0, paused=True) is None


def test_deferred_sampling_waits_for_a_step_of_its_lane_alone() -> None:
    rig = Rig(depth=2, itl_s=None)
    grammar = rig.add("a", [1, 2, 3], max_new_tokens=4).grammar = Fixed(9)
    rig.move()
    rig.end(1)
    rig.add("b", list(range(40)))
    for _ in range(3):
        rig.move()
    assert rig.executor.said.removeprefix("launch 1, collect 1, ") == "launch 2, forward 3, launch 4"
    masks = grammar.masks
    rig.end(2)
    assert rig.executor.calls[-1] == ("sample", 3) and grammar.masks == masks + 1


def test_steps_are_timed_by_lane() -> None:
    found: list[tuple[int, float]] = []
    times = StepDurations(lambda plan, taken_s: found.append((plan.seq, taken_s)), stages=1, phase=Phase.DECODE)
    for seq, phase in ((1, Phase.PREFILL), (2, Phase.DECODE), (3, Phase.DECODE)):
        times.on_launch(Plan(seq=seq, extend=False, items=[], phase=phase), float(seq))
    for phase, now_s in ((Phase.DECODE, 4.0), (Phase.PREFILL, 9.0), (Phase.DECODE, 10.0)):
        times.on_step(StepEffects(phase=phase), now_s)
    assert found == [(2, 2.0), (3, 6.0)]


PROMPTS = {"a": [1, 2, 3], "b": list(range(60))}


def running(
    executor: Recorder, engine: EngineInATest, *, until: Callable[[Mapping[str, list[int]]], bool]
) -> RunningLoop:
    """A loop of two lanes with both requests. `until`: of their tokens."""
    share = LaneShare(parts=2, itl_s=ITL_S, waits=True)
    strategy = Multiplexing(engine.scheduler, share=share, give=lambda decode_parts: None)
    rig = RunningLoop(
        engine,
        executor,
        until=lambda rig: until(engine.tokens),
        limit_s=1e-9,
        services=services_of(listeners=[strategy]),
        strategy=strategy,
        streams=2,
    )
    rig.run(PROMPTS, new=9)
    return rig


def test_the_loop_serves_requests_in_two_lanes_and_wakes_for_a_step_that_is_due() -> None:
    engine = EngineInATest(multiplexed=True)
    running(Recorder(engine.model), engine, until=lambda tokens: sum(map(len, tokens.values())) == 18)
    assert engine.tokens == {rid: expected_tokens(ids, 9) for rid, ids in PROMPTS.items()}


def test_the_watchdog_counts_a_lane_that_stands_still_while_the_loop_turns() -> None:
    class Stuck(Recorder):
        """Steps of request a take a turn, b's prompt takes for ever."""

        def ended(self, launched: Launched) -> bool:
            seq = launched.plan.seq
            runs = seq not in self.ended_steps
            self.ended_steps |= {seq} if launched.plan.items[0].rid == "a" else set()
            return not runs

    engine = EngineInATest(multiplexed=True, prefill_max_requests=1)
    rig = running(Stuck(engine.model, watched=True), engine, until=lambda tokens: len(tokens.get("a", [])) == 9)
    assert rig.stalls[-1] == rig.now_s > 4 * DUE_S
