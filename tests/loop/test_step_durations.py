"""How long steps take, as the loop tells the step budget: literals, and the real loop with a clock that the steps move."""

from engine.core.estimates import StepBudget
from engine.core.outputs import StepEffects
from engine.core.plan import Plan, StepResult
from engine.loop.listeners import StepDurations
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams
from tests.core.hash_model import expected_tokens
from tests.loop.loop_in_a_test import LoopInATest

SECONDS_A_TOKEN = 0.25


def test_a_step_begins_when_the_one_before_it_has_ended() -> None:
    first, second, third = (Plan(seq=n, extend=True, items=[]) for n in (1, 2, 3))
    reported: list[tuple[Plan, float]] = []
    durations = StepDurations(lambda plan, taken_s: reported.append((plan, taken_s)), stages=1)
    durations.on_launch(first, 10.0)
    durations.on_launch(second, 10.5)
    durations.on_step(StepEffects(), 12.0)
    durations.on_step(StepEffects(), 13.0)
    durations.on_launch(third, 20.0)
    durations.on_step(StepEffects(), 20.5)
    assert reported == [(first, 2.0), (second, 1.0), (third, 0.5)]


def test_with_pipeline_stages_the_time_is_that_of_one_stage() -> None:
    """Two stages of a second each: an empty pipeline, a full one, a step that comes half a second after another."""
    reported: list[float] = []
    durations = StepDurations(lambda plan, taken_s: reported.append(taken_s), stages=2)
    for launched_s in (0.0, 0.0, 0.0, 10.0, 10.5):
        durations.on_launch(Plan(seq=1, extend=True, items=[]), launched_s)
    for ended_s in (2.0, 3.0, 4.0, 12.0, 13.0):
        durations.on_step(StepEffects(), ended_s)
    assert reported == [1.0, 1.0, 1.0, 1.0, 1.0]


def test_the_loop_keeps_steps_within_their_time() -> None:
    """The first chunk is too long; from then on each fits, and the tokens are the same."""
    budget = StepBudget(max_step_s=2.0, page_size=4, attention_tokens=1e9, first_rate=0.001)
    rig = LoopInATest(step_budget=budget)
    plans: list[Plan] = []
    compute = rig.engine.model.run

    def slow(plan: Plan) -> StepResult:
        plans.append(plan)
        rig.now_s += SECONDS_A_TOKEN * sum(item.q_len for item in plan.items)
        return compute(plan)

    rig.engine.model.run = slow  # type: ignore[method-assign]
    prompt = list(range(3, 63))
    rig.tell(GenerateRequest(rid="a", input_ids=prompt, sampling=SamplingParams(max_new_tokens=2, temperature=0.0)))
    while "a" not in rig.engine.finish:
        rig.turns(1)
    chunks = [plan.items[0].q_len for plan in plans if plan.extend]
    assert chunks == [16, 8, 8, 8, 8, 8, 4]
    assert rig.engine.tokens["a"] == expected_tokens(prompt, 2)
