"""What a worker of one rank can do, one of several does alike: the same answers to the bit, and what must reach every rank did.

`--reduce-units 4` makes the sums of 1, 2 and 4 ranks equal. Each feature says how often it was at work (`Answers.used`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.mem_cache.host_cache import HostCache
from engine.device.step_memory import EngineUse
from engine.kernels.linear import linear_kernel
from engine.kv.kv_pool import KVPool
from engine.messages import FinishReason, LogprobOptions
from engine.ranks.rank_checksum import GroupChecksum, RankChecksum, alone
from engine.ranks.rank_parts import RankPools
from service.flags import ConfigError
from service.kv_events import BlockStored
from tests.cells import some
from tests.engine.engine_in_process import EngineInProcess, prompt_of
from tests.engine.ranks.ranks_in_process import FOR_RANKS, ranks
from tests.engine.ranks.test_ranks import FLAGS as OF_RANKS
from tests.grammar.fixed import Fixed
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint

SIZES = {**FOR_RANKS, "intermediate_size": 128}
FLAGS: dict[str, Any] = {**OF_RANKS, "reduce_units": 4, "kv_units": 4}
SHAPES = ((2, 1), (1, 2), (2, 2))  # --tp-size, --pp-size
PROMPTS = {"a": prompt_of(150, 1), "b": prompt_of(9, 2), "c": prompt_of(70, 3)}
DEADLINE_S = 30.0
ROUNDING = 0.3  # of logprobs of a tiny model in bf16: 0.11 was seen, an adapter changes 6

pytestmark = pytest.mark.skipif(linear_kernel() is None, reason="--reduce-units needs the C kernel")


@dataclass(frozen=True)
class Paths:
    model: str
    other: str
    adapter: str
    larger: str


@dataclass
class Answers:
    """`values`: whatever the feature gives; equal for all shapes. `used`: how often it was at work."""

    values: Any
    used: dict[str, float] = field(default_factory=dict)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("features")
    model, other = (
        make_tiny_checkpoint(folder / f"model-{seed}", "qwen3", seed=seed, dtype="bfloat16", **SIZES) for seed in (0, 1)
    )
    larger = make_tiny_checkpoint(folder / "larger", "qwen3", dtype="bfloat16", **{**SIZES, "intermediate_size": 256})
    return Paths(model, other, make_tiny_adapter(folder / "adapter", model, seed=1), larger)


def run(engine: EngineInProcess, suffix: str = "", prompts: Mapping[str, list[int]] = PROMPTS, **more: Any) -> Answers:
    """Tokens and the logprobs of prompts and tokens."""
    for seed, (name, prompt) in enumerate(prompts.items()):
        asked = {"temperature": 0.9, "seed": seed, "max_new_tokens": 10, "logprobs": LogprobOptions(2, 2), **more}
        engine.add(name + suffix, prompt, **asked)
    engine.run()
    return said(engine, [name + suffix for name in prompts])


def said(engine: EngineInProcess, rids: list[str]) -> Answers:
    entries = {
        rid: [(e.token_id, e.logprob, e.top) for e in [*engine.input_logprobs[rid], *engine.logprobs[rid]]]
        for rid in rids
    }
    return Answers(([engine.tokens[rid] for rid in rids], [entries[rid] for rid in rids]))


# ---- features


def plain(engine: EngineInProcess, paths: Paths) -> Answers:
    answers = run(engine)
    answers.used = {"steps": engine.parts.scheduler.counters.steps}
    return answers


def many_prompt_logprobs(engine: EngineInProcess, paths: Paths) -> Answers:
    """Positions of one step whose logits do not all exist at once."""
    answers = run(engine, prompts={"long": prompt_of(700, 5), "short": prompt_of(20, 6)}, max_new_tokens=3)
    answers.used = {"positions": len(engine.input_logprobs["long"]) - 600}
    return answers


def hidden_states(engine: EngineInProcess, paths: Paths) -> Answers:
    run(engine, wanted={"return_hidden_states": True})
    values = [engine.hidden[name] for name in PROMPTS]
    run(engine, "-pooled", max_new_tokens=0, logprobs=None, wanted={"pooling": "mean", "keep_kv": False})
    values += [engine.hidden[f"{name}-pooled"] for name in PROMPTS]
    return Answers(values, {"rows": len(values[0][0]) // (4 * 128) - 149, "vectors": len(values[3])})


def penalties(engine: EngineInProcess, paths: Paths) -> Answers:
    asked = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_new_tokens": 4}
    answers = run(engine, **asked, logit_bias={60: 3.0}, top_k=40, top_p=0.9, min_p=0.01)
    answers.used = {"changed": answers.values != run(engine, "-plain").values}
    return answers


MULTIPLES = {7 * i for i in range(20)}


def moved_by_the_last(before: Sequence[int], token: int) -> bool:
    """A rule of a grammar: multiples of 7, moved by the token before."""
    return 16 <= token < 266 and (token - 16 - (before[-1] if before else 0)) % 250 in MULTIPLES


def grammars(engine: EngineInProcess, paths: Paths) -> Answers:
    grammar = {name: Fixed(8, moved_by_the_last, vocab_size=engine.model.vocab_size) for name in PROMPTS}
    for seed, (name, prompt) in enumerate(PROMPTS.items()):
        engine.add(name, prompt, grammar=grammar[name], temperature=1.0, seed=seed, max_new_tokens=8)
        engine.add(f"{name}-free", prompt, temperature=1.0, seed=seed, max_new_tokens=8)
    engine.run()
    deferred = engine.parts.scheduler.counters.deferred_samples if engine.parts.config.pp_size == 1 else 1
    return Answers(engine.tokens, {"masked": len(grammar["a"].seen), "deferred": deferred})


@dataclass(frozen=True, eq=False)
class Near:
    """Logprobs of prompts by sums that are not cut into units: other shapes, and other CPUs, round them otherwise."""

    logprobs: list[float]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and self.logprobs == pytest.approx(other.logprobs, abs=ROUNDING)

    def is_far_from(self, other: "Near") -> bool:
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)) > 10 * ROUNDING


def of_prompts(engine: EngineInProcess, suffix: str) -> Near:
    entries = [entry for name in PROMPTS for entry in engine.input_logprobs[name + suffix]]
    return Near([entry.logprob for entry in entries if entry.logprob is not None])


def adapters(engine: EngineInProcess, paths: Paths) -> Answers:
    """An adapter that loads, one that is refused, and an end."""
    before, store = run(engine), engine.parts.adapters
    assert store is not None
    store.install(1, store.read(paths.adapter))
    with pytest.raises(ConfigError):
        store.read(str(Path(paths.adapter).parent / "none"))
    run(engine, "-adapted", adapter=1)
    adapted, plain_ones = of_prompts(engine, "-adapted"), of_prompts(engine, "")
    store.remove(1)
    after = run(engine, "-after", wanted={"namespace": ("again",)})
    assert after.values == before.values
    return Answers((before.values, adapted), {"changed": adapted.is_far_from(plain_ones)})


def other_weights(engine: EngineInProcess, paths: Paths) -> Answers:
    """A checkpoint that does not fit, one that cannot be read, then another."""
    weights, before = engine.parts.weights, run(engine)
    broken = Path(paths.model).parent / "broken"
    make_tiny_checkpoint(broken, "qwen3", dtype="bfloat16", **SIZES)
    (broken / "model.safetensors").write_bytes(b"0" * 100)
    for path in (paths.larger, str(broken)):
        with pytest.raises(ConfigError):
            weights.read(path, when_done=lambda: None).result(DEADLINE_S)
        engine.parts.scheduler.forget_prefixes()
        assert run(engine, f"-{Path(path).name}").values == before.values
    model = weights.read(paths.other, when_done=lambda: None).result(DEADLINE_S)
    weights.discard(model)
    model = weights.read(paths.other, when_done=lambda: None).result(DEADLINE_S)
    engine.parts.scheduler.forget_prefixes()
    weights.take(model, model_path=paths.other, version="v2")
    after = run(engine, "-after")
    return Answers((before.values, after.values), {"changed": before.values != after.values})


def pauses(engine: EngineInProcess, paths: Paths) -> Answers:
    """All requests retracted in the middle, the cache flushed at the end."""
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, logprobs=LogprobOptions(2, 2), max_new_tokens=10)
    while not all(len(engine.tokens.get(name, [])) > 3 for name in PROMPTS):
        assert engine.turn()
    while engine.pipeline.num_launched:
        engine.hear(engine.pipeline.advance(None))
    retracted = engine.parts.scheduler.retract_all()
    engine.run()
    assert engine.parts.scheduler.flush_cache()
    answers = said(engine, list(PROMPTS))
    answers.values = (answers.values, run(engine, "-flushed").values)
    answers.used = {"retracted": retracted, "computed again": engine.cached["a-flushed"] == 0}
    return answers


def aborts(engine: EngineInProcess, paths: Paths) -> Answers:
    """Two requests end in flight."""
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, logprobs=LogprobOptions(2, 2), max_new_tokens=10)
    for rid in ("gone", "gone too"):
        engine.add(rid, prompt_of(90, 7), max_new_tokens=100)
    while not engine.tokens.get("gone"):
        assert engine.turn()
    assert engine.pipeline.num_launched
    for rid in ("gone", "gone too"):
        engine.parts.scheduler.abort(rid, FinishReason(kind="abort"))
    engine.run()
    answers = said(engine, list(PROMPTS))
    answers.used = {"aborted": engine.parts.scheduler.counters.aborted - 1}
    return answers


def computed_again(engine: EngineInProcess, paths: Paths) -> Answers:
    answers, counters = run(engine, max_new_tokens=16), engine.parts.scheduler.counters
    answers.used = {"retractions": counters.retractions, "computed again": counters.resumed_computed}
    return answers


def restored(engine: EngineInProcess, paths: Paths) -> Answers:
    answers = run(engine, max_new_tokens=16)
    answers.used = {"restored": engine.parts.scheduler.counters.resumed_restored}
    return answers


def host_cache(engine: EngineInProcess, paths: Paths) -> Answers:
    """More prefixes than the device holds, twice."""
    prompts = {f"{i}": prompt_of(60, 50 + i) for i in range(8)}
    values = [
        [
            run(engine, f"-{turn}", prompts={name: prompt}, max_new_tokens=4, logprobs=None).values
            for name, prompt in prompts.items()
        ]
        for turn in range(2)
    ]
    assert values[0] == values[1]
    host = engine.parts.scheduler.memory.part(HostCache)
    assert host is not None
    counters = host.counted
    return Answers(values, {"from the host": counters["hicache_host_hit_tokens"]})


def host_ahead(engine: EngineInProcess, paths: Paths) -> Answers:
    """The prefixes of requests that wait come to the device before their turn, in steps of copies or with others' work."""
    host = engine.parts.scheduler.memory.part(HostCache)
    assert host is not None
    host.ahead_pages = 100
    prompts = {f"{i}": prompt_of(60, 50 + i) for i in range(8)}
    for name, prompt in prompts.items():
        run(engine, "-first", prompts={name: prompt}, max_new_tokens=4, logprobs=None)
    again = run(engine, "-again", prompts=prompts, max_new_tokens=4, logprobs=None)
    return Answers(again.values, {"ahead": host.counted["hicache_loaded_ahead_pages"]})


