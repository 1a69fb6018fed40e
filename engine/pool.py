"""How many KV pages an engine has, and their memory."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.gpu_memory import GpuMemory, gib
from engine.kv.held import HeldKV
from engine.kv.host_memory import HostMemory
from engine.kv.kv_pool import AllocateBytes, CacheSpec, KVPool
from engine.kv_dtype import FP8
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, model_units, share_of, units_of
from engine.resolve import cpu_kv_bytes, gpu_pages, num_pages, state_slots
from service.flags import ConfigError

log = logging.getLogger(__name__)


def held_by(config: EngineConfig, model: ModelConfig, place: Place) -> HeldKV:
    """What of the model's KV the rank at `place` holds. `config` is resolved."""
    stage = share_of(model, place).layers
    return HeldKV(
        units_of(model, place, config.kv_units),
        model_units(model, tp_size=place.tp_size, kv_units=config.kv_units),
        model.kv_layers(stage),
        len(model.kv_layers(range(model.num_layers))),
        model.state_layers(stage),
        len(model.state_layers(range(model.num_layers))),
    )


def kept_specs(config: EngineConfig, specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """What layers keep by --kv-cache-dtype; 8 bits are read as the model's own type. `config` is resolved."""
    kept = config.kv_cache_dtype
    return [replace(spec, fp8=True) if kept == FP8 else replace(spec, dtype=kept) for spec in specs]


def count_pages(
    config: EngineConfig,
    specs: Sequence[CacheSpec],
    memory: GpuMemory | None,
    *,
    units: int,
    host: HostMemory,
    beside: int = 0,
) -> int:
    """Count the KV pages that --max-total-tokens or --mem-fraction-static asks for. Raises ConfigError.

    `memory`: of the GPU; None: on a CPU, or where --max-total-tokens says all. `units`: of
    this rank's part of a page. `host`: of a CPU, which its ranks share. `beside`: bytes of recurrent states there.
    """
    page_bytes = KVPool.page_bytes_of(specs, config.page_size, units=units)
    if memory is None:
        kv_bytes = cpu_kv_bytes(config, free_bytes=host.available()) // config.ranks_here - beside
        return num_pages(config, page_bytes=page_bytes, kv_bytes=kv_bytes)
    pages = gpu_pages(config, memory, page_bytes=page_bytes)
    _note_capacity(config, memory, tokens=pages * config.page_size)
    return pages


def allocate_pool(
    config: EngineConfig, specs: Sequence[CacheSpec], *, num_pages: int, units: int, allocate: AllocateBytes
) -> KVPool:
    """`units`: of this rank's part of a page. Raises ConfigError."""
    device = torch.device(config.device)
    try:
        pool = KVPool(
            specs, num_pages=num_pages, page_size=config.page_size, device=device, units=units, allocate=allocate
        )
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = num_pages * KVPool.page_bytes_of(specs, config.page_size, units=units) / 2**30
        raise ConfigError(
            f"--max-total-tokens: no memory for a KV cache of {size:.1f} GiB ({error}); lower it"
        ) from error
    if config.prefault_kv and device.type == "cpu":
        pool.buffer.zero_()
    return pool


def note_memory(
    config: EngineConfig,
    buffers: Sequence[torch.Tensor],
    *,
    tokens: int,
    free: int,
    weights: int,
    states: int,
    copies: int,
) -> None:
    """Log what takes the memory of a CPU. `buffers`: of `tokens`. `free`, `weights`, `states`, `copies` (of retracted and cached KV): bytes."""
    parts = {
        "weights": weights,
        f"KV of {tokens} tokens in {config.kv_cache_dtype}": sum(buffer.nbytes for buffer in buffers),
        f"{state_slots(config)} recurrent states": states,
        "copies of KV": copies,
    }
    text = ", ".join(f"{what} {gib(size)}" for what, size in parts.items() if size)
    log.info(
        "memory in GiB, most of it taken when it is used: %s; %s of the machine's are free now, most requests that run: %d",
        text,
        gib(free),
        config.max_running_requests,
    )


def _note_capacity(config: EngineConfig, memory: GpuMemory, *, tokens: int) -> None:
    assert config.context_length is not None, "resolved"
    log.info("GPU memory: %s GiB, a KV cache of %d tokens", memory, tokens)
    if tokens < config.context_length:
        log.warning(
            "the KV cache holds %d tokens, the model's context %d: longer requests are refused (--context-length)",
            tokens,
            config.context_length,
        )
