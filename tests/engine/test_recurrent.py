"""Models with recurrent states in the whole engine: prefix hits, batches and cuts leave the bits of every token as they are."""

from typing import Any

import pytest

from engine.messages import LogprobOptions
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.models.tiny_checkpoints import make_tiny_checkpoint

SHARED = prompt_of(150, 7)
PROMPTS = [SHARED + prompt_of(20, 1), SHARED + prompt_of(3, 2), SHARED[:130] + prompt_of(40, 3), prompt_of(5, 4)]
FLAGS: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048, "num_threads": 1, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("recurrent") / "qwen3_5", "qwen3_5_text", dtype="bfloat16")


def served(path: str, *, at_once: bool, **flags: Any) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Tokens, their logprobs and cached tokens of each prompt."""
    with EngineInProcess(path, **FLAGS, **flags) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(str(i), prompt, max_new_tokens=12, logprobs=LogprobOptions())
            if not at_once:
                engine.run()
        engine.run()
        names = [str(i) for i in range(len(PROMPTS))]
        logprobs = [[entry.logprob for entry in engine.logprobs[name]] for name in names]
        return [engine.tokens[name] for name in names], logprobs, [engine.cached[name] for name in names]


def test_prefix_hits_batches_and_cuts_leave_all_bits(checkpoint: str) -> None:
    """The last grid position of a shared prompt has a snapshot: a later request goes on from there."""
    *cold, none = served(checkpoint, at_once=False, disable_radix_cache=True)
    assert none == [0, 0, 0, 0]
    *warm, cached = served(checkpoint, at_once=False)
    assert warm == cold
    assert cached == [0, 128, 128, 0]
    for flags in (
        {},
        {"chunked_prefill_size": 64},
        {"stream": "threaded", "stream_delay_s": 0.001},
    ):
        *same, _ = served(checkpoint, at_once=True, **flags)
        assert same == cold, flags