def prefixes(engine: EngineInProcess, paths: Paths) -> Answers:
    first, again = run(engine), run(engine, "-again", logprobs=None)
    assert first.values[0] == again.values[0]
    on = not engine.parts.config.disable_radix_cache
    assert (engine.cached["a-again"] > 0) == on
    return Answers(first.values, {"asked": 1})


def priorities(engine: EngineInProcess, paths: Paths) -> Answers:
    """A request that preempts those that run."""
    for name in PROMPTS:
        engine.add(name, PROMPTS[name], logprobs=LogprobOptions(2, 2), max_new_tokens=10)
    while not all(engine.tokens.get(name) for name in ("a", "b")):
        assert engine.turn()
    engine.answer("first", prompt_of(30, 9), logprobs=LogprobOptions(2, 2), max_new_tokens=10, wanted={"priority": 100})
    answers = said(engine, [*PROMPTS, "first"])
    answers.used = {"preemptions": engine.parts.scheduler.counters.preemptions}
    return answers


def mixed_chunks(engine: EngineInProcess, paths: Paths) -> Answers:
    answers = run(engine, prompts={**PROMPTS, "d": prompt_of(300, 4)})
    answers.used = {"mixed": engine.parts.scheduler.counters.mixed_steps}
    return answers


def checksums(engine: EngineInProcess, paths: Paths) -> Answers:
    """Of the KV of one prompt: what all ranks hold is what one would."""
    run(engine, prompts={"a": PROMPTS["a"]})
    kept = engine.parts.scheduler.memory.allocator.counts()["cached"]
    return Answers(checksum_of(engine), {"pages": kept})


