"""Two-batch overlap: ranks compute steps in two halves, and no token and no logprob changes."""

from functools import cache
from typing import Any

import pytest

from engine.core.plan import Plan
from engine.executor.halved_pass import HalvedPass
from engine.kernels.linear import linear_kernel
from tests.engine.engine_in_process import prompt_of
from tests.engine.test_expert_parallel import Answers, add, answered, engines_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

PROMPTS = [prompt_of(70, 1), prompt_of(9, 2), prompt_of(33, 3), prompt_of(5, 4)]
ON: dict[str, Any] = {"enable_two_batch_overlap": "on", "reduce_units": 4}

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="bits are promised of the C kernel of bf16")


@pytest.fixture(scope="module", params=["glm4_moe", "gpt_oss", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a shared expert and a dense first layer, with windows and sinks, and plain."""
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tbo") / "model", request.param, dtype="bfloat16", **sizes)


def answers(path: str, *, where: tuple[int, ...] = (0, 0, 0, 0), **flags: Any) -> Answers:
    """Greedy and seeded ones. `where`: the DP rank of each prompt."""
    with engines_of(path, **flags) as (engines, run):
        for i, prompt in enumerate(PROMPTS):
            if i % 2:
                engines[where[i]].add(str(i), prompt, max_new_tokens=8, temperature=0.9, seed=7 + i)
            else:
                add(engines[where[i]], str(i), prompt)
        run()
        return answered(engines)


@cache
def alone(path: str) -> Answers:
    return answers(path, reduce_units=4)


class Seen:
    """The steps that ranks computed in halves: rows of each half on the rank, and whether they were of prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int, bool]] = []
        run = HalvedPass.run

        def noted(halved: HalvedPass, model: Any, plan: Plan, *args: Any) -> Any:
            rows, cut = sum(item.q_len for item in plan.items), halved._cut(plan)
            self.steps.append((cut, rows - cut, plan.extend))
            return run(halved, model, plan, *args)

        monkeypatch.setattr(HalvedPass, "run", noted)


@pytest.mark.parametrize(
    "shape",
    [
        {"tp_size": 2, "ep_size": 2},
        {"tp_size": 2, "ep_size": 2, "dp_size": 2, "where": (0, 1, 0, 1)},
        {"tp_size": 2, "ep_size": 2, "dp_size": 2, "where": (0, 0, 0, 0)},
        {"tp_size": 4, "ep_size": 4, "dp_size": 2, "where": (1, 0, 1, 0)},
        {"tp_size": 2, "ep_size": 2, "pp_size": 2},
        {"tp_size": 4, "ep_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:1"},
        {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "eplb_rebalance_num_iterations": 4},
        {"tp_size": 2, "ep_size": 2, "speculative_algorithm": "NGRAM"},
    ],
    ids=["2 ranks", "2 DP ranks", "one idle DP rank", "2 DP ranks of 2", "2 stages", "2 machines", "EPLB", "n-grams"],
)
def test_halves_answer_as_whole_steps_do(model: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    assert answers(model, **ON, **shape) == alone(model)
    for extend in (True, False):
        assert any(first and second for first, second, of_prompts in seen.steps if of_prompts is extend), seen.steps
