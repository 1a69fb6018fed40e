"""Answers that go on behind tokens of another worker: wherever they are cut, the rest is what one worker gives."""

from typing import Any

import pytest

from engine.messages import LogprobOptions
from tests.cells import in_turn
from tests.e2e.two_engines import System, disaggregated, run
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

NEW = 24
CUTS = (1, 7, 23)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11, "top_k": 20, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "bounded": {"temperature": 1.0, "seed": 5, "min_new_tokens": 10, "ignore_eos": False},
    "biased": {"temperature": 1.0, "seed": 7, "logit_bias": {30: 4.0, 40: -100.0}},
}
FLAGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048, "max_running_requests": 8, "num_threads": 1}
FAMILIES = ("qwen3", "qwen3_next", "gpt_oss")  # pages alone, recurrent states, windows and sinks


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(family), family)


def before(tokens: list[int], cut: int) -> dict[str, Any]:
    return {"output_ids": tokens[:cut]}


@pytest.mark.parametrize(("family", "sampling"), in_turn(FAMILIES, [*SAMPLINGS]), scope="module")
def test_the_rest_is_what_one_worker_gives(model: str, sampling: str) -> None:
    """At a worker that knows nothing of it, and at one that has its prefix; its logprobs, too."""
    asked = {"max_new_tokens": NEW, "logprobs": LogprobOptions(top_num=2), **SAMPLINGS[sampling]}
    prompt = prompt_of(45, 3)
    with EngineInProcess(model, **FLAGS, disable_radix_cache=True) as engine:
        engine.answer("whole", prompt, **asked)
        whole, logprobs = engine.tokens["whole"], engine.logprobs["whole"]
    for cached in (False, True):
        with EngineInProcess(model, **FLAGS, disable_radix_cache=not cached) as engine:
            for cut in CUTS:
                if cut < len(whole):
                    assert engine.answer(f"cut-{cut}", prompt, **asked, wanted=before(whole, cut)) == whole[cut:], cut
                    found = [lp.logprob for lp in engine.logprobs[f"cut-{cut}"]]
                    assert found == pytest.approx([lp.logprob for lp in logprobs[cut:]], abs=1e-4)


@pytest.mark.parametrize(("family", "backend"), in_turn(FAMILIES, ["mooncake", "nixl"]), scope="module")
def test_the_rest_by_two_workers(model: str, backend: str) -> None:
    """Prefill computes the prompt and what was generated, and samples the next token; decode goes on."""
    flags = {**FLAGS, "disagg": {"disaggregation_transfer_backend": backend}}
    with disaggregated(model, decode={}, **flags) as pair:
        for name in ("greedy", "penalties"):
            whole = answer(pair, name, SAMPLINGS[name], {})
            for cut in CUTS:
                assert answer(pair, f"{name}-{cut}", SAMPLINGS[name], before(whole, cut)) == whole[cut:]


def answer(pair: System, rid: str, sampling: dict[str, Any], wanted: dict[str, Any]) -> list[int]:
    pair.submit(rid, prompt_of(45, 3), new=NEW, sampling=sampling, wanted=wanted)
    return run(pair, [], turns_between=1)[rid]
