"""The first half of a rank's steps, put together: attention, page tables, parts, tapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.attention.backend import (
    AttentionBackend,
    CapturableBackend,
    WindowedBackend,
    make_attention_backend,
    windowed,
)
from engine.attention.torch_backend import CpuBackend
from engine.config import EngineConfig, MemoryFlags
from engine.device.feature_parts import make_adapters, make_parts, make_states
from engine.device.step_memory import Recording, StepMemory
from engine.executor.decode_tapes import DecodeTapes
from engine.executor.graphs import DecodeGraphs, PrefillGraphs
from engine.executor.joint_steps import JointSteps
from engine.executor.layer_marks import LayerMarks
from engine.executor.passes import ForwardPass
from engine.executor.states import States
from engine.executor.step_part import PagedPool, Recorded, StepInputs, StepPart
from engine.kernels.linear import linear_kernel
from engine.kernels.tape import tape_library
from engine.kv.step_batch import PageTable, WindowedPageTable
from engine.lora.bank import AdapterBank
from engine.models.decoder import DenseDecoder
from engine.parallel.row_exchange import RowExchange


@dataclass(frozen=True, slots=True)
class ForwardParts:
    """All that computes the first half of steps.

    `pools`: of all layers. `exchange`: with DP attention.
    """

    backend: AttentionBackend
    page_table: PageTable
    layers: LayerMarks
    parts: list[StepPart]
    pools: list[PagedPool]
    tapes: list[DecodeTapes]
    adapters: AdapterBank | None
    states: States | None
    exchange: RowExchange | None

    def forward_pass(
        self,
        inputs: StepInputs,
        graphs: Sequence[DecodeGraphs | PrefillGraphs],
        drafter: StepPart | None,
        *,
        beside: Sequence[Recorded],
    ) -> ForwardPass:
        joint = []
        if self.exchange is not None:
            decodes = [one for one in graphs if isinstance(one, DecodeGraphs)]
            slot = self.page_table.scratch_slot
            joint.append(JointSteps(self.exchange, graphs=decodes, tapes=self.tapes, scratch_slot=slot))
        return ForwardPass(
            backend=self.backend,
            page_table=self.page_table,
            inputs=inputs,
            layers=self.layers,
            parts=[*joint, *self.parts, *([] if drafter is None else [drafter])],
            recorded=[*graphs, *self.tapes],
            beside=beside,
        )


def build_forward(
    config: EngineConfig,
    model: DenseDecoder,
    memory: StepMemory,
    records: Recording,
    *,
    exchange: RowExchange | None,
) -> ForwardParts:
    """`exchange`: with DP attention. Raises ConfigError."""
    backend, pools = attention_of(config, model, memory)
    tapes = records.decodes and records.capture is None
    page_table, shared_by = pools[0].page_table, config.dp_size if exchange is not None else 1
    recorded = [DecodeTapes(shared_by=shared_by)] if tapes and model.recordable and _can_tape(config, backend) else []
    adapters = make_adapters(config, model, grouped=isinstance(backend, CapturableBackend))
    states = make_states(config, model, memory, page_table.device)
    parts = make_parts(config, model, memory, page_table, adapters=adapters, states=states)
    layers = LayerMarks(page_table.device, more_follows=model.drafter is not None)
    return ForwardParts(backend, page_table, layers, parts, pools, recorded, adapters, states, exchange)


def attention_of(
    config: EngineConfig, model: DenseDecoder, memory: StepMemory
) -> tuple[AttentionBackend, list[PagedPool]]:
    """The pools are of all layers, the drafter's in the first. Raises ConfigError."""
    assert config.max_running_requests is not None, "resolved"
    pool, windows = memory.pool, memory.windows
    own = partial(make_attention_backend, config.attention_backend, num_heads=model.num_heads)
    make = partial(own, needs=model.attention_needs)
    rows, device, size = config.max_running_requests, pool.device, config.page_size
    max_pages = memory.max_pages or min(pool.num_pages, context_pages(config))
    if windows is None:
        table = PageTable(num_slots=rows, max_pages=max_pages, page_size=size, device=device)
        return make(pool), [PagedPool(pool, table)]
    both = WindowedPageTable(num_slots=rows, max_pages=max_pages, page_size=size, device=device)
    inside = [spec.window > 0 for spec in model.cache_specs()]
    backend = windowed(make(pool) if pool.specs else None, make(windows), in_window=inside)
    return backend, [PagedPool(pool, both), PagedPool(windows, both.windows)]


def _can_tape(config: EngineConfig, backend: AttentionBackend) -> bool:
    by_c_kernels = (
        config.dtype == "bfloat16" and isinstance(backend, CpuBackend | WindowedBackend) and backend.has_kernel
    )
    recordable = by_c_kernels and not config.sums_span_nodes  # between machines Python moves the bytes of a sum
    return recordable and not config.disable_cuda_graph and linear_kernel() is not None and tape_library() is not None


def context_pages(config: MemoryFlags) -> int:
    assert config.context_length is not None, "resolved"
    return -(-(config.context_length + 1) // config.page_size)
