"""KV page memory of an engine, and its memory report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from engine.config import FP8, EngineConfig, MemoryFlags, ModelFlags, SchedulingFlags
from engine.device.memory_plan import MeasuredMemory, memory_text
from engine.flags.resolve import state_slots
from engine.kv.cache_spec import TAIL, CacheSpec, KVShard, page_bytes_of
from engine.kv.kv_pool import AllocateBytes, KVPool
from engine.model_files.model_config import ModelConfig
from engine.parallel.layout import Place, model_units, share_of, units_of
from service.flags import ConfigError

log = logging.getLogger(__name__)


def held_by(config: MemoryFlags, model: ModelConfig, place: Place) -> KVShard:
    stage = share_of(model, place).layers
    layers, num_layers = model.kv_layers(stage), len(model.kv_layers(range(model.num_layers)))
    drafter = model.drafter is not None  # one more layer
    return KVShard(
        units_of(model, place, config.kv_units),
        model_units(model, tp_size=place.tp_size, kv_units=config.kv_units),
        range(layers.start, layers.stop + drafter),
        num_layers + drafter,
        model.state_layers(stage),
        len(model.state_layers(range(model.num_layers))),
    )


def kept_specs(config: ModelFlags, specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    """Apply --kv-cache-dtype, except to tails; FP8 is read as the model's type."""
    kept = {"fp8": True} if config.kv_cache_dtype == FP8 else {"dtype": config.kv_cache_dtype}
    return [spec if spec.drafter == TAIL else replace(spec, **kept) for spec in specs]


def allocate_pool(
    config: EngineConfig, specs: Sequence[CacheSpec], *, num_pages: int, units: int, allocate: AllocateBytes
) -> KVPool:
    """Raises ConfigError."""
    device = torch.device(config.device)
    try:
        pool = KVPool(
            specs, num_pages=num_pages, page_size=config.page_size, device=device, units=units, allocate=allocate
        )
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = num_pages * page_bytes_of(specs, config.page_size, units=units) / 2**30
        raise ConfigError(
            f"--max-total-tokens: no memory for a KV cache of {size:.1f} GiB ({error}); lower it"
        ) from error
    return pool


def _steps_text(config: SchedulingFlags) -> str:
    if config.chunked_prefill_size == -1:
        return f"whole prompts, at most {config.max_prefill_tokens} tokens of several in a step"
    return f"chunks of {config.chunked_prefill_size} tokens"


def note_memory(
    config: EngineConfig,
    found: MeasuredMemory | None,
    pools: Mapping[str, int],
    *,
    copies: int,
    tokens: int,
    shadows: int = 0,
) -> dict[str, int]:
    """Return and log bytes by part; `shadows` are state checkpoints."""
    assert config.context_length is not None, "resolved"
    measured = {} if found is None else {"weights": found.weights, "steps": found.steps, "graphs": found.graphs}
    if found is not None and found.features:
        measured["image_features"] = found.features
    parts = {**measured, **pools, "host_copies": copies}
    if found is not None:
        parts["rest"] = max(
            0, found.free - sum(measured.values()) - sum(pools.values()) - (0 if found.on_gpu else copies)
        )
    states = f", {state_slots(config)} recurrent states" if pools.get("states") else ""
    if shadows:
        states += f" and {shadows} copies for drafts"
    log.info(
        "memory: %s; a KV cache of %d tokens in %s%s, at most %d running requests, %s",
        memory_text(parts),
        tokens,
        config.kv_cache_dtype,
        states,
        config.max_running_requests,
        _steps_text(config),
    )
    if config.max_total_tokens is None and tokens < config.context_length:
        log.warning(
            "the KV cache holds %d tokens, the model's context %d: longer requests are refused (--context-length)",
            tokens,
            config.context_length,
        )
    return parts