def checksum_of(engine: EngineInProcess) -> int:
    """Of the KV that the prefix cache keeps, over all ranks."""
    parts = engine.parts
    own = RankChecksum(RankPools(kv=parts.pool, held=parts.held))
    pages = range(1, 1 + parts.scheduler.memory.allocator.counts()["cached"])
    value = (alone(own) if parts.group is None else GroupChecksum(own, parts.group.followers))(pages, (), None)
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := value()) is None:
        assert time.monotonic() < deadline_s
    return found


def kv_events(engine: EngineInProcess, paths: Paths) -> Answers:
    """What a worker publishes: the pages of its prefix cache, each once."""
    run(engine)
    parts = engine.parts
    assert parts.events is not None
    stored = [event for event in parts.events.take() if isinstance(event, BlockStored)]
    names = [name for event in stored for name in event.block_hashes]
    assert len(set(names)) == len(names) == parts.scheduler.memory.allocator.counts()["cached"]
    return Answers(sorted(event.token_ids for event in stored), {"pages": len(names)})


@dataclass(frozen=True)
class Feature:
    drive: Callable[[EngineInProcess, Paths], Answers]
    flags: Mapping[str, Any] = field(default_factory=dict)
    use: EngineUse | None = None
    shapes: Sequence[tuple[int, int]] = SHAPES


