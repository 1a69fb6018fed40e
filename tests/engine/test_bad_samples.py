"""Draws that are no answer, in a whole engine: each ends its own request with a typed reason, nobody else notices."""

from pathlib import Path

import pytest
import torch

from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import VOCAB_SIZE, edit_tensors, make_tiny_checkpoint

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


def run(path: str, *, hurt: list[int] | None, num_token_ids: int | None = None, **flags: object) -> EngineInProcess:
    with EngineInProcess(path, num_token_ids=num_token_ids, **flags) as engine:
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
def test_a_row_of_the_head_that_is_no_token_ends_one_request(checkpoint: str, way: str) -> None:
    """The head has one row more than the tokenizer has tokens, and a request draws it."""
    alone = run(checkpoint, hurt=None, **WAYS[way])
    engine = run(checkpoint, hurt=[30, 31], num_token_ids=VOCAB_SIZE - 1, **WAYS[way])
    finish = engine.finish.pop("hurt")
    assert (finish.kind, finish.status) == ("abort", 500)
    assert f"token {VOCAB_SIZE - 1}" in finish.message and engine.tokens.pop("hurt") == []
    assert engine.tokens == alone.tokens and engine.finish == alone.finish
