"""With drafts the engine gives the tokens, logprobs and hidden states of plain decoding, whatever else is on."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.request import Grammar
from engine.device.step_memory import EngineUse
from engine.grammar.compiler import GrammarCompiler
from engine.kernels.linear import linear_kernel
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import load_tokenizer
from tests.engine.drafts.drafters import Answers, ask_all
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks
from tests.models.tiny_checkpoints import EOS, VOCAB_SIZE, make_tiny_checkpoint

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}
NEW = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16")


def answers(path: str, **flags: Any) -> Answers:
    with EngineInProcess(path, **flags) as engine:
        said = ask_all(engine, new=NEW)
        counters = engine.parts.scheduler.counters
        assert (counters.accepted_drafts > 20) == (flags.get("speculative_algorithm") is not None), counters
        return said


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Answers:
    return answers(checkpoint)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunked": {"chunked_prefill_size": 16},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {
        "test_retract": 5,
        "use": EngineUse(retracted_kv="host"),
    },  # computed again, KV of an answer would round otherwise
    "uncached": {"disable_radix_cache": True},
    "without tapes": {"disable_cuda_graph": True},
    "short drafts": {"speculative_num_draft_tokens": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_plain_decoding(checkpoint: str, plain: Answers, way: str) -> None:
    assert answers(checkpoint, **NGRAM, **WAYS[way]) == plain


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3", "mixtral"])
def test_windows_latents_and_experts(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path / family, family, dtype="bfloat16")
    assert answers(path, **NGRAM) == answers(path)


@pytest.mark.skipif(linear_kernel() is None, reason="--reduce-units needs the C kernel")
def test_ranks(checkpoint: str) -> None:
    with ranks(checkpoint, tp_size=2, reduce_units=2, num_threads=1) as group:
        wanted = ask_all(group.engine, new=NEW)
    with ranks(checkpoint, tp_size=2, reduce_units=2, num_threads=1, **NGRAM) as group:
        assert ask_all(group.engine, new=NEW) == wanted
        assert group.engine.parts.scheduler.counters.accepted_drafts > 20


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "nationality": {"enum": ["french", "finnish"]}},
    "required": ["name", "nationality"],
    "additionalProperties": False,
}


def in_grammar(path: str, **flags: Any) -> tuple[Any, int]:
    tokenizer = load_tokenizer(Path(path))
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_ids=[EOS], any_whitespace=False)
    start = compiler.compile(GrammarSpec("json_schema", json.dumps(SCHEMA)))
    with EngineInProcess(path, **flags) as engine:
        for i in range(4):
            grammar: Grammar = start()
            engine.add(f"r{i}", [20 + i] * 30, grammar=grammar, max_new_tokens=80, temperature=1.0, seed=i)
            engine.add(f"plain{i}", [20 + i] * 30, max_new_tokens=10, temperature=1.0, seed=i)
        engine.run()
        for i in range(4):
            assert json.loads(tokenizer.decode(engine.tokens[f"r{i}"], skip_special_tokens=True))["name"] in (
                "ada",
                "bob",
            )
        return (engine.tokens, engine.logprobs), engine.parts.scheduler.counters.steps


def test_what_a_grammar_forces_takes_fewer_steps(checkpoint: str) -> None:
    """Without the flag, too; at any depth, and the answers are those of one token a step."""
    wanted, steps = in_grammar(checkpoint, grammar_backend="none")
    for flags in ({}, NGRAM, {"stream": "threaded", "stream_delay_s": 0.001}, {"test_retract": 5}):
        said, fewer = in_grammar(checkpoint, **flags)
        assert said == wanted
        assert "test_retract" in flags or fewer < 0.7 * steps
