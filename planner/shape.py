"""Weights, KV and arithmetic of a model per GPU (engine/parallel/layout.py). Pure."""

from dataclasses import dataclass

from engine.kv.cache_spec import ELEMENT_BYTES
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One GPU's part. `layer_params`: per token, `head_params`: per sample. `read_bytes`: per step.
    `kv_bytes`: per token. `pair_flops`: attention per query and key token.
    """

    layer_params: int
    head_params: int
    weight_bytes: int
    read_bytes: int
    kv_bytes: int
    pair_flops: int
    element_bytes: int
    layers: int
    hidden: int
    vocab: int


def fullest(tp: int) -> Place:
    """Return the fullest rank: the last, if the vocabulary does not divide."""
    return Place(tp_rank=tp - 1, tp_size=tp)


def shape_of(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> Shape:
    """Return the fullest GPU's part, or CPU rank's, with packed integers except in fp32.

    2 FLOPs per weight and token; 4 x head_dim FLOPs per head and (query, key) pair.
    """
    share = share_of(model, fullest(tp))
    size = ELEMENT_BYTES[model.dtype]
    query, key = len(share.heads) * model.head_dim, len(share.kv_heads) * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size // tp
    matrices = [(query + 2 * key, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]  # [outputs, inputs]
    layers = len(share.layers) * sum(outputs * inputs for outputs, inputs in matrices)
    packing = model.stored.packing if on_cpu and model.stored and model.dtype != "float32" else None
    layer_bytes = layers * size
    if packing is not None:
        layer_bytes = len(share.layers) * sum(packing.size_bytes(*matrix) for matrix in matrices)
    head = len(share.vocab) * hidden
    tables = 1 if model.tie_word_embeddings else 2
    return Shape(
        layer_params=layers,
        head_params=head,
        weight_bytes=layer_bytes + tables * head * size,
        read_bytes=layer_bytes + head * size,
        kv_bytes=2 * len(share.layers) * key * size,
        pair_flops=4 * len(share.layers) * query,
        element_bytes=size,
        layers=len(share.layers),
        hidden=model.hidden_size,
        vocab=model.vocab_size,
    )
