"""Pipeline stages in virtual time: each has work, prompts are faster with more of them, and no token changes."""

import pytest

from engine.core.estimates import StepBudget
from tests.core.hash_model import expected_tokens
from tests.simulation.stages import TOKEN_S, WEIGHTS_S, StagedEngine

STAGES = (1, 2, 4)
CHUNK = 64
LONG = [(7 * k) % 49 for k in range(16 * CHUNK)]


def decoding(stages: int, *, requests: int = 16, **engine: object) -> StagedEngine:
    rig = StagedEngine(stages=stages, plan_s=0.0005, max_running=requests, chunk=CHUNK, **engine)  # type: ignore[arg-type]
    for i in range(requests):
        rig.ask(f"r{i}", [i, 1, 2], new=40)
    return rig


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("overlap", [False, True])
def test_in_steady_decode_every_stage_works(stages: int, overlap: bool) -> None:
    rig = decoding(stages, overlap=overlap)
    while len(rig.engine.tokens.get("r15", [])) < 5:
        rig.turn()
    since_s = rig.now_s
    while len(rig.engine.tokens["r15"]) < 35:
        rig.turn()
    assert min(rig.occupancies(since_s, rig.now_s)) > 0.8
    assert rig.run() == {f"r{i}": expected_tokens([i, 1, 2], 40) for i in range(16)}


def test_a_batch_more_than_stages_hides_the_time_to_plan() -> None:
    """Planning takes two thirds of a stage's time: with as many plans as stages a stage waits for it, with one more it does not."""
    least = []
    for async_depth in (0, 1):
        rig = decoding(2, async_depth=async_depth)
        rig._plan_s = 0.010
        while len(rig.engine.tokens.get("r15", [])) < 5:
            rig.turn()
        since_s = rig.now_s
        while len(rig.engine.tokens["r15"]) < 35:
            rig.turn()
        least.append(min(rig.occupancies(since_s, rig.now_s)))
    assert least[0] < 0.75 and least[1] > 0.95


def test_a_long_prompt_is_faster_with_more_stages_and_each_of_them_works() -> None:
    first_s = {}
    for stages in STAGES:
        rig = StagedEngine(stages=stages, plan_s=0.0005, chunk=CHUNK, max_prefill_tokens=4096)
        rig.ask("long", LONG, new=1)
        assert rig.run() == {"long": expected_tokens(LONG, 1)}
        first_s[stages] = rig.first_s["long"]
        assert min(rig.occupancies(0.0, first_s[stages])) > 0.8
    chunk_s = WEIGHTS_S + CHUNK * TOKEN_S
    for stages in STAGES:
        assert first_s[stages] == pytest.approx((16 + stages - 1) * chunk_s / stages, rel=0.03)


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_between_decodes_change_no_token(mixed: bool) -> None:
    answers = []
    for stages in STAGES:
        rig = decoding(stages, mixed_chunk=mixed, max_prefill_tokens=4096)
        for turn in range(60):
            rig.turn()
            if turn % 10 == 0:
                rig.ask(f"long{turn}", [turn, *LONG[: 5 * CHUNK]], new=8)
        answers.append(rig.run())
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 22


def test_riders_of_chunks_keep_every_stage_busy_and_decode_goes_on() -> None:
    rig = decoding(4, mixed_chunk=True, max_prefill_tokens=4096)
    while "r15" not in rig.first_s:
        rig.turn()
    rig.ask("long", LONG, new=1)
    since_s, before = rig.now_s, len(rig.engine.tokens["r0"])
    while "long" not in rig.first_s:
        rig.turn()
    assert min(rig.occupancies(since_s, rig.now_s)) > 0.8
    assert len(rig.engine.tokens["r0"]) - before >= 3


def test_a_prompt_that_arrives_gets_the_stage_that_is_free() -> None:
    """The loop does not wait for the step of another: its first token comes when it would come alone, behind the first stage."""
    rig = StagedEngine(stages=4, plan_s=0.0, chunk=CHUNK, max_prefill_tokens=4096)
    rig.ask("first", LONG[:CHUNK], new=1)
    rig.ask("second", LONG[1 : CHUNK + 1], new=1, at_s=0.03)
    rig.run()
    step_s = WEIGHTS_S + CHUNK * TOKEN_S
    assert rig.first_s == {"first": pytest.approx(step_s), "second": pytest.approx(0.03 + step_s)}


def test_the_time_of_a_step_is_that_of_a_stage() -> None:
    """Chunks fill `max_step_s` of each stage: two stages take twice the tokens."""
    largest = []
    for stages in (1, 2):
        budget = StepBudget(max_step_s=0.1, page_size=4, attention_tokens=1e9, first_rate=0.002)
        rig = StagedEngine(stages=stages, plan_s=0.0, chunk=512, max_prefill_tokens=4096, step_budget=budget)
        rig.ask("long", LONG * 2, new=1)
        rig.run()
        largest.append(max(end_s - start_s for start_s, end_s in rig.stages[0].busy))
    assert largest == [pytest.approx(0.1, rel=0.3)] * 2
