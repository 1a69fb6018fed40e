"""The cost of a model: weights, KV and arithmetic, from its config alone. Pure."""

from dataclasses import dataclass

from engine.model_files.model_config import ModelConfig

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`layer_params`: weights of all layers, each used once per token. `head_params`: of the output layer, once per sample.

    `weight_bytes`: the whole checkpoint in memory. `kv_bytes`: of one token in all layers. `pair_flops`: of attention for
    one query token and one key token, all layers and heads. `hidden_bytes`: of one token between two layers.
    """

    layer_params: int
    head_params: int
    weight_bytes: int
    kv_bytes: int
    pair_flops: int
    element_bytes: int
    layers: int
    heads: int
    kv_heads: int
    hidden_bytes: int


def shape_of(model: ModelConfig) -> Shape:
    """2 FLOPs per weight and token; 4 x head_dim FLOPs per head and (query, key) pair: scores, and the sum of values."""
    size = BYTES[model.dtype]
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * query + 2 * key)
    layers = model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
    head = model.vocab_size * model.hidden_size
    tables = 1 if model.tie_word_embeddings else 2
    return Shape(
        layer_params=layers,
        head_params=head,
        weight_bytes=(layers + tables * head) * size,
        kv_bytes=2 * model.num_layers * key * size,
        pair_flops=4 * model.num_layers * query,
        element_bytes=size,
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        hidden_bytes=model.hidden_size * size,
    )
