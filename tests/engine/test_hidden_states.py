"""Hidden states, embeddings and logprobs of chosen ids of a real engine against transformers, however a prompt is computed."""

import array
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from engine.core.outputs import StepEffects
from engine.messages import LogprobOptions, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import new_request
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.kinds import usual
from tests.models.float64_oracle import Float64Oracle

NEW_TOKENS = 6
LONG = prompt_of(100, 2)  # of all tests: the oracle answers once
WAYS = {
    "whole": {},
    "chunked": {"chunked_prefill_size": 64, "page_size": 4},
    "overlap": {"chunked_prefill_size": 64, "stream": "threaded", "stream_delay_s": 0.001},
    "mixed": {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
}


@dataclass
class Said:
    """All outputs of a request, joined."""

    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)


class Engine(EngineInProcess):
    def ask(self, rid: str, prompt: list[int], *, new: int = NEW_TOKENS, **wanted: object) -> None:
        request = new_request(
            rid=rid,
            input_ids=prompt,
            sampling=SamplingParams(max_new_tokens=new, temperature=0.0, seed=0, ignore_eos=True),
            eos_ids=frozenset(),
            arrived_s=0.0,
            **wanted,  # type: ignore[arg-type]
        )
        assert self.parts.scheduler.add(request) == []

    def answers(self) -> dict[str, Said]:
        self.said: dict[str, Said] = {}
        self.run()
        return self.said

    def collect(self, effects: StepEffects) -> list[TokenOutput]:
        for output in effects.outputs:
            one = self.said.setdefault(output.rid, Said())
            one.outputs.append(output)
            one.tokens += output.new_ids
            blocks = [output.input_hidden] if output.input_hidden else []
            one.rows += [torch.tensor(array.array("f", b)).view(-1, 64) for b in [*blocks, *output.hidden]]
        return effects.outputs


@usual()  # a family's logits, which follow from them: test_parity.py
@pytest.mark.parametrize("way", WAYS)
def test_hidden_states_equal_transformers(checkpoint: str, oracle: Float64Oracle, way: str) -> None:
    """Twice: what is cached is computed again, because its states are wanted."""
    prompts = {"short": prompt_of(5, 1), "long": LONG}
    with Engine(checkpoint, **WAYS[way]) as engine:
        for _ in range(2):
            for rid, prompt in prompts.items():
                engine.ask(rid, prompt, return_hidden_states=True)
            for rid, said in engine.answers().items():
                prompt = prompts[rid]
                assert len(said.rows[0]) == len(prompt) and len(said.rows) == len(said.tokens) == NEW_TOKENS
                oracle.states([*prompt, *said.tokens[:-1]]).check(torch.cat(said.rows))


POOLED = {("whole", "mean"), ("chunked", "last"), ("chunked", "mean"), ("overlap", "last")}


@usual()  # pooling begins where a family ends: with the states that the test above compares
@pytest.mark.parametrize(
    ("way", "pooling"),
    [
        pytest.param(*cell, marks=() if cell in POOLED else pytest.mark.slow)
        for cell in product(("whole", "chunked", "overlap"), ("last", "mean"))
    ],
)
def test_embeddings_equal_transformers_and_keep_no_kv(
    checkpoint: str, oracle: Float64Oracle, way: str, pooling: str
) -> None:
    prompts = {"one": prompt_of(1, 1), "page": prompt_of(16, 16), "long": LONG[:90]}
    with Engine(checkpoint, **WAYS[way]) as engine:
        for rid, prompt in prompts.items():
            engine.ask(rid, prompt, new=0, pooling=pooling, keep_kv=False)
        answers = engine.answers()
        assert engine.parts.scheduler.memory.allocator.counts()["cached"] == 0
    for rid, prompt in prompts.items():
        said = answers[rid]
        assert said.tokens == [] and len(said.rows) == 1
        oracle.states(prompt).map(lambda states: pooled(states, pooling)).check(said.rows[0])


def pooled(states: torch.Tensor, pooling: str) -> torch.Tensor:
    """[..., 1, hidden], of length 1, of [..., tokens, hidden]."""
    vector = states[..., -1:, :] if pooling == "last" else states.mean(-2, keepdim=True)
    return torch.nn.functional.normalize(vector, dim=-1)


@usual()
@pytest.mark.parametrize("way", WAYS)
def test_logprobs_of_chosen_ids_equal_transformers(checkpoint: str, oracle: Float64Oracle, way: str) -> None:
    prompt, ids = LONG, (271, 17, 40)
    with Engine(checkpoint, **WAYS[way]) as engine:
        engine.ask("r", prompt, logprobs=LogprobOptions(3, 1, ids))
        said = engine.answers()["r"]
    exact = oracle.logprobs([*prompt, *said.tokens])
    bounds = exact.bound().tolist()
    entries = [*said.outputs[0].input_logprobs, *(lp for output in said.outputs for lp in output.logprobs)]
    assert len(entries) == len(prompt) - 3 + NEW_TOKENS
    for position, entry in enumerate(entries, 3):
        assert [i for _, i in entry.requested] == list(ids)
        expected = exact.value[position - 1, list(ids)].tolist()
        assert [value for value, _ in entry.requested] == pytest.approx(expected, rel=0.0, abs=bounds[position - 1])
        assert len(entry.top) == 1
