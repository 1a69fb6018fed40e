"""Several ranks answer as one does: tensor parallel, pipeline stages, and both.

The wide model needs every KV head of every layer, so a rank whose part is wrong or late shows in the tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.messages import LogprobOptions
from engine.model_files.model_config import WIDE_MODEL_PATH
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks_in_process import ranks

FLAGS = {"chunked_prefill_size": 64, "page_size": 4, "num_threads": 1, "max_total_tokens": 2048}
PROMPTS = [(150, 1), (7, 2), (64, 3), (33, 4), (7, 2), (90, 6)]  # (length, seed): chunks, a prompt twice
SHAPES = [(2, 1), (4, 1), (1, 2), (2, 2)]


@contextmanager
def engine_of(tp_size: int, pp_size: int, **flags: Any) -> Iterator[EngineInProcess]:
    if tp_size * pp_size == 1:
        with EngineInProcess(WIDE_MODEL_PATH, **flags) as engine:
            yield engine
    else:
        with ranks(WIDE_MODEL_PATH, tp_size=tp_size, pp_size=pp_size, **flags) as group:
            yield group.engine


def answers(tp_size: int, pp_size: int, **flags: Any) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Tokens, and their logprobs and those of the prompts."""
    with engine_of(tp_size, pp_size, **{**FLAGS, **flags}) as engine:
        for i, (length, seed) in enumerate(PROMPTS):
            sampling = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i, "repetition_penalty": 1.1}
            engine.add(
                str(i), prompt_of(length, seed), logprobs=LogprobOptions(start_len=3), max_new_tokens=12, **sampling
            )
        engine.run()
        logprobs = {
            rid: [entry.logprob for entry in [*engine.input_logprobs[rid], *engine.logprobs[rid]]]
            for rid in engine.tokens
        }
        return engine.tokens, logprobs


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    return answers(1, 1)


@pytest.mark.parametrize(("tp_size", "pp_size"), SHAPES)
@pytest.mark.parametrize("stream", ["auto", "threaded"])
def test_tokens_and_logprobs(
    alone: tuple[dict[str, list[int]], dict[str, list[float]]], tp_size: int, pp_size: int, stream: str
) -> None:
    tokens, logprobs = answers(tp_size, pp_size, stream=stream)
    assert tokens == alone[0]
    for rid, values in alone[1].items():
        assert logprobs[rid] == pytest.approx(values, abs=0.05), rid
