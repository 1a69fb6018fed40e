"""A small model drafts: answers are those of plain decoding, and a drafter that is the model itself is always right, whatever happens
to its KV: so it lies where the model's does, of every token."""

from pathlib import Path
from typing import Any

import pytest

from engine.core.mem_cache.host_cache import HostCache
from engine.device.step_memory import EngineUse
from engine.kernels.linear import linear_kernel
from tests.cells import some
from tests.engine.drafts.drafters import Answers, Fared, always, ask_all, fared
from tests.engine.drafts.test_speculation import in_grammar
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks
from tests.lora.tiny_adapters import make_tiny_adapter
from tests.models.tiny_checkpoints import make_tiny_checkpoint

NEW = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", dtype="bfloat16")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter of another family, whose drafts are mostly wrong."""
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("other"), "llama", seed=1, num_hidden_layers=2, dtype="bfloat16"
    )


def by(path: str, **flags: Any) -> dict[str, Any]:
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path, **flags}


def answers(path: str, *, sure: bool = False, **flags: Any) -> tuple[Answers, Fared]:
    with EngineInProcess(path, **flags) as engine:
        if "speculative_algorithm" in flags:
            always(engine.parts.scheduler)
        said = ask_all(engine, sure=sure)
        return said, fared(engine)


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Answers:
    return answers(checkpoint)[0]


def test_wrong_drafts_change_nothing(checkpoint: str, other: str, plain: Answers) -> None:
    said, how = answers(checkpoint, **by(other))
    assert said == plain
    assert 0 < how.accepted < 0.5 * how.drafts


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunked": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True, "max_running_requests": 4},
    "overlapped": {"stream": "threaded", "stream_delay_s": 0.001},
    "retracted": {"test_retract": 5, "use": EngineUse(retracted_kv="host")},
    "short drafts": {"speculative_num_steps": 1},
    "long drafts": {"speculative_num_steps": 11, "page_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_model_itself_is_always_right(checkpoint: str, plain: Answers, way: str) -> None:
    said, how = answers(checkpoint, sure=True, **by(checkpoint), **WAYS[way])
    assert said == tuple({name: of[name] for name in said[0]} for of in plain)
    assert how.accepted == how.drafts > 0 and how.passes > 0


def test_a_cached_prefix_and_one_from_the_host_have_the_drafters_kv(checkpoint: str) -> None:
    flags = {"page_size": 4, "max_total_tokens": 160, "enable_hierarchical_cache": True}
    prompts = [[16 + (7 * family + i) % 250 for i in range(70)] for family in range(4)]
    with EngineInProcess(checkpoint, **flags, **by(checkpoint)) as engine:
        always(engine.parts.scheduler)
        for turn in range(2):
            for i, prompt in enumerate(prompts):
                engine.answer(f"{turn}-{i}", prompt, max_new_tokens=12)
        how = fared(engine)
        assert how.accepted == how.drafts > 0
        host = engine.parts.scheduler.memory.part(HostCache)
        assert host is not None and host.counted["hicache_loaded_pages"] > 0
        assert engine.cached["1-3"] > 0
        assert all(engine.tokens[f"0-{i}"] == engine.tokens[f"1-{i}"] for i in range(len(prompts)))


def test_what_a_grammar_leaves(checkpoint: str) -> None:
    """Drafts of a model are cut where the grammar refuses them; what it forces is drafted without the model."""
    wanted, steps = in_grammar(checkpoint, grammar_backend="none")
    for flags in ({}, {"stream": "threaded", "stream_delay_s": 0.001}):
        said, fewer = in_grammar(checkpoint, **by(checkpoint), **flags)
        assert said == wanted and fewer < steps


@pytest.mark.skipif(linear_kernel() is None, reason="products of torch depend on the batch")
@pytest.mark.parametrize(
    "family", some(["gemma2", "deepseek_v3", "mixtral"], tried=["mixtral"])
)  # see test_draft_trees.py
def test_windows_latents_and_experts(tmp_path: Path, other: str, family: str) -> None:
    """Of the model, beside a drafter of another kind; and of the drafter itself."""
    path = make_tiny_checkpoint(tmp_path / family, family, dtype="bfloat16")
    wanted, _ = answers(path)
    for drafter in (other, path):
        said, how = answers(path, **by(drafter))
        assert said == wanted and how.passes > 0


def test_kv_of_8_bits(checkpoint: str) -> None:
    wanted, _ = answers(checkpoint, sure=True, kv_cache_dtype="fp8_e4m3")
    said, how = answers(checkpoint, sure=True, kv_cache_dtype="fp8_e4m3", **by(checkpoint))
    assert said == wanted and how.accepted == how.drafts > 0


def test_an_adapter_changes_the_model_alone(checkpoint: str, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", checkpoint, seed=3)

    def run(**flags: Any) -> dict[str, list[int]]:
        with EngineInProcess(checkpoint, enable_lora=True, max_lora_rank=4, **flags) as engine:
            store = engine.parts.adapters
            assert store is not None
            store.install(1, store.read(adapter))
            if flags:
                always(engine.parts.scheduler)
            for i in range(4):
                engine.add(f"r{i}", [20 + i] * 30, adapter=i % 2, max_new_tokens=NEW)
            engine.run()
            assert not flags or fared(engine).accepted > 0
            return engine.tokens

    assert run(**by(checkpoint)) == run()


@pytest.mark.skipif(linear_kernel() is None, reason="--reduce-units needs the C kernel")
def test_ranks_draft_the_same(checkpoint: str) -> None:
    with ranks(checkpoint, tp_size=2, reduce_units=2, num_threads=1) as group:
        wanted = ask_all(group.engine, sure=True)
    with ranks(checkpoint, tp_size=2, reduce_units=2, num_threads=1, **by(checkpoint)) as group:
        always(group.engine.parts.scheduler)
        assert ask_all(group.engine, sure=True) == wanted
        how = fared(group.engine)
        assert how.accepted == how.drafts > 0
