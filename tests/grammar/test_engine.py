"""Grammars in a whole engine, random weights: whatever the model would like to say, the answer is in the grammar."""

import json
import re
import threading
from pathlib import Path

import pytest

from engine.core.plan import Plan
from engine.executor.executor import Launch
from engine.executor.passes import StepOutput
from engine.executor.step_part import Forward
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import Compiler
from engine.sampling_params import GrammarSpec
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import EOS, VOCAB_SIZE, make_tiny_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "regex": GrammarSpec("regex", r"[a-c]{3,9}-[0-9]+;"),
    "ebnf": GrammarSpec("ebnf", 'root ::= "yes" | "no" | "no, " root'),
    "lark": GrammarSpec("ebnf", 'start: "[" WORD ("," WORD)* "]"\nWORD: /[a-z]{1,4}/'),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: str) -> Tokenizer:
    return load_tokenizer(Path(checkpoint))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_ids=[EOS], any_whitespace=False)


def run(path: str, compiler: Compiler, **flags: object) -> EngineInProcess:
    """Every grammar four times with a random seed, and plain requests beside them."""
    with EngineInProcess(path, **flags) as engine:
        for i in range(4):
            prompt = list(range(20, 30 + 7 * i))
            engine.add(f"plain-{i}", prompt, max_new_tokens=40, temperature=1.0, seed=i)
            for name, spec in SPECS.items():
                rid = f"{name}-{i}"
                grammar = compiler.compile(spec)()
                engine.add(rid, prompt, grammar=grammar, max_new_tokens=80, temperature=1.0, seed=i, ignore_eos=False)
        engine.run()
    return engine


def text_of(tokenizer: Tokenizer, engine: EngineInProcess, rid: str) -> str:
    return tokenizer.decode(engine.tokens[rid], skip_special_tokens=True)


@pytest.fixture(scope="module")
def reference(checkpoint: str, compiler: Compiler) -> EngineInProcess:
    return run(checkpoint, compiler)


def test_every_answer_is_in_its_grammar(reference: EngineInProcess, tokenizer: Tokenizer) -> None:
    for i in range(4):
        answer = json.loads(text_of(tokenizer, reference, f"schema-{i}"))
        assert answer["name"] in ("ada", "bob") and 0 <= answer["age"] <= 150 and set(answer) == {"name", "age"}
        assert re.fullmatch(r"(no, )*(yes|no)", text_of(tokenizer, reference, f"ebnf-{i}"))
        if reference.finish[f"regex-{i}"].kind == "stop":
            assert re.fullmatch(r"[a-c]{3,9}-[0-9]+;", text_of(tokenizer, reference, f"regex-{i}"))
        if reference.finish[f"lark-{i}"].kind == "stop":
            assert re.fullmatch(r"\[[a-z]{1,4}(,[a-z]{1,4})*\]", text_of(tokenizer, reference, f"lark-{i}"))
        assert reference.finish[f"schema-{i}"].kind == "stop"
    kinds = {reference.finish[rid].kind for rid in reference.tokens if not rid.startswith("plain")}
    assert "stop" in kinds and "abort" not in kinds


def test_a_forward_is_launched_while_the_token_before_it_is_not_sampled(checkpoint: str, compiler: Compiler) -> None:
    """The stream is held at the first step: the second one's forward is on it all the same, and its sampling is not."""
    engine = EngineInProcess(checkpoint, stream="threaded")
    runner = engine.parts.device.executor.runner
    order: list[str] = []
    gate = threading.Event()
    launch_forward, sample = engine.parts.device.executor.launch_forward, runner.sample

    def launch_and_open(plan: Plan) -> Launch:
        launch = launch_forward(plan)
        order.append(f"forward {plan.seq} launched")
        gate.set()
        return launch

    def held_sample(plan: Plan, forward: Forward | None) -> StepOutput:
        assert gate.wait(60.0)
        order.append(f"sample {plan.seq}")
        return sample(plan, forward)

    engine.parts.device.executor.launch_forward, runner.sample = launch_and_open, held_sample  # type: ignore[method-assign]
    try:
        grammar = compiler.compile(SPECS["regex"])()
        engine.add("r", [20, 21], grammar=grammar, max_new_tokens=2, temperature=1.0, seed=1)
        engine.run()
    finally:
        gate.set()
        engine.close()
    assert order == ["forward 2 launched", "sample 1", "sample 2"]


WAYS = {
    "depth-2": {"stream": "threaded", "stream_delay_s": 0.001},
    "depth-2-mixed": {"stream": "threaded", "enable_mixed_chunk": True, "chunked_prefill_size": 16},
    "depth-2-multiplexed": {"enable_pdmux": True, "stream_delay_s": 0.001, "chunked_prefill_size": 16},
    "few-slots": {"max_running_requests": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_depth_or_batch(
    checkpoint: str, compiler: Compiler, reference: EngineInProcess, way: str
) -> None:
    engine = run(checkpoint, compiler, **WAYS[way])
    assert engine.tokens == reference.tokens
    assert (engine.parts.scheduler.counters.deferred_samples > 0) == way.startswith("depth-2")
    assert {rid: f.kind for rid, f in engine.finish.items()} == {rid: f.kind for rid, f in reference.finish.items()}


def test_an_end_token_in_the_grammar_is_reported(checkpoint: str, compiler: Compiler) -> None:
    """After `[ab]+` the text may go on or end: the sampled end token ends it, ignore_eos or not."""
    for ignore_eos in (False, True):
        grammar, bias = compiler.compile(GrammarSpec("regex", "[ab]+"))(), {EOS: 20.0}
        with EngineInProcess(checkpoint) as engine:
            engine.add("r", [20, 21], grammar=grammar, max_new_tokens=500, logit_bias=bias, ignore_eos=ignore_eos)
            engine.run()
        assert engine.finish["r"].kind == "stop" and engine.finish["r"].matched == EOS
        assert engine.tokens["r"][-1] == EOS and len(engine.tokens["r"]) >= 2


def test_min_new_tokens_gives_way_where_only_the_end_is_left(checkpoint: str, compiler: Compiler) -> None:
    """`a` or an end token: before min_new_tokens the end is banned, and after `aa` nothing else is possible."""
    engine = EngineInProcess(checkpoint)
    grammar = compiler.compile(GrammarSpec("ebnf", 'start: "a" "a" b?\nb: "c"'))()
    never_c = {i: -100.0 for i in range(16, 272)}
    engine.add("r", [20], grammar=grammar, max_new_tokens=9, min_new_tokens=9, logit_bias=never_c, ignore_eos=False)
    engine.run()
    engine.close()
    assert engine.finish["r"].kind == "stop"
