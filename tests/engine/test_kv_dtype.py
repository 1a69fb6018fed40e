"""KV of 8 bits in an engine: half the bytes, and not a bit less the same whatever the way to a token; and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.mem_cache.host_cache import HostCache
from engine.executor.decode_tapes import DecodeTapes
from engine.flags.kv_dtype import kv_dtype
from engine.flags.resolve import resolve
from engine.kernels.linear import linear_kernel
from engine.model_files.model_config import load_model_config
from service.flags import ConfigError
from tests.engine.engine_in_process import EngineInProcess
from tests.engine.ranks.ranks_in_process import ranks
from tests.engine.test_equal_bits import FLAGS, PROMPTS, QWEN3, answers
from tests.engine.test_host_tier import settle
from tests.models.tiny_checkpoints import make_tiny_checkpoint

FP8: dict[str, Any] = {**FLAGS, "kv_cache_dtype": "fp8_e4m3"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", QWEN3),
    "windows": ("mistral", {**QWEN3, "sliding_window": 22}),
    "sinks": ("gpt_oss", {}),
    "softcaps": ("gemma2", {}),
    "states": ("falcon_h1", {}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("fp8") / "model", "qwen3", dtype="bfloat16", **QWEN3)


@pytest.mark.skipif(linear_kernel() is None, reason="products of torch depend on the batch")
def test_without_tapes_and_over_two_ranks_the_bits_are_the_same(path: str) -> None:
    with EngineInProcess(path, **FP8, reduce_units=2) as engine:
        whole = answers(engine, PROMPTS)
        assert engine.recorded(DecodeTapes) is not None
    with EngineInProcess(path, **FP8, reduce_units=2, disable_cuda_graph=True) as engine:
        assert answers(engine, PROMPTS) == whole and engine.recorded(DecodeTapes) is None
    with ranks(path, tp_size=2, **FP8, reduce_units=2) as group:
        assert answers(group.engine, PROMPTS) == whole
        assert group.engine.parts.pool.page_bytes == 4 * 4 * 2 * 2 * 33, "layers, tokens, K and V, heads, bytes"


def test_it_is_half_the_bytes_and_other_numbers(path: str) -> None:
    with EngineInProcess(path, **FLAGS) as engine, EngineInProcess(path, **FP8) as of_8_bits:
        assert answers(engine, PROMPTS) != answers(of_8_bits, PROMPTS), "8 bits changed nothing: they are not used"
        assert of_8_bits.parts.pool.page_bytes / engine.parts.pool.page_bytes == 33 / 64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_other_kinds_keep_their_tokens_in_chunks_and_cached(name: str, dtype: str, tmp_path: Any) -> None:
    if dtype == "bfloat16" and linear_kernel() is None:
        pytest.skip("products of torch depend on the batch")
    family, overrides = MODELS[name]
    path = make_tiny_checkpoint(tmp_path / family, family, dtype=dtype, **overrides)
    flags: dict[str, Any] = {"page_size": 4, "max_total_tokens": 2048, "kv_cache_dtype": "fp8_e4m3"}
    got = []
    for chunk in (-1, 64):
        with EngineInProcess(path, **flags, chunked_prefill_size=chunk) as engine:
            for rid in ("one", "again"):
                engine.answer(rid, PROMPTS["a"], max_new_tokens=12)
            got += [engine.tokens["one"], engine.tokens["again"]]
            assert engine.cached["again"] > 0
            assert all(spec.fp8 for spec in engine.parts.pool.specs)
    assert got == [got[0]] * 4


def test_prefixes_come_back_from_the_host_and_from_files_of_8_bits_alone(path: str, tmp_path: Path) -> None:
    """An engine with KV of another type finds none of them."""
    flags = {**FLAGS, "max_total_tokens": 200, "enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    files = {
        "hicache_storage_dir": str(tmp_path),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    seen = []
    for dtype in ("fp8_e4m3", "fp8_e4m3", "bf16"):
        with EngineInProcess(path, **flags, **files, kv_cache_dtype=dtype) as engine:
            host = engine.parts.scheduler.memory.part(HostCache)
            assert host is not None
            tokens = []
            for name in ("a", "c", "a again", "c again"):
                engine.add(name, PROMPTS[name[0]], max_new_tokens=12)
                settle(engine)
                tokens.append(engine.tokens[name])
            assert tokens[:2] == tokens[2:]
            seen.append((tokens, host.counted["hicache_host_hit_tokens"], host.counted["hicache_disk_hit_tokens"]))
    assert seen[0][0] == seen[1][0] != seen[2][0]
    assert seen[0][1] > 0 and [disk > 0 for _, _, disk in seen] == [False, True, False]


def test_bf16_beside_a_model_of_fp32(tmp_path: Any) -> None:
    path = make_tiny_checkpoint(tmp_path / "model", "qwen3", **QWEN3)
    for name in ("bf16", "bfloat16"):
        with EngineInProcess(path, **FLAGS, kv_cache_dtype=name) as engine:
            assert answers(engine, PROMPTS) and engine.parts.pool.specs[0].kept_name == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"page_size": 6}, r"--kv-cache-dtype fp8_e4m3: needs a --page-size that is a multiple of 4, got 6"),
        (
            {"attention_backend": "flashinfer"},
            r"--kv-cache-dtype fp8_e4m3: --attention-backend flashinfer on cpu .* cpu, or leave",
        ),
    ],
)
def test_what_does_not_go_is_refused_by_name(flags: dict[str, Any], said: str, path: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(EngineConfig(model_path=path, **{**FP8, **flags}), load_model_config(path), cuda=False)


@pytest.mark.parametrize(
    ("family", "device", "backend", "said"),
    [
        ("qwen3", "cuda", "auto", ""),
        ("qwen3", "cuda", "torch", ""),
        ("qwen3", "cuda", "flashinfer", "flashinfer on cuda does not read it; give --attention-backend triton, or"),
        ("deepseek_v3", "cuda", "auto", ""),
        (
            "deepseek_v3",
            "cpu",
            "auto",
            "cpu on cpu does not read it; give --attention-backend torch, which is slow, or",
        ),
        ("deepseek_v3", "cpu", "torch", ""),
        ("deepseek_v32", "cuda", "torch", "attention by an index of latents does not read it; leave it out"),
    ],
)
def test_which_attention_reads_it(family: str, device: str, backend: str, said: str, tmp_path: Any) -> None:
    model = load_model_config(make_tiny_checkpoint(tmp_path / family, family))
    config = EngineConfig(model_path=str(tmp_path / family), **FP8, attention_backend=backend)
    if said:
        with pytest.raises(ConfigError, match=rf"--kv-cache-dtype fp8_e4m3: .*{said}"):
            kv_dtype(config, model, device=device, dtype="bfloat16")
    else:
        assert kv_dtype(config, model, device=device, dtype="bfloat16") == "fp8_e4m3"


def test_latents_are_kept_in_8_bits_or_in_the_models_type(tmp_path: Any) -> None:
    model = load_model_config(make_tiny_checkpoint(tmp_path / "latents", "deepseek_v3"))
    config = EngineConfig(model_path=str(tmp_path / "latents"), **{**FLAGS, "kv_cache_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype bfloat16: latent attention keeps .* float32 here; leave"):
        kv_dtype(config, model, device="cpu", dtype="float32")
