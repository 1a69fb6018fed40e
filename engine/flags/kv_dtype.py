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
    if model.latent is not None:
        raise ConfigError(f"{name}: latent attention keeps its latents in --dtype, {dtype} here; leave it out")
    if wanted != FP8:
        return wanted
    if config.attention_backend in ("triton", "flashinfer") or (
        device == "cuda" and config.attention_backend != "torch"
    ):
        raise ConfigError(
            f"{name}: --attention-backend {config.attention_backend} on {device} does not read it; give --attention-backend "
            f"{'torch, which is slow' if device == 'cuda' else 'cpu'}, or leave it out"
        )
    if config.page_size % WHOLE_WORDS:
        raise ConfigError(f"{name}: needs a --page-size that is a multiple of {WHOLE_WORDS}, got {config.page_size}")
    return FP8
