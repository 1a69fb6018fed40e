"""Models with recurrent states in the whole engine: prefix hits, batches and cuts leave the bits of every token as they are."""

from typing import Any

import pytest
import torch

from engine.core.mem_cache.radix_cache import Node
from engine.core.mem_cache.state_slots import StateSlots
from engine.device.step_memory import EngineUse
from engine.kernels.recurrent import delta_kernel
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


def test_a_state_copied_to_the_host_comes_back_in_every_bit(checkpoint: str) -> None:
    *right, _ = served(checkpoint, at_once=True)
    flags = {**FLAGS, "test_retract": 3}
    with EngineInProcess(checkpoint, use=EngineUse(retracted_kv="host"), **flags) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(str(i), prompt, max_new_tokens=12, logprobs=LogprobOptions())
        engine.run()
        names = [str(i) for i in range(len(PROMPTS))]
        assert [engine.tokens[name] for name in names] == right[0]
        assert [[entry.logprob for entry in engine.logprobs[name]] for name in names] == right[1]
        counters = engine.parts.scheduler.counters
        assert counters.resumed_restored >= 3 and counters.resumed_computed == 0


@pytest.mark.skipif(
    delta_kernel() is None, reason="torch takes prompts in chunks: an answer's states have other last bits"
)
def test_the_next_turn_of_a_chat_goes_on_from_the_answer(checkpoint: str) -> None:
    """The state after 256 tokens, of which it has computed most one by one, has the bits of a prompt's; so have the tokens behind it.

    Attention reads KV of an answer, which single tokens round otherwise: of states the first layer's alone, whose inputs are embeddings.
    """
    prompt, more = prompt_of(70, 5), prompt_of(9, 6)
    with EngineInProcess(checkpoint, **FLAGS, stream="threaded", stream_delay_s=0.0002) as engine:
        engine.answer("turn", prompt, max_new_tokens=200, ignore_eos=True)
        chat = [*prompt, *engine.tokens["turn"], *more]
        made = states_at(engine, 256)
        engine.answer("next", chat, max_new_tokens=12)
        assert engine.cached["next"] == 256
        answer = engine.tokens["next"]
    with EngineInProcess(checkpoint, **FLAGS) as engine:
        engine.answer("whole", chat[:257], max_new_tokens=1)
        right = states_at(engine, 256)
        engine.answer("next", chat, max_new_tokens=12)
        assert answer == engine.tokens["next"]
    assert all(torch.equal(one, other) for one, other in zip(made[0], right[0], strict=True))
    assert all(
        torch.allclose(one.float(), other.float(), atol=0.05) for one, other in zip(made[1], right[1], strict=True)
    )


def states_at(engine: EngineInProcess, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of both states of each recurrent layer in the snapshot after so many tokens."""
    states, pool = engine.parts.scheduler.memory.part(StateSlots), engine.parts.device.states
    assert states is not None and pool is not None
    [slot] = [slot for slot, node in states._nodes.items() if _length(node) == num_tokens]
    return [(pool.conv(i)[slot].clone(), pool.recurrent(i)[slot].clone()) for i in range(len(pool.specs))]


def _length(node: Node | None) -> int:
    return 0 if node is None else len(node.key) + _length(node.parent)
