"""The cost of a model: weights, KV and arithmetic, from its config alone, and the KV that fits beside it. Pure."""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.model_files.model_config import ModelConfig
from engine.resolve import num_pages
from service.flags import ConfigError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEGREES = (1, 2, 4, 8, 16, 32)  # of tensor parallelism


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


def kv_copies(shape: Shape, tp: int) -> float:
    return max(1.0, tp / shape.kv_heads)


def kv_pages(engine: EngineConfig, shape: Shape, *, tp: int, memory_bytes: int | None, gpu: str, longest: int) -> int:
    """Return the KV pages of a worker on `tp` GPUs of `memory_bytes` each (None: --max-total-tokens gives the capacity).

    `gpu`: the flag that chose the GPU. `longest`: tokens of the longest request. Raises `ConfigError`.
    """
    if shape.heads % tp:
        raise ConfigError(f"--tp-size {tp}: does not divide the model's {shape.heads} attention heads")
    kv_bytes = 0 if memory_bytes is None else _left_for_kv(engine, shape, tp=tp, memory_bytes=memory_bytes)
    if memory_bytes is not None and kv_bytes <= 0:
        raise ConfigError(
            f"{gpu}: {_gb(tp * memory_bytes)} GB{f' on {tp} GPUs' if tp > 1 else ''} do not hold the model's "
            f"{_gb(shape.weight_bytes)} GB of weights; {_advice(engine, shape, memory_bytes=memory_bytes, longest=longest)}"
        )
    return num_pages(engine, page_bytes=_token_bytes(shape, tp) * engine.page_size, kv_bytes=kv_bytes)


def _advice(engine: EngineConfig, shape: Shape, *, memory_bytes: int, longest: int) -> str:
    for tp in DEGREES:
        kv_bytes = _left_for_kv(engine, shape, tp=tp, memory_bytes=memory_bytes)
        if shape.heads % tp == 0 and kv_bytes >= longest * _token_bytes(shape, tp):
            return f"--tp-size {tp} does, with the longest request's KV ({longest:,} tokens): {tp} GPUs a worker"
    return "take a larger GPU: no --tp-size that divides its heads is enough"


def _left_for_kv(engine: EngineConfig, shape: Shape, *, tp: int, memory_bytes: int) -> int:
    """Bytes of each GPU's share besides weights: as a worker divides it, without the memory of its steps."""
    assert engine.mem_fraction_static is not None, "`tandem plan` has a default of its own"
    return int(memory_bytes * engine.mem_fraction_static) - shape.weight_bytes // tp


def _token_bytes(shape: Shape, tp: int) -> int:
    """Bytes of one token's KV on each GPU."""
    return int(shape.kv_bytes * kv_copies(shape, tp) / tp)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}"
