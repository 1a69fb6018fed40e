"""Puts an engine together: model, KV pool, executor, scheduler. The only place that knows all of them."""

import os
import random
from dataclasses import dataclass

import torch

from engine.attention.registry import make_attention_backend
from engine.config import ConfigError, EngineConfig
from engine.core.finish import TailText
from engine.core.growth import MeasuredGrowth
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.radix_cache import RadixCache
from engine.core.scheduler import Scheduler
from engine.executor.executor import Executor
from engine.executor.future_map import FutureMap
from engine.executor.kv_pool import KVPool
from engine.executor.model_runner import ModelRunner
from engine.executor.page_backup import PageBackup
from engine.executor.page_table import PageTable
from engine.executor.sampler import Sampler
from engine.executor.stream import make_stream
from engine.executor.weights import Weights
from engine.model_config import ModelConfig
from engine.models.registry import load_model
from engine.resolve import depth, limits, num_pages, priorities, resolve


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine. `config` is resolved."""

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    scheduler: Scheduler
    executor: Executor
    depth: int
    weights: Weights


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    tail_text: TailText,
    progress: bool,
    host_backup: bool = False,
    resume_elsewhere: bool = False,
    reserve_floor: int = 0,
    num_token_ids: int | None = None,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError for what cannot be honoured here.

    `host_backup`: retracted requests' KV is copied to host memory. `resume_elsewhere`: their KV is the role's affair.
    `num_token_ids`: ids that the tokenizer knows; a model may have rows beyond them, which mean nothing (None: all do).
    `reserve_floor`: tokens of growth that `Scheduler.reserve` expects of a request at least.
    """
    config = resolve(config, model_config, cuda=torch.cuda.is_available())
    torch.set_num_threads(config.num_threads)
    device = torch.device(config.device)
    model = load_model(
        config.model_path,
        model_config,
        dtype=config.dtype,
        device=config.device,
        progress=progress,
        context_length=config.context_length,
    )
    pool = _allocate_pool(config, model.cache_specs(), device)
    num_slots = config.max_running_requests
    runner = ModelRunner(
        model=model,
        backend=make_attention_backend(config.attention_backend, pool, num_heads=model_config.num_heads),
        page_table=PageTable(
            num_slots=num_slots, max_pages=_max_pages(config, pool), page_size=config.page_size, device=device
        ),
        future_map=FutureMap(num_slots=num_slots, device=device),
        sampler=Sampler(num_slots=num_slots, vocab_size=model_config.vocab_size, device=device),
        device=device,
        backup=PageBackup(pool),
    )
    stream = make_stream(
        config.stream,
        device=device,
        num_threads=config.num_threads,
        max_delay_s=config.stream_delay_ms / 1000,
        seed=config.random_seed,
    )
    executor = Executor(runner=runner, stream=stream)
    allocator = PageAllocator(num_pages=pool.num_pages, page_size=config.page_size)
    memory = Memory(allocator=allocator, cache=RadixCache(allocator, enabled=not config.disable_radix_cache))
    return EngineParts(
        config=config,
        model=model_config,
        pool=pool,
        scheduler=Scheduler(
            limits=limits(config),
            memory=memory,
            tail_text=tail_text,
            policy=config.schedule_policy,
            priorities=priorities(config),
            ratio=NewTokenRatio(conservativeness=config.schedule_conservativeness),
            draw=random.Random(config.random_seed).random,
            backup_pages=pool.num_pages if host_backup else 0,  # the pool once more
            reserve_floor=reserve_floor,
            growth=MeasuredGrowth(),
            resume_elsewhere=resume_elsewhere,
            vocab_size=min(model_config.vocab_size, num_token_ids or model_config.vocab_size),
        ),
        executor=executor,
        depth=depth(config),
        weights=Weights(config=config, model=model_config, install=lambda m: executor.call(lambda: runner.use(m))),
    )


def _allocate_pool(config: EngineConfig, specs: list, device: torch.device) -> KVPool:  # type: ignore[type-arg]
    page_bytes = KVPool.page_bytes_of(specs, config.page_size)
    pages = num_pages(config, page_bytes=page_bytes, free_bytes=_free_bytes(device))
    try:
        return KVPool(specs, num_pages=pages, page_size=config.page_size, device=device)
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = pages * page_bytes / 2**30
        raise ConfigError(
            f"--max-total-tokens: no memory for a KV cache of {size:.1f} GiB ({error}); lower it"
        ) from error


def _max_pages(config: EngineConfig, pool: KVPool) -> int:
    assert config.context_length is not None
    return min(pool.num_pages, -(-(config.context_length + 1) // config.page_size))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
