"""The cost of a model on each GPU of a worker: weights, KV and arithmetic, from its config alone, and the KV that fits. Pure.

What a GPU holds, and which numbers of GPUs fit, is engine/parallel/layout.py's decision.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.device.memory_plan import MeasuredMemory, static_left
from engine.flags.resolve import num_pages
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, check_layout, share_of
from service.flags import ConfigError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEGREES = (1, 2, 4, 8, 16, 32)  # of tensor parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a GPU holds. `layer_params`: weights of layers, each used once per token. `head_params`: of the output layer, once
    per sample.

    `weight_bytes`: all weights in memory; `read_bytes`: those of a step. `kv_bytes`: of one token in all layers. `pair_flops`: of attention for one query
    token and one key token, all layers and heads of this GPU. `hidden`, `vocab`: the model's.
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


def shape_of(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> Shape:
    """Return what the fullest of `tp` GPUs holds. `on_cpu`: of `tp` CPU ranks, where integers stay packed, unless the model is in fp32.

    2 FLOPs per weight and token; 4 x head_dim FLOPs per head and (query, key) pair: scores, and the sum of values.
    """
    share = share_of(model, Place(tp_rank=tp - 1, tp_size=tp))  # the last one: where the vocabulary does not divide
    size = BYTES[model.dtype]
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


def kv_pages(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    tp: int,
    memory_bytes: int | None,
    gpu: str,
    longest: int,
    on_cpu: bool = False,
) -> int:
    """Return the KV pages of a worker on `tp` GPUs of `memory_bytes` each (None: --max-total-tokens gives the capacity).

    `gpu`: the flag that chose the GPU. `longest`: tokens of the longest request. `on_cpu`: as of `shape_of`. Raises `ConfigError`.
    """
    shape = shape_of(model, tp, on_cpu=on_cpu)
    kv_bytes = 0 if memory_bytes is None else _left_for_kv(engine, shape, memory_bytes=memory_bytes)
    if memory_bytes is not None and kv_bytes <= 0:
        raise ConfigError(
            f"{gpu}: {_gb(tp * memory_bytes)} GB{f' on {tp} GPUs' if tp > 1 else ''} do not hold the model's "
            f"{_gb(shape_of(model, on_cpu=on_cpu).weight_bytes)} GB of weights; "
            f"{_advice(engine, model, memory_bytes=memory_bytes, longest=longest, on_cpu=on_cpu)}"
        )
    return num_pages(engine, page_bytes=shape.kv_bytes * engine.page_size, kv_bytes=kv_bytes)


def _advice(engine: EngineConfig, model: ModelConfig, *, memory_bytes: int, longest: int, on_cpu: bool) -> str:
    for tp in filter(lambda tp: _fits(model, tp), DEGREES):
        shape = shape_of(model, tp, on_cpu=on_cpu)
        if _left_for_kv(engine, shape, memory_bytes=memory_bytes) >= longest * shape.kv_bytes:
            return f"--tp-size {tp} does, with the longest request's KV ({longest:,} tokens): {tp} GPUs a worker"
    return "take a larger GPU: no --tp-size that divides the model is enough"


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        check_layout(model, tp_size=tp, pp_size=1)
    except ConfigError:
        return False
    return True


def _left_for_kv(engine: EngineConfig, shape: Shape, *, memory_bytes: int) -> int:
    """Bytes of each GPU's share besides weights: as a worker divides it, if its steps fit beside."""
    found = MeasuredMemory(
        memory=memory_bytes,
        free=memory_bytes,
        weights=shape.weight_bytes,
        prompts=0,
        token_bytes=0,
        samples=0,
        graphs=0,
        on_gpu=True,
    )
    return static_left(engine, found)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}"
