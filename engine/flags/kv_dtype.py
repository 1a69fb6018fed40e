"""Data type of the KV cache (--kv-cache-dtype)."""

from engine.config import FP8, EngineConfig
from engine.model_files.model_config import AttentionConfig
from service.flags import ConfigError

NAMES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32", FP8: FP8}
WHOLE_WORDS = 4  # tokens of a page, so that 8-bit rows fill the words of a checksum


def kv_dtype(config: EngineConfig, model: AttentionConfig, *, device: str, dtype: str) -> str:
    """Return "bfloat16", "float32" or "fp8_e4m3". Raises ConfigError."""
    wanted = NAMES.get(config.kv_cache_dtype, dtype)
    if wanted == dtype:
        return dtype
    name = f"--kv-cache-dtype {config.kv_cache_dtype}"
    if wanted != FP8:
        if model.latent is not None:
            raise ConfigError(f"{name}: latent attention keeps its latents in --dtype, {dtype} here; leave it out")
        return wanted
    if model.latent is not None and model.latent.index is not None:
        raise ConfigError(f"{name}: attention by an index of latents does not read it; leave it out")
    on_cpu = "cpu" if model.latent is None else "torch, which is slow"
    backend = config.attention_backend
    if backend == "auto":
        backend = "triton" if device == "cuda" else "cpu"
    if backend not in ("torch", "triton", on_cpu):
        raise ConfigError(
            f"{name}: --attention-backend {backend} on {device} does not read it; give --attention-backend "
            f"{'triton' if device == 'cuda' else on_cpu}, or leave it out"
        )
    if config.page_size % WHOLE_WORDS:
        raise ConfigError(f"{name}: needs a --page-size that is a multiple of {WHOLE_WORDS}, got {config.page_size}")
    return FP8
