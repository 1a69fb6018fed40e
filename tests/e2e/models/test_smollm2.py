"""SmolLM2-135M-Instruct, a real model: the same tokens from every way to serve it, those of transformers, and a chat.

fp32 here: without a C compiler a bf16 product is oneDNN's, whose sum depends on the number of rows, so batches of another
composition may round a near tie the other way. fp32 rounds, too, only 65,000 times finer; where two tokens differ all
the same, their logits must be nearer than the arithmetic's error (`margin`).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model_files.hub import smollm2_file
from engine.model_files.model_config import load_model_config
from engine.models.checkpoint import Checkpoint
from engine.models.load import load_model
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.cluster import cluster
from tests.e2e.two_engines import System, disaggregated, run, unified
from tests.models.reference_attend import Sequence

pytestmark = pytest.mark.timeout(1800)  # these limits end a hang, not a slow machine
REST_S = 600.0
NEW_TOKENS = 6
FLAGS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 16384, "num_threads": 1}

BEGINNINGS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "SELECT name FROM",
    "<h1>Welcome</h1>",
    "Q: What is 2 + 2?\nA:",
    "La capitale de l'Italie est",
]
WAYS = ("cached", *(pytest.param(way, marks=pytest.mark.slow) for way in ("nixl", "mooncake", "chunked")))
Margin = Callable[[], float]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_file())


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """12: the beginnings alone, and behind one another, so that some share prefixes and some are longer than a chunk."""
    count = len(BEGINNINGS)
    texts = [*BEGINNINGS]
    texts += [
        f"{BEGINNINGS[i % 4]} {BEGINNINGS[i % count]} {BEGINNINGS[(5 * i + 2) % count]}" for i in range(12 - count)
    ]
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def unified_twice(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Whole prompts on one worker; the second time with what is cached of them."""
    with _system("unified") as system:
        first = _answers(system, prompts, name="first")
        counters = system.workers[0].parts.scheduler.counters
        before = counters.cached_tokens
        second = _answers(system, prompts, name="second")
        assert counters.cached_tokens - before > sum(map(len, prompts)) / 2
    return first, second


@pytest.fixture(scope="module")
def reference(unified_twice: tuple[list[list[int]], list[list[int]]]) -> list[list[int]]:
    return unified_twice[0]


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    """transformers' model with the weights of the file, fp32. (test_gguf.py holds the weights to the gguf package's.)"""
    config = load_model_config(str(smollm2_file()))
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=rope,
            tie_word_embeddings=True,
        )
    ).eval()
    with Checkpoint(str(smollm2_file()), dtype="float32", device="cpu", progress=False) as checkpoint:
        weights = {n: checkpoint.take(n, list(t.shape)) for n, t in model.state_dict().items() if n != "lm_head.weight"}
        checkpoint.check_all_taken()
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def margin(theirs: LlamaForCausalLM, prompts: list[list[int]], reference: list[list[int]]) -> Margin:
    """Computed when two tokens differ, once: how far apart two logits can be in one fp32 arithmetic and be in the other order in another.

    Each logit is off the exact one by at most e (ours) or e' (theirs); so two of them change order only if they are
    nearer than 2e + 2e'. Both are measured beside fp64 on some of the answers; other answers may be off by more than
    the worst of these, hence four times that.
    """

    @functools.cache
    def measured() -> float:
        ours = load_model(
            str(smollm2_file()), load_model_config(str(smollm2_file())), dtype="float32", device="cpu", progress=False
        )
        sampled = [prompt + answer for prompt, answer in zip(prompts[::4], reference[::4], strict=True)]
        single = [(Sequence(ours).extend(ids), _logits(theirs, ids)) for ids in sampled]
        theirs.double()
        exact = [_logits(theirs, ids) for ids in sampled]
        theirs.float()
        errors = [
            max((part - right).abs().max().item() for part in pair) for pair, right in zip(single, exact, strict=True)
        ]
        assert 0 < max(errors) < 1e-3
        return 4 * 4 * max(errors)

    return measured


@pytest.mark.parametrize("way", WAYS)
def test_12_prompts_give_the_same_tokens(
    way: str,
    prompts: list[list[int]],
    unified_twice: tuple[list[list[int]], list[list[int]]],
    reference: list[list[int]],
    theirs: LlamaForCausalLM,
    margin: Margin,
) -> None:
    if way == "cached":
        answers = unified_twice[1]
    else:
        with _system(way) as system:
            answers = _answers(system, prompts, name=way)
            assert (system.workers[0].seen.chunks > 0) == (way == "chunked")
    for prompt, answer, expected in zip(prompts, answers, reference, strict=True):
        if answer != expected:
            at = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
            logits = _logits(theirs, prompt + expected[:at])[-1]
            assert (logits[answer[at]] - logits[expected[at]]).abs() < margin(), (prompt, at)


def test_tokens_are_those_of_transformers(
    prompts: list[list[int]], reference: list[list[int]], theirs: LlamaForCausalLM, margin: Margin
) -> None:
    """Each of our tokens is transformers' best after the same tokens, or as good as that within `margin`.

    (Where two are that near, the two would go on differently; what follows is compared behind our token.)
    """
    ties = 0
    for prompt, answer in zip(prompts, reference, strict=True):
        logits = _logits(theirs, prompt + answer)[len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        ties += int((behind > 0).sum())
        assert behind.max() <= 0 or behind.max() < margin(), prompt
    assert ties <= 2, "near ties are rare: many would mean another model"
    assert len({tuple(answer) for answer in reference}) > 9, "the prompts do not tell answers apart"


@pytest.mark.slow
def test_logits_are_near_exact_ones(margin: Margin) -> None:
    assert margin() < 16e-3  # (the errors themselves are checked where they are measured)


@pytest.mark.slow
def test_a_chat_through_tandem_up(tmp_path: Path) -> None:
    """In the type that is served by default. The best token is ahead by 0.8 or more at each step of this answer, more

    than bf16 is off (0.2).
    """
    args = ("--model-path", "smollm2", "--max-total-tokens", "8192", "--log-level", "warning")
    with cluster(tmp_path, "--unified", *args) as c:
        question = "What is the capital of France? Answer in one sentence."
        body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = httpx.post(f"{c.router}/v1/chat/completions", json=body | {"max_tokens": 32}, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["model"] == "smollm2"


def _system(way: str) -> AbstractContextManager[System]:
    path = str(smollm2_file())
    if way in ("nixl", "mooncake"):
        return disaggregated(path, decode={}, disagg={"disaggregation_transfer_backend": way}, **FLAGS)
    chunked = {"chunked_prefill_size": 16, "disable_radix_cache": True} if way == "chunked" else {}
    return unified(path, page_size=4, **FLAGS, **chunked)


def _answers(system: System, prompts: list[list[int]], *, name: str) -> list[list[int]]:
    asked = [(f"{name}-{i}", prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    tokens = run(system, asked, turns_between=1, rest_s=REST_S)
    return [tokens[rid] for rid, _, _ in asked]


def _logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]