FEATURES = {
    "plain": Feature(plain),
    "threaded": Feature(plain, {"stream": "threaded", "stream_delay_s": 0.001}),
    "prompt logprobs": Feature(many_prompt_logprobs, {"chunked_prefill_size": 640}),
    "hidden states": Feature(hidden_states),
    "penalties": Feature(penalties),
    "grammars": Feature(grammars, {"stream": "threaded"}),
    "adapters": Feature(adapters, {"enable_lora": True}),
    "weights": Feature(other_weights),
    "pauses": Feature(pauses),
    "aborts": Feature(aborts, {"stream": "threaded"}),
    # Stages retract at other steps, and what is computed again as a prompt has other bits: test_ranks.py compares tokens
    "retraction": Feature(computed_again, {"test_retract": 3}, shapes=((2, 1), (4, 1))),
    "retraction to the host": Feature(restored, {"test_retract": 3}, EngineUse(retracted_kv="host")),
    "host cache": Feature(
        host_cache, {"enable_hierarchical_cache": True, "max_total_tokens": 160, "hicache_ratio": 4.0}
    ),
    "host cache, late writes": Feature(
        host_cache,
        {
            "enable_hierarchical_cache": True,
            "max_total_tokens": 160,
            "hicache_ratio": 4.0,
            "hicache_write_policy": "write_back",
            "stream": "threaded",
        },
    ),
    "host cache, loaded ahead": Feature(
        host_ahead,
        {
            "enable_hierarchical_cache": True,
            "max_total_tokens": 320,
            "hicache_ratio": 4.0,
            "max_running_requests": 1,
        },
    ),
    "checksum": Feature(checksums),
    "KV events": Feature(kv_events, {"kv_events_config": "{}", "stream": "threaded"}),
    "no prefix cache": Feature(prefixes, {"disable_radix_cache": True}),
    "prefix cache": Feature(prefixes),
    "priorities": Feature(
        priorities,
        {
            "enable_priority_scheduling": True,
            "priority_scheduling_preemption_threshold": 1,
            "max_running_requests": 3,
        },
    ),
    "mixed chunks": Feature(mixed_chunks, {"enable_mixed_chunk": True}),
}


def answers(feature: Feature, paths: Paths, tp_size: int, pp_size: int) -> Answers:
    flags = {**FLAGS, **feature.flags}
    if pp_size > 1 and flags.get("stream") == "inline":
        flags.pop("stream")
    with ranks(paths.model, tp_size=tp_size, pp_size=pp_size, use=feature.use, **flags) as group:
        got = feature.drive(group.engine, paths)
        assert not any(follower._prepared for follower in group.followers.values()), "left on a follower"
    unused = [name for name, times in got.used.items() if times <= 0]
    assert not unused, f"--tp-size {tp_size} --pp-size {pp_size}: not at work: {unused}"
    return got


@pytest.mark.parametrize(
    ("name", "shape"),
    some(
        [(name, shape) for name, feature in FEATURES.items() for shape in feature.shapes],
        tried=[(name, feature.shapes[-1]) for name, feature in FEATURES.items()],
    ),
)
def test_it_is_the_same_on_several_ranks(name: str, shape: tuple[int, int], paths: Paths) -> None:
    alone = answers(FEATURES[name], paths, 1, 1)
    assert answers(FEATURES[name], paths, *shape).values == alone.values


def damage(pool: KVPool) -> None:
    """Turn a bit of page 1; the second time turn it back."""
    with torch.inference_mode():
        pool.buffer[pool.page_bytes] ^= 1


def test_a_checksum_looks_at_every_copy_of_a_head(tmp_path: Path) -> None:
    """Ranks outnumber KV heads: a byte that is wrong on either rank alone is noticed."""
    one_head = {**SIZES, "num_key_value_heads": 1}
    path = make_tiny_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **one_head)
    with ranks(path, tp_size=2, **{**FLAGS, "kv_units": 1, "reduce_units": 0}) as group:
        parts = group.engine.parts
        run(group.engine, prompts={"b": PROMPTS["b"]})
        sound = checksum_of(group.engine)
        for pool in (parts.pool, group.pools[1]):
            damage(pool)
            assert checksum_of(group.engine) != sound
            damage(pool)
        assert checksum_of(group.engine) == sound
