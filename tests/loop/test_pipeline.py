"""When steps are launched, sampled and collected: the production scheduler, the hash model, and a note of every call."""

from dataclasses import dataclass

import pytest

from engine.core.outputs import StepEffects
from engine.core.plan import Plan, StepResult
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.messages import TokenOutput
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import HashModel, expected_tokens
from tests.grammar.fixed import Fixed


@dataclass(eq=False)
class Launched:
    plan: Plan
    result: StepResult | None = None


class Recorder:
    """The executor's side; a deferred step runs when its sampling is launched."""

    def __init__(self, model: HashModel) -> None:
        self._model = model
        self.calls: list[tuple[str, int]] = []

    def launch(self, plan: Plan) -> Launched:
        self.calls.append(("launch", plan.seq))
        return Launched(plan, self._model.run(plan))

    def launch_forward(self, plan: Plan) -> Launched:
        self.calls.append(("forward", plan.seq))
        assert plan.masks == {}
        return Launched(plan)

    def launch_sampling(self, launched: Launched) -> None:
        self.calls.append(("sample", launched.plan.seq))
        launched.result = self._model.run(launched.plan)

    def collect(self, launched: Launched) -> StepResult:
        self.calls.append(("collect", launched.plan.seq))
        assert launched.result is not None
        return launched.result


def _outputs(effects: StepEffects) -> list[TokenOutput]:
    return effects.outputs


class Rig(EngineInATest):
    def __init__(self, depth: int, **limits: object) -> None:
        super().__init__(**limits)  # type: ignore[arg-type]
        self.executor = Recorder(self.model)
        self.pipeline = Pipeline(_outputs, strategy=StepStrategy(self.scheduler), executor=self.executor, depth=depth)

    def turn(self) -> bool:
        plan = self.scheduler.schedule()
        worked = plan is not None or self.pipeline.num_launched > 0
        if plan is not None:
            self.plans.append(plan)
        self.say(self.pipeline.advance(plan))
        self.scheduler.check()
        return worked


@pytest.mark.parametrize(
    ("depth", "order"),
    [
        (1, "launch 1, collect 1, launch 2, collect 2, launch 3, collect 3"),
        (2, "launch 1, launch 2, collect 1, launch 3, collect 2, collect 3"),
        (3, "launch 1, launch 2, launch 3, collect 1, collect 2, collect 3"),
    ],
)
def test_depth_is_how_many_steps_are_launched_before_the_oldest_is_collected(depth: int, order: str) -> None:
    rig = Rig(depth)
    rig.add("r", [1, 2, 3], max_new_tokens=3)
    rig.run()
    assert ", ".join(f"{what} {seq}" for what, seq in rig.executor.calls) == order


def test_the_forward_of_a_constrained_step_does_not_wait_for_the_token_before_it() -> None:
    rig = Rig(depth=2)
    rig.add("r", [1, 2, 3], max_new_tokens=3).grammar = Fixed(9)
    rig.run()
    calls = ", ".join(f"{what} {seq}" for what, seq in rig.executor.calls)
    assert calls == "launch 1, forward 2, collect 1, sample 2, forward 3, collect 2, sample 3, collect 3"
    assert rig.scheduler.counters.deferred_samples == 2


@pytest.mark.parametrize("depth", [2, 3])
def test_a_grammar_that_ends_wastes_one_sample(depth: int) -> None:
    """Its request has ended when the masks are filled in: no mask for it, its token is dropped, the others go on."""
    rig = Rig(depth)
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
