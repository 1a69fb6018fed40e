"""The engine against transformers, fp32, random weights: logprobs and greedy tokens, however the prompt is computed."""

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.kinds import usual
from tests.models.float64_oracle import Float64Oracle

MAX_ERROR = 1e-4
NEW_TOKENS = 8


PROMPTS = {"short": prompt_of(7, 1), "long": prompt_of(1040, 2), "one": prompt_of(1, 3), "page": prompt_of(32, 4)}


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel) -> dict[str, tuple[list[int], torch.Tensor]]:
    return {name: greedy(reference, prompt) for name, prompt in PROMPTS.items()}


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """(tokens, logprobs [NEW_TOKENS, vocab]): row i predicts token i."""
    model.generation_config.eos_token_id = None  # a minimum of tokens would mask the end of the text instead
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1)


PATHS = {
    "whole": {"chunked_prefill_size": -1},
    "chunked": {"chunked_prefill_size": 256},
    "page_1": {"chunked_prefill_size": 256, "page_size": 1},
    "overlap": {"stream": "threaded", "stream_delay_s": 0.002},
    "torch": {"attention_backend": "torch", "chunked_prefill_size": 256},
    "no_cache": {"disable_radix_cache": True},
    "retracted": {"test_retract": 2},
}


@usual({"path": "chunked"})  # its short prompts are whole
@pytest.mark.parametrize("path", PATHS)
def test_tokens_and_logprobs_equal_transformers(
    checkpoint: str, expected: dict[str, tuple[list[int], torch.Tensor]], path: str
) -> None:
    """Short and long prompts, computed side by side, then again from the cache."""
    with EngineInProcess(checkpoint, **PATHS[path]) as engine:
        for turn in ("first", "again"):
            for name, prompt in PROMPTS.items():
                engine.add(f"{name}-{turn}", prompt, logprobs=LogprobOptions(-1, 0), max_new_tokens=NEW_TOKENS)
            engine.run()
    for name, (tokens, logprobs) in expected.items():
        for turn in ("first", "again"):
            rid = f"{name}-{turn}"
            assert engine.tokens[rid] == tokens
            for i, entry in enumerate(engine.logprobs[rid]):
                assert entry.logprob == pytest.approx(logprobs[i, entry.token_id].item(), abs=MAX_ERROR)
    assert (engine.parts.scheduler.counters.retractions > 0) == (path == "retracted")
    if path != "no_cache":
        assert engine.cached["long-again"] >= 1024 and engine.cached["long-first"] == 0


@usual()  # a family's logits at every token: tests/models/test_parity.py
@pytest.mark.parametrize("start", [0, 5, 159])
def test_prompt_logprobs_equal_transformers(checkpoint: str, oracle: Float64Oracle, start: int) -> None:
    """Across chunks, and although the prefix is cached."""
    engine = EngineInProcess(checkpoint, chunked_prefill_size=64)
    prompt = prompt_of(160, 9)
    for rid in ("first", "again"):
        engine.answer(rid, prompt, logprobs=LogprobOptions(start, 3), max_new_tokens=1)
    exact = oracle.logprobs(prompt)
    bounds = exact.bound().tolist()
    for rid in ("first", "again"):
        entries = engine.input_logprobs[rid]
        assert [e.token_id for e in entries] == prompt[start:]
        for position, entry in enumerate(entries, start):
            if position == 0:
                assert entry.logprob is None
                continue
            row, near = exact.value[position - 1], partial(pytest.approx, rel=0.0, abs=bounds[position - 1])
            assert entry.logprob == near(row[prompt[position]].item())
            best = row.topk(3)
            assert [value for value, _ in entry.top] == near(best.values.tolist())
