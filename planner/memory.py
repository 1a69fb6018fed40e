"""The memory of a worker's GPUs: weights, then KV. Pure."""

from engine.config import EngineConfig
from engine.resolve import num_pages
from planner.shape import Shape
from planner.step_time import kv_copies
from service.flags import ConfigError

DEGREES = (1, 2, 4, 8, 16, 32)


def kv_pages(engine: EngineConfig, shape: Shape, *, tp: int, memory_bytes: int | None, gpu: str, longest: int) -> int:
    """Return the KV pages of a worker on `tp` GPUs of `memory_bytes` each (None: --max-total-tokens gives the capacity).

    `gpu`: the flag that chose the GPU. `longest`: tokens of the longest request. Raises `ConfigError`.
    """
    if shape.heads % tp:
        raise ConfigError(f"--tp-size {tp}: does not divide the model's {shape.heads} attention heads")
    free_bytes = 0 if memory_bytes is None else memory_bytes - shape.weight_bytes // tp
    if memory_bytes is not None and free_bytes <= 0:
        raise ConfigError(
            f"{gpu}: {_gb(tp * memory_bytes)} GB{f' on {tp} GPUs' if tp > 1 else ''} do not hold the model's "
            f"{_gb(shape.weight_bytes)} GB of weights; {_advice(engine, shape, memory_bytes=memory_bytes, longest=longest)}"
        )
    return num_pages(engine, page_bytes=_token_bytes(shape, tp) * engine.page_size, free_bytes=free_bytes)


def _advice(engine: EngineConfig, shape: Shape, *, memory_bytes: int, longest: int) -> str:
    for tp in DEGREES:
        room_bytes = engine.mem_fraction_static * (memory_bytes - shape.weight_bytes // tp)
        if shape.heads % tp == 0 and room_bytes >= longest * _token_bytes(shape, tp):
            return f"--tp-size {tp} does, with the longest request's KV ({longest:,} tokens): {tp} GPUs a worker"
    return "take a larger GPU: no --tp-size that divides its heads is enough"


def _token_bytes(shape: Shape, tp: int) -> int:
    """Bytes of one token's KV on each GPU."""
    return int(shape.kv_bytes * kv_copies(shape, tp) / tp)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}"
