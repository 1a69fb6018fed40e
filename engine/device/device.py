"""What an engine has on its device: model, KV pool, and the executor that runs steps over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.attention.backend import AttentionBackend, CapturableBackend, make_attention_backend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.windowed import WindowedBackend, windowed
from engine.config import EngineConfig
from engine.core.backups import NOTHING, CopySize
from engine.device.graphs import MakeCapture, make_graphs
from engine.device.host_copies import make_copies
from engine.executor.decode_graphs import DecodeGraphs
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.device_stream import DeviceStream
from engine.executor.draft_pass import DraftPass, PagedPool
from engine.executor.executor import Executor
from engine.executor.forward_pass import ForwardPass
from engine.executor.future_map import FutureMap, StepInputs
from engine.executor.image_pass import ImagePass
from engine.executor.joint_steps import JointSteps
from engine.executor.layer_marks import LayerMarks
from engine.executor.model_runner import ModelRunner
from engine.executor.prefill_graphs import PrefillGraphs
from engine.executor.recorded_ends import SampledEnd
from engine.executor.sample_pass import SamplePass
from engine.executor.states import States
from engine.executor.stream import CudaStream, InlineStream, Stream, ThreadStream
from engine.flags.resolve import state_slots
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from engine.kv.host_pool import HostPool
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.page_table import PageTable
from engine.kv.state_pool import StatePool
from engine.lora.bank import AdapterBank
from engine.lora.build import make_bank
from engine.lora.store import LoraStore
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.parallel.layout import ALONE, Place, share_of
from engine.parallel.row_exchange import RowExchange
from engine.sampler.make import CapturableSampler, TokenSampler, make_sampler
from service.flags import ConfigError


def nothing_to_give(decode_parts: int) -> None:
    """A device without parts is shared by the priorities of streams, if at all."""


@dataclass(frozen=True, slots=True)
class Device:
    """`layers`: how far the steps have got. `adapters`: None without --enable-lora.

    `graphs`, `tapes`: recorded decode steps, on a GPU and on a CPU. `prefill_graphs`: recorded prompts. `states`: of recurrent layers.
    `windows`: of layers with a window that have a pool of their own. `parts`: into which streams share the device; `give` sets how many
    decode steps have beside prompts.
    """

    executor: Executor
    layers: LayerMarks
    adapters: LoraStore | None
    graphs: DecodeGraphs | None
    prefill_graphs: PrefillGraphs | None
    tapes: DecodeTapes | None
    states: StatePool | None
    windows: KVPool | None
    parts: int = 1
    give: Callable[[int], None] = nothing_to_give


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """The parts that compute the first half of steps. `tapes`: of decode steps on a CPU. `joint`: with DP attention.

    `states`: of a model with recurrent layers. `window_table`: of layers with a window that have a pool of their own.
    `sees`, `images`: as of ForwardPass.
    """

    backend: AttentionBackend
    page_table: PageTable
    layers: LayerMarks
    adapters: AdapterBank | None
    tapes: DecodeTapes | None
    joint: JointSteps | None
    states: States | None
    window_table: PageTable | None
    sees: bool = False
    images: ImagePass | None = None

    def pools(self, pool: KVPool, windows: KVPool | None) -> list[PagedPool]:
        """Return the pools of all layers, each with where requests' pages in it are; the drafter's is the first."""
        apart = [] if windows is None or self.window_table is None else [PagedPool(windows, self.window_table)]
        return [PagedPool(pool, self.page_table), *apart]

    def forward_pass(
        self,
        inputs: StepInputs,
        *,
        graphs: DecodeGraphs | None = None,
        prefill_graphs: PrefillGraphs | None = None,
        drafts: DraftPass | None = None,
    ) -> ForwardPass:
        return ForwardPass(
            backend=self.backend,
            page_table=self.page_table,
            inputs=inputs,
            layers=self.layers,
            adapters=self.adapters,
            graphs=graphs,
            prefill_graphs=prefill_graphs,
            tapes=self.tapes,
            joint=self.joint,
            states=self.states,
            window_table=self.window_table,
            drafts=drafts,
            sees=self.sees,
            images=self.images,
        )


def build_forward(
    config: EngineConfig,
    model: DenseDecoder,
    pool: KVPool,
    *,
    num_heads: int,
    tapes: bool,
    max_pages: int | None = None,
    exchange: RowExchange | None = None,
    windows: KVPool | None = None,
    shadows: int = 0,
    sees: bool = False,
    arrivals: KVPool | None = None,
) -> ForwardParts:
    """`config` is resolved. `num_heads`: query heads of `model`. `tapes`: decode steps are recorded where they can be.

    `max_pages`: of a request; None: as many as the pool has and the context needs. `windows`: pool of the layers that have one.
    `shadows`: of how many requests with recurrent states a step may verify drafts. `sees`: tokens may be those of images, whose features
    arrive in `arrivals`, if encode workers send them.
    Raises ConfigError.
    """
    assert config.max_running_requests is not None, "resolved"
    make = partial(make_attention_backend, config.attention_backend, num_heads=num_heads, needs=model.attention_needs)
    if windows is None:
        backend = make(pool)
    else:
        inside = [spec.window > 0 for spec in model.cache_specs()]
        backend = windowed(make(pool) if pool.specs else None, make(windows), in_window=inside)
    if max_pages is None:
        max_pages = min(pool.num_pages, context_pages(config))
    num_slots = config.max_running_requests
    page_table = PageTable(num_slots=num_slots, max_pages=max_pages, page_size=config.page_size, device=pool.device)
    window_table = None
    if windows is not None:
        window_table = PageTable(
            num_slots=num_slots, max_pages=max_pages, page_size=config.page_size, device=pool.device
        )
    brings = config.dp_size if exchange is not None else 1
    recorded = DecodeTapes(shared_by=brings) if tapes and model.recordable and _can_tape(config, backend) else None
    scratch = page_table.scratch_slot
    return ForwardParts(
        backend=backend,
        page_table=page_table,
        layers=LayerMarks(pool.device, more_follows=model.drafter is not None),
        adapters=_bank(config, model, grouped=isinstance(backend, CapturableBackend)) if config.enable_lora else None,
        tapes=recorded,
        joint=None if exchange is None else JointSteps(exchange, tapes=recorded, scratch_slot=scratch),
        states=_states(config, model, pool.device, shadows=shadows),
        window_table=window_table,
        sees=sees,
        images=None if model.vision is None else _image_pass(config, pool.device, arrivals),
    )


def build_device(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    pool: KVPool,
    *,
    host_pool: HostPool | None,
    capture: MakeCapture | None,
    decodes: bool,
    prefills: bool,
    progress: bool,
    max_pages: int | None = None,
    place: Place = ALONE,
    exchange: RowExchange | None = None,
    future_map: FutureMap | None = None,
    inputs: StepInputs | None = None,
    windows: KVPool | None = None,
    shadows: int = 0,
    backup_room: CopySize = NOTHING,
    arrivals: KVPool | None = None,
    stream: Stream | None = None,
) -> Device:
    """Put `model` and `pool` under an executor and record its decode steps. Raises ConfigError.

    `config` is resolved. `decodes`, `prefills`: whether such steps are recorded, as CUDA graphs or (decode steps) as tapes of
    C kernels. `capture`: records graphs in place of CUDA. `max_pages`: of a request; None: as many as the pool has and the context
    needs. `place`: which rank of the model this is. `exchange`: with DP attention. `future_map`: shared with other ranks. `inputs`: of
    steps; None: the future map's. `windows`, `shadows`, `arrivals`: as of `build_forward`. `backup_room`: for copies of retracted requests.
    `stream`: None: the one that `config` says.
    """
    assert config.num_threads is not None and config.max_running_requests is not None, "resolved"
    device, num_slots = pool.device, config.max_running_requests
    parts = build_forward(
        config,
        model,
        pool,
        num_heads=len(share_of(model_config, place).heads),
        tapes=decodes and capture is None,
        max_pages=max_pages,
        exchange=exchange,
        windows=windows,
        shadows=shadows,
        sees=model_config.vision is not None,
        arrivals=arrivals,
    )
    in_graphs = isinstance(parts.backend, CapturableBackend)
    future_map = future_map or FutureMap.on(device, num_slots=num_slots)
    sampler = make_sampler(num_slots=num_slots, vocab_size=model_config.vocab_size, device=device, in_graphs=in_graphs)
    graphs, prefill_graphs = make_graphs(
        config,
        decodes=decodes,
        prefills=prefills,
        capture=capture,
        backend=parts.backend,
        page_table=parts.page_table,
        inputs=inputs or future_map,
        end=SampledEnd(sampler, future_map, device=device) if isinstance(sampler, CapturableSampler) else None,
        adapters=parts.adapters,
        has_states=parts.states is not None,
        is_watched=model.is_watched,
        sees=parts.sees,
        progress=progress,
    )
    drafts = make_draft_pass(config, model, parts.pools(pool, windows), sampler=sampler)
    states = None if parts.states is None else parts.states.pool
    runner = ModelRunner(
        model=model,
        copies=make_copies(backup_room, host_pool=host_pool, pool=pool, windows=windows, states=states),
        forward_pass=parts.forward_pass(
            inputs or future_map, graphs=graphs, prefill_graphs=prefill_graphs, drafts=drafts
        ),
        sample_pass=SamplePass(sampler=sampler, future_map=future_map, device=device),
        drafts=drafts,
    )
    executor = Executor([DeviceStream(runner=runner, stream=stream or make_stream(config, device))])
    with memory_for_graphs():
        executor.call(runner.running.record)
    adapters = None if parts.adapters is None else adapter_store(config, model, parts.adapters, in_order=executor.call)
    return Device(executor, parts.layers, adapters, graphs, prefill_graphs, parts.tapes, states, windows)


def _image_pass(config: EngineConfig, device: torch.device, arrivals: KVPool | None) -> ImagePass:
    return ImagePass(device, dtype=DTYPES[config.dtype], shares=config.mm_enable_dp_encoder, arrivals=arrivals)


def _can_tape(config: EngineConfig, backend: AttentionBackend) -> bool:
    """Whether decode steps are calls of C kernels alone."""
    by_c_kernels = (
        config.dtype == "bfloat16" and isinstance(backend, CpuBackend | WindowedBackend) and backend.has_kernel
    )
    recordable = by_c_kernels and not config.sums_span_nodes  # between machines Python moves the bytes of a sum
    return recordable and not config.disable_cuda_graph and linear_kernel() is not None and tape_library() is not None


def _states(config: EngineConfig, model: DenseDecoder, device: torch.device, *, shadows: int) -> States | None:
    """Raises ConfigError."""
    assert config.max_running_requests is not None, "resolved"
    specs, num_slots = model.state_specs(), state_slots(config)
    if not specs:
        return None
    try:
        pool = StatePool(specs, num_slots=num_slots, num_shadows=shadows, device=device)
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        size = (num_slots + shadows) * StatePool.slot_bytes_of(specs) / 2**30
        beside = f" and {shadows} copies for drafts" if shadows else ""
        raise ConfigError(
            f"--max-running-requests {config.max_running_requests}: no memory for {num_slots} recurrent states{beside} of {size:.1f} GiB "
            f"({error}); lower it"
        ) from error
    return States(pool, num_rows=config.max_running_requests)


def make_stream(config: EngineConfig, device: torch.device) -> Stream:
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


@contextmanager
def memory_for_graphs() -> Iterator[None]:
    """Raises ConfigError where the block finds no memory."""
    try:
        yield
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


def adapter_store(
    config: EngineConfig, model: DenseDecoder, bank: AdapterBank, *, in_order: Callable[[Callable[[], object]], object]
) -> LoraStore:
    """`in_order` runs work behind every launched step."""
    return LoraStore(
        bank=bank,
        sites=[site.shape for site in model.linear_sites()],
        elsewhere=model.other_sites(),
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
        max_rank=config.max_lora_rank,
        in_order=in_order,
    )


def make_draft_pass(
    config: EngineConfig, model: DenseDecoder, pools: Sequence[PagedPool], *, sampler: TokenSampler | None
) -> DraftPass | None:
    """Return the drafter's part of a rank's steps; None: the model has no drafter.

    `pools`: of all layers. `sampler`: of the rank that samples. Raises ConfigError.
    """
    drafter, pool = model.drafter, pools[0].pool
    if drafter is None:
        return None
    assert pool.drafter is not None, "pages have room for what the drafter keeps"
    return DraftPass(
        pools=pools,
        backend=make_attention_backend(
            config.attention_backend, pool.drafter, num_heads=drafter.num_heads, needs=drafter.attention_needs
        ),
        sampler=sampler,
        collectives=model.collectives,
    )
