"""What the layers of a model and of its drafter keep of each token, by their configurations alone. Never torch."""

from dataclasses import replace

from engine.kv.cache_spec import LAYER, TAIL, CacheSpec
from engine.model_files.drafter_config import STANDALONE, DrafterConfig
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, Share, share_of


def layer_spec(config: ModelConfig, share: Share, *, dtype: str, window: int = 0) -> CacheSpec:
    """Return what a layer with attention keeps on a rank that holds `share`."""
    return CacheSpec(
        num_kv_heads=len(share.kv_heads),
        head_dim=config.head_dim,
        dtype=dtype,
        window=window,
        latent=config.latent.rank if config.latent else 0,
        index=config.latent.index.dim if config.latent and config.latent.index else 0,
    )


def reading_layer_specs(config: ModelConfig, share: Share, *, dtype: str) -> list[CacheSpec]:
    """Return what a drafter's one layer that reads the model's hidden states keeps; `config`: of that layer."""
    tail = CacheSpec(num_kv_heads=1, head_dim=config.hidden_size, dtype=dtype, drafter=TAIL)
    return [replace(layer_spec(config, share, dtype=dtype), drafter=LAYER), tail]


def drafter_specs(drafter: DrafterConfig, place: Place, *, dtype: str) -> list[CacheSpec]:
    """Return what `drafter` keeps on the rank at `place`. No layer's KV is freed behind its window."""
    layers = drafter.layers
    share = share_of(layers, place)
    if drafter.kind != STANDALONE:
        return reading_layer_specs(layers, share, dtype=dtype)
    return [replace(layer_spec(layers, share, dtype=dtype), drafter=LAYER)] * layers.num_layers
