"""KV cache layouts of a model and its drafter. Never imports torch."""

from dataclasses import replace

from engine.kv.cache_spec import LAYER, TAIL, CacheSpec
from engine.model_files.drafter_config import STANDALONE, DrafterConfig
from engine.model_files.model_config import AttentionConfig, ModelConfig
from engine.parallel.layout import Place, Share, share_of


def layer_spec(config: AttentionConfig, share: Share, *, dtype: str, window: int = 0) -> CacheSpec:
    return CacheSpec(
        num_kv_heads=len(share.kv_heads),
        head_dim=config.head_dim,
        dtype=dtype,
        window=window,
        latent=config.latent.rank if config.latent else 0,
        index=config.latent.index.dim if config.latent and config.latent.index else 0,
    )


def reading_layer_specs(config: ModelConfig, share: Share, *, dtype: str) -> list[CacheSpec]:
    """KV and hidden states of a drafter layer."""
    tail = CacheSpec(num_kv_heads=1, head_dim=config.hidden_size, dtype=dtype, drafter=TAIL)
    return [replace(layer_spec(config, share, dtype=dtype), drafter=LAYER), tail]


def drafter_specs(drafter: DrafterConfig, place: Place, *, dtype: str) -> list[CacheSpec]:
    """The layouts of `drafter`. Its windows free no KV."""
    layers = drafter.layers
    share = share_of(layers, place)
    if drafter.kind != STANDALONE:
        return reading_layer_specs(layers, share, dtype=dtype)
    return [replace(layer_spec(layers, share, dtype=dtype), drafter=LAYER)] * layers.num_layers
