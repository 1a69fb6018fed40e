"""Puts an engine together: model, KV pool, executor, scheduler. The only place that knows all of them."""

import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.attention.base import AttentionBackend, CapturableBackend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.registry import make_attention_backend
from engine.config import EngineConfig
from engine.core.cache_events import CacheEvents
from engine.core.finish import TailTexts
from engine.core.growth import MeasuredGrowth
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.page_keys import KVIdentity
from engine.core.radix_cache import RadixCache
from engine.core.scheduler import Scheduler
from engine.executor.decode_graphs import Capture, CudaCapture, DecodeGraphs
from engine.executor.decode_tapes import DecodeTapes, make_decode_tapes
from engine.executor.executor import Executor
from engine.executor.future_map import FutureMap
from engine.executor.graph_sizes import graph_sizes
from engine.executor.layer_marks import LayerMarks
from engine.executor.model_runner import ModelRunner
from engine.executor.sampler import Sampler
from engine.executor.stream import make_stream
from engine.executor.weights import Weights
from engine.hicache.build import build_host_tier
from engine.kernels.linear import linear_kernel
from engine.kv.identity import fingerprint, kv_identity
from engine.kv.kv_pool import KVPool
from engine.kv.page_backup import PageBackup
from engine.kv.page_table import PageTable
from engine.kv_events_config import parse_kv_events_config
from engine.loop.disk_pump import DiskPump
from engine.lora.bank import AdapterBank
from engine.lora.store import AdapterStore
from engine.model_config import ModelConfig
from engine.models.causal_lm import CausalLM
from engine.models.checkpoint import DTYPES
from engine.models.registry import load_model
from engine.resolve import depth, limits, num_pages, priorities, resolve, step_budget
from service.flags import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A ready engine. `config` is resolved. `adapters`: None where requests may name none. `graphs`, `tapes`: of its
    decode steps, on a GPU and on a CPU.

    `events`: what happens in the prefix cache, None where nobody is told. `layers`: how far its steps have got.
    """

    config: EngineConfig
    model: ModelConfig
    pool: KVPool
    scheduler: Scheduler
    executor: Executor
    depth: int
    weights: Weights
    disk: DiskPump
    layers: LayerMarks
    adapters: AdapterStore | None = None
    events: CacheEvents | None = None
    graphs: DecodeGraphs | None = None
    tapes: DecodeTapes | None = None


def build_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    tail_texts: TailTexts,
    progress: bool,
    host_backup: bool = False,
    resume_elsewhere: bool = False,
    reserve_floor: int = 0,
    host_tier: bool = True,
    wakeup: Callable[[], None] = lambda: None,
    num_token_ids: int | None = None,
    decodes: bool = True,
    capture: Callable[[], Capture] | None = None,
    load: Callable[..., CausalLM] = load_model,
) -> EngineParts:
    """Load the model and allocate its memory. Raises ConfigError for what cannot be honoured here.

    `host_backup`: retracted requests' KV is copied to host memory. `resume_elsewhere`: their KV is the role's affair.
    `num_token_ids`: ids that the tokenizer knows; a model may have rows beyond them, which mean nothing (None: all do).
    `reserve_floor`: tokens of growth that `Scheduler.reserve` expects of a request at least.
    `host_tier`: False where peers write pages (decode): --enable-hierarchical-cache means nothing there.
    `decodes`: False where answers are not continued (prefill): no decode graphs are made.
    `capture`: how decode graphs are recorded; default: as CUDA graphs on cuda, not at all elsewhere.
    `load`: where the model comes from; as `load_model`.
    `wakeup` is called in a thread when files of the hierarchical cache have been read or written.
    """
    config = resolve(config, model_config, cuda=torch.cuda.is_available())
    num_threads = config.num_threads
    assert num_threads is not None, "of a resolved config"
    torch.set_num_threads(num_threads)
    device = torch.device(config.device)
    before = fingerprint(config.model_path) if config.enable_hierarchical_cache else ""
    model = load(
        config.model_path,
        model_config,
        dtype=config.dtype,
        device=config.device,
        progress=progress,
        context_length=config.context_length,
    )
    pool = _allocate_pool(config, model.cache_specs(), device)
    num_slots = config.max_running_requests
    tier = None
    if config.enable_hierarchical_cache and host_tier:
        if fingerprint(config.model_path) != before:
            raise ConfigError(f"--model-path {config.model_path}: its files changed while they were read; start again")
        identity = _identities(config, model_config, pool)
        tier = build_host_tier(config, pool, identity(config.weight_version, before), wakeup=wakeup)
    bank = AdapterBank() if config.enable_lora else None
    layers = LayerMarks(device)
    backend = make_attention_backend(config.attention_backend, pool, num_heads=model_config.num_heads)
    page_table = PageTable(
        num_slots=num_slots, max_pages=_max_pages(config, pool), page_size=config.page_size, device=device
    )
    future_map = FutureMap(num_slots=num_slots, device=device)
    if capture is None and decodes and device.type == "cuda" and not config.disable_cuda_graph:
        capture = partial(CudaCapture, device)
    graphs = _graphs(config, capture, backend, page_table=page_table, future_map=future_map, progress=progress)
    tapes = _tapes(config, backend) if decodes and capture is None else None
    runner = ModelRunner(
        model=model,
        backend=backend,
        page_table=page_table,
        future_map=future_map,
        sampler=Sampler(num_slots=num_slots, vocab_size=model_config.vocab_size, device=device),
        device=device,
        graphs=graphs,
        tapes=tapes,
        backup=PageBackup(pool),
        host_pool=tier.pool if tier else None,
        adapters=bank,
        layers=layers,
    )
    stream = make_stream(
        config.stream,
        device=device,
        num_threads=num_threads,
        max_delay_s=config.stream_delay_ms / 1000,
        seed=config.random_seed or 0,
    )
    executor = Executor(runner=runner, stream=stream)
    _record(executor, runner)
    allocator = PageAllocator(num_pages=pool.num_pages, page_size=config.page_size)
    host = tier.cache if tier else None
    told = parse_kv_events_config(config.kv_events_config) is not None and not config.disable_radix_cache
    events = CacheEvents(page_size=config.page_size) if told else None
    cache = RadixCache(allocator, enabled=not config.disable_radix_cache, below=host, listener=events)
    memory = Memory(allocator=allocator, cache=cache, host=host)
    return EngineParts(
        config=config,
        model=model_config,
        pool=pool,
        scheduler=Scheduler(
            limits=limits(config),
            memory=memory,
            tail_texts=tail_texts,
            policy=config.schedule_policy,
            priorities=priorities(config),
            ratio=NewTokenRatio(conservativeness=config.schedule_conservativeness),
            draw=random.Random(config.random_seed).random,
            backup_pages=pool.num_pages if host_backup else 0,  # the pool once more
            reserve_floor=reserve_floor,
            growth=MeasuredGrowth(),
            resume_elsewhere=resume_elsewhere,
            step_budget=step_budget(config, model_config),
            vocab_size=min(model_config.vocab_size, num_token_ids or model_config.vocab_size),
        ),
        executor=executor,
        depth=depth(config),
        weights=Weights(
            config=config,
            model=model_config,
            install=lambda m: executor.call(lambda: runner.use(m)),
            taken=None if host is None else lambda version, files: host.use_identity(identity(version, files)),
        ),
        disk=tier.pump if tier else DiskPump(),
        adapters=None if bank is None else _adapter_store(config, model, bank, executor),
        events=events,
        layers=layers,
        graphs=graphs,
        tapes=tapes,
    )


def _tapes(config: EngineConfig, backend: AttentionBackend) -> DecodeTapes | None:
    """Where C kernels do all of a decode step, unless --disable-cuda-graph says no."""
    kernels = isinstance(backend, CpuBackend) and backend.has_kernel and linear_kernel() is not None
    return make_decode_tapes() if kernels and config.dtype == "bfloat16" and not config.disable_cuda_graph else None


def _graphs(
    config: EngineConfig,
    capture: Callable[[], Capture] | None,
    backend: AttentionBackend,
    *,
    page_table: PageTable,
    future_map: FutureMap,
    progress: bool,
) -> DecodeGraphs | None:
    if capture is None:
        return None
    if not isinstance(backend, CapturableBackend):
        log.warning("no decode graphs: the attention backend asks the host for lengths; triton does not")
        return None
    sizes = graph_sizes(
        asked=config.cuda_graph_bs, max_bs=config.cuda_graph_max_bs, max_running=config.max_running_requests
    )
    return DecodeGraphs(
        sizes=sizes,
        capture=capture,
        backend=backend,
        page_table=page_table,
        future_map=future_map,
        device=torch.device(config.device),
        progress=progress,
    )


def _record(executor: Executor, runner: ModelRunner) -> None:
    try:
        executor.call(runner.record)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the decode graphs ({error}); lower it or --cuda-graph-max-bs, "
            "or give --disable-cuda-graph"
        ) from error


def _adapter_store(config: EngineConfig, model: CausalLM, bank: AdapterBank, executor: Executor) -> AdapterStore:
    return AdapterStore(
        bank=bank,
        sites=[site.shape for site in model.linear_sites()],
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
        max_rank=config.max_lora_rank,
        in_order=executor.call,
    )


def _identities(config: EngineConfig, model: ModelConfig, pool: KVPool) -> Callable[[str, str], KVIdentity]:
    """What KV is called, by the weights' version and fingerprint."""
    return lambda version, files: kv_identity(pool, model, dtype=config.dtype, version=version, fingerprint=files)


def _allocate_pool(config: EngineConfig, specs: list, device: torch.device) -> KVPool:  # type: ignore[type-arg]
    page_bytes = KVPool.page_bytes_of(specs, config.page_size)
    pages = num_pages(config, page_bytes=page_bytes, free_bytes=_free_bytes(device))
    try:
        pool = KVPool(specs, num_pages=pages, page_size=config.page_size, device=device)
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = pages * page_bytes / 2**30
        raise ConfigError(
            f"--max-total-tokens: no memory for a KV cache of {size:.1f} GiB ({error}); lower it"
        ) from error
    if config.prefault_kv and device.type == "cpu":
        pool.buffer.zero_()
    return pool


def _max_pages(config: EngineConfig, pool: KVPool) -> int:
    assert config.context_length is not None
    return min(pool.num_pages, -(-(config.context_length + 1) // config.page_size))


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
