"""Bytes of weights and KV pages, and the pages that fit. Pure."""

from engine.config import EngineConfig
from engine.device.memory_plan import MeasuredMemory, static_left
from engine.flags.resolve import num_pages
from engine.kv.cache_spec import page_bytes_of
from engine.model_files.model_config import ModelConfig
from engine.models.cache_specs import drafter_specs, layer_spec
from engine.parallel.layout import check_layout, share_of
from planner.drafter import drafter_shape
from planner.shape import fullest, shape_of
from service.flags import ConfigError

DEGREES = (1, 2, 4, 8, 16, 32)  # of TP


def page_bytes(model: ModelConfig, tp: int = 1, *, page_size: int) -> int:
    """Return a page's bytes on the fullest GPU, with the drafter's."""
    place = fullest(tp)
    specs = [layer_spec(model, share_of(model, place), dtype=model.dtype)] * model.num_layers
    if model.drafter is not None:
        specs += drafter_specs(model.drafter, place, dtype=model.dtype)
    return page_bytes_of(specs, page_size)


def weight_bytes(model: ModelConfig, tp: int = 1, *, on_cpu: bool = False) -> int:
    own = shape_of(model, tp, on_cpu=on_cpu).weight_bytes
    return own if model.drafter is None else own + drafter_shape(model, tp, on_cpu=on_cpu).weight_bytes


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
    """Return a worker's KV pages on `tp` GPUs. Raises ConfigError.

    `memory_bytes` is None with --max-total-tokens. `gpu`: the flag. `longest`: request tokens.
    """
    weights = weight_bytes(model, tp, on_cpu=on_cpu)
    kv_bytes = 0 if memory_bytes is None else _left_for_kv(engine, weights, memory_bytes=memory_bytes)
    if memory_bytes is not None and kv_bytes <= 0:
        raise ConfigError(
            f"{gpu}: {_gb(tp * memory_bytes)} GB{f' on {tp} GPUs' if tp > 1 else ''} do not hold the model's "
            f"{_gb(weight_bytes(model, on_cpu=on_cpu))} GB of weights; "
            f"{_advice(engine, model, memory_bytes=memory_bytes, longest=longest, on_cpu=on_cpu)}"
        )
    return num_pages(engine, page_bytes=page_bytes(model, tp, page_size=engine.page_size), kv_bytes=kv_bytes)


def _advice(engine: EngineConfig, model: ModelConfig, *, memory_bytes: int, longest: int, on_cpu: bool) -> str:
    for tp in filter(lambda tp: _fits(model, tp), DEGREES):
        pages = -(-longest // engine.page_size)
        left = _left_for_kv(engine, weight_bytes(model, tp, on_cpu=on_cpu), memory_bytes=memory_bytes)
        if left >= pages * page_bytes(model, tp, page_size=engine.page_size):
            return f"--tp-size {tp} does, with the longest request's KV ({longest:,} tokens): {tp} GPUs a worker"
    return "take a larger GPU: no --tp-size that divides the model is enough"


def _fits(model: ModelConfig, tp: int) -> bool:
    try:
        for held in (model, *([model.drafter.layers] if model.drafter else [])):
            check_layout(held, tp_size=tp, pp_size=1)
    except ConfigError:
        return False
    return True


def _left_for_kv(engine: EngineConfig, weights: int, *, memory_bytes: int) -> int:
    """Return bytes for KV per GPU, as in a worker."""
    found = MeasuredMemory(
        memory=memory_bytes,
        free=memory_bytes,
        weights=weights,
        prompts=0,
        token_bytes=0,
        samples=0,
        graphs=0,
        on_gpu=True,
    )
    return static_left(engine, found)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}"
