"""Draws that are no answer, in a whole engine: each ends its own request with a typed reason, others go on."""

from pathlib import Path

import pytest
import torch

from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import EOS, VOCAB_SIZE, edit_tensors, make_tiny_checkpoint

POISON = 17  # the token whose embedding is NaN
WAYS = {"depth-1": {}, "depth-2": {"stream": "threaded", "stream_delay_s": 0.0005}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("poisoned"), "llama")
    edit_tensors(Path(path) / "model.safetensors", lambda w: w["model.embed_tokens.weight"][POISON].fill_(torch.nan))
    return path


def run(path: str, *, hurt: list[int] | None, **flags: object) -> EngineInProcess:
    with EngineInProcess(path, **flags) as engine:
        for i in range(3):
            engine.add(f"r{i}", list(range(30, 40 + i)), max_new_tokens=12, temperature=1.0, seed=i, logit_bias=NEVER)
        if hurt is not None:
            engine.add("hurt", hurt, max_new_tokens=12, logit_bias={VOCAB_SIZE - 1: 100.0})
        engine.run()
    return engine


NEVER = {POISON: -100.0, VOCAB_SIZE - 1: -100.0}


@pytest.mark.parametrize("way", WAYS)
def test_nan_logits_end_one_request(poisoned: str, way: str) -> None:
    alone = run(poisoned, hurt=None, **WAYS[way])
    engine = run(poisoned, hurt=[30, POISON, 31], **WAYS[way])
    finish = engine.finish.pop("hurt")
    assert (finish.kind, finish.status) == ("abort", 500) and "NaN" in finish.message
    del engine.tokens["hurt"]
    assert engine.tokens == alone.tokens and engine.finish == alone.finish


@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_the_head_without_a_token_of_the_tokenizer_is_a_token(checkpoint: str, way: str) -> None:
    """Padded heads have more rows than the tokenizer has tokens, and a request draws the last one."""
    alone = run(checkpoint, hurt=None, **WAYS[way])
    engine = run(checkpoint, hurt=[30, 31], **WAYS[way])
    assert engine.finish.pop("hurt").kind == "length"
    assert engine.tokens.pop("hurt") == [VOCAB_SIZE - 1] * 12
    assert engine.tokens == alone.tokens and engine.finish == alone.finish


@pytest.mark.parametrize("limit", [0, 1])
def test_nan_logits_are_an_error_at_the_limit_too(poisoned: str, limit: int) -> None:
    """Nothing else would say that the only token, or the prompt's logprobs, mean nothing."""
    with EngineInProcess(poisoned) as engine:
        engine.answer("hurt", [30, POISON, 31], max_new_tokens=limit)
    assert (engine.finish["hurt"].kind, engine.finish["hurt"].status, engine.finish["hurt"].own) == ("abort", 500, True)


# ---- A draw after the end, on the device: the slot's next owner has nothing of it, penalties and
# futures included.

SAMPLING = {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.4, "max_new_tokens": 12}


def answers(path: str, **flags: object) -> tuple[EngineInProcess, dict[str, object]]:
    """Five requests, one after the other in the only slot; the odd ones are sure to end by EOS before their length."""
    with EngineInProcess(path, max_running_requests=1, **flags) as engine:
        for i in range(5):
            ends = {"ignore_eos": False, "min_new_tokens": 3, "logit_bias": {EOS: 100.0}} if i % 2 else {}
            options = LogprobOptions(-1, 2)
            engine.add(f"r{i}", list(range(20, 26 + i)), logprobs=options, seed=i, **{**SAMPLING, **ends})
        engine.run()
    return engine, {"tokens": engine.tokens, "finish": engine.finish, "logprobs": engine.logprobs}


def test_the_next_owner_of_a_slot_has_nothing_of_a_wasted_draw(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    plain, expected = answers(path, depth=1)
    overlapped, got = answers(path, depth=2, stream="threaded", stream_delay_s=0.0005)
    assert got == expected
    assert plain.parts.scheduler.counters.wasted_samples == 0
    assert overlapped.parts.scheduler.counters.wasted_samples == 2
    assert [len(overlapped.tokens[f"r{i}"]) for i in range(5)] == [12, 4, 12, 4, 12]
