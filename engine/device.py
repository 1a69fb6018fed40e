"""What an engine has on its device: model, KV pool, and the executor that runs steps over them."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend, CapturableBackend, make_attention_backend
from engine.attention.cpu_backend import CpuBackend
from engine.config import EngineConfig
from engine.executor.decode_graphs import DecodeGraphs
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.executor import Executor
from engine.executor.forward_pass import ForwardPass
from engine.executor.future_map import FutureMap
from engine.executor.layer_marks import LayerMarks
from engine.executor.model_runner import ModelRunner
from engine.executor.prefill_graphs import PrefillGraphs
from engine.executor.sample_pass import SamplePass
from engine.executor.stream import CudaStream, InlineStream, Stream, ThreadStream
from engine.gpu_memory import GpuMemory
from engine.graphs import MakeCapture, make_graphs
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import DTYPES, AllocateBytes, CacheSpec, KVPool
from engine.kv.page_backup import PageBackup
from engine.kv.page_table import PageTable
from engine.lora.bank import AdapterBank
from engine.lora.build import make_bank
from engine.lora.store import LoraStore
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.resolve import cpu_kv_bytes, gpu_pages, num_pages
from engine.sampler.make import make_sampler
from service.flags import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Device:
    """`layers`: how far the steps have got. `adapters`: None without --enable-lora.

    `graphs`, `tapes`: recorded decode steps, on a GPU and on a CPU. `prefill_graphs`: recorded prompts.
    """

    executor: Executor
    layers: LayerMarks
    adapters: LoraStore | None
    graphs: DecodeGraphs | None
    prefill_graphs: PrefillGraphs | None
    tapes: DecodeTapes | None


def build_device(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    pool: KVPool,
    *,
    host_pool: HostPool | None,
    backup: PageBackup | None,
    capture: MakeCapture | None,
    decodes: bool,
    prefills: bool,
    progress: bool,
    max_pages: int | None = None,
) -> Device:
    """Put `model` and `pool` under an executor and record its decode steps. Raises ConfigError.

    `config` is resolved. `decodes`, `prefills`: whether such steps are recorded, as CUDA graphs or (decode steps) as tapes of
    C kernels. `capture`: records graphs in place of CUDA. `max_pages`: of a request; None: as many as the pool has and the context
    needs.
    """
    assert config.num_threads is not None and config.max_running_requests is not None, "resolved"
    device, num_slots = pool.device, config.max_running_requests
    backend = make_attention_backend(config.attention_backend, pool, num_heads=model_config.num_heads)
    if max_pages is None:
        max_pages = min(pool.num_pages, context_pages(config))
    page_table = PageTable(num_slots=num_slots, max_pages=max_pages, page_size=config.page_size, device=device)
    future_map = FutureMap(num_slots=num_slots, device=device)
    layers = LayerMarks(device)
    bank = _bank(config, model, grouped=isinstance(backend, CapturableBackend)) if config.enable_lora else None
    sampler = make_sampler(
        num_slots=num_slots,
        vocab_size=model_config.vocab_size,
        device=device,
        in_graphs=isinstance(backend, CapturableBackend),
    )
    graphs, prefill_graphs = make_graphs(
        config,
        decodes=decodes,
        prefills=prefills,
        capture=capture,
        backend=backend,
        page_table=page_table,
        future_map=future_map,
        sampler=sampler,
        adapters=bank,
        progress=progress,
    )
    decode_tapes = DecodeTapes() if decodes and capture is None and _can_tape(config, backend) else None
    forward_pass = ForwardPass(
        backend=backend,
        page_table=page_table,
        future_map=future_map,
        layers=layers,
        adapters=bank,
        graphs=graphs,
        prefill_graphs=prefill_graphs,
        tapes=decode_tapes,
    )
    runner = ModelRunner(
        model=model,
        backup=backup,
        host_pool=host_pool,
        forward_pass=forward_pass,
        sample_pass=SamplePass(sampler=sampler, future_map=future_map, device=device),
    )
    executor = Executor(runner=runner, stream=_stream(config, device))
    _record(executor, runner)
    adapters = None if bank is None else _adapter_store(config, model, bank, executor)
    return Device(executor, layers, adapters, graphs, prefill_graphs, decode_tapes)


def _can_tape(config: EngineConfig, backend: AttentionBackend) -> bool:
    """Whether decode steps are calls of C kernels alone."""
    by_c_kernels = config.dtype == "bfloat16" and isinstance(backend, CpuBackend) and backend.has_kernel
    return by_c_kernels and not config.disable_cuda_graph and linear_kernel() is not None and tape_library() is not None


def _stream(config: EngineConfig, device: torch.device) -> Stream:
    assert config.num_threads is not None, "resolved"
    if config.stream == "cuda":
        return CudaStream(device)
    if config.stream == "threaded":
        return ThreadStream(
            num_threads=config.num_threads, max_delay_s=config.stream_delay_s, seed=config.random_seed or 0
        )
    return InlineStream()


def context_pages(config: EngineConfig) -> int:
    """Return the pages that the longest request needs."""
    assert config.context_length is not None, "resolved"
    return -(-(config.context_length + 1) // config.page_size)


def _record(executor: Executor, runner: ModelRunner) -> None:
    try:
        executor.call(runner.record)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--mem-fraction-static: no memory is left for the decode graphs ({error}); lower it or --cuda-graph-max-bs, "
            "or give --disable-cuda-graph"
        ) from error


def _bank(config: EngineConfig, model: DenseDecoder, *, grouped: bool) -> AdapterBank:
    return make_bank(
        [site.shape for site in model.linear_sites()],
        grouped=grouped,
        places=config.max_loras_per_batch,
        max_rank=config.max_lora_rank,
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
    )


def _adapter_store(config: EngineConfig, model: DenseDecoder, bank: AdapterBank, executor: Executor) -> LoraStore:
    return LoraStore(
        bank=bank,
        sites=[site.shape for site in model.linear_sites()],
        elsewhere=model.other_sites(),
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
        max_rank=config.max_lora_rank,
        in_order=executor.call,
    )


def allocate_pool(
    config: EngineConfig, specs: Sequence[CacheSpec], memory: GpuMemory | None, *, allocate: AllocateBytes
) -> KVPool:
    """Allocate the KV cache that --max-total-tokens or --mem-fraction-static asks for. Raises ConfigError.

    `memory`: of the GPU; None: on a CPU, or where --max-total-tokens says all.
    """
    assert config.kv_units is not None, "resolved"
    page_bytes = KVPool.page_bytes_of(specs, config.page_size, units=config.kv_units)
    if memory is None:
        kv_bytes = cpu_kv_bytes(config, free_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        pages = num_pages(config, page_bytes=page_bytes, kv_bytes=kv_bytes)
    else:
        pages = gpu_pages(config, memory, page_bytes=page_bytes)
        _note_capacity(config, memory, tokens=pages * config.page_size)
    device = torch.device(config.device)
    try:
        pool = KVPool(
            specs,
            num_pages=pages,
            page_size=config.page_size,
            device=device,
            units=config.kv_units,
            allocate=allocate,
        )
    except (MemoryError, OSError, torch.OutOfMemoryError, ValueError) as error:
        size = pages * page_bytes / 2**30
        raise ConfigError(
            f"--max-total-tokens: no memory for a KV cache of {size:.1f} GiB ({error}); lower it"
        ) from error
    if config.prefault_kv and device.type == "cpu":
        pool.buffer.zero_()
    return pool


def _note_capacity(config: EngineConfig, memory: GpuMemory, *, tokens: int) -> None:
    assert config.context_length is not None, "resolved"
    log.info("GPU memory: %s GiB, a KV cache of %d tokens", memory, tokens)
    if tokens < config.context_length:
        log.warning(
            "the KV cache holds %d tokens, the model's context %d: longer requests are refused (--context-length)",
            tokens,
            config.context_length,
        )
