"""An engine's device: model, KV pool and executor."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.attention.backend import CapturableBackend
from engine.config import EngineConfig
from engine.core.plan import Plan
from engine.device.feature_parts import with_draft_futures
from engine.device.forward_parts import build_forward
from engine.device.graphs import make_drafter, make_graphs, make_recorder
from engine.device.host_copies import make_copies
from engine.device.step_memory import RankSeat, Recording, StepMemory, memory_for_graphs
from engine.executor.executor import CudaStream, DeviceStream, Executor, InlineStream, Stream, ThreadStream
from engine.executor.graphs import SampledEnd
from engine.executor.layer_marks import LayerMarks
from engine.executor.model_runner import ModelRunner
from engine.executor.passes import SamplePass
from engine.executor.step_part import FutureMap
from engine.executor.warm_up import by_executor
from engine.kv.kv_pool import DTYPES, KVPool
from engine.kv.state_pool import StatePool
from engine.lora.bank import AdapterBank, LoraStore
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.sampler.sampler import CapturableSampler, make_sampler


def nothing_to_give(decode_parts: int) -> None:
    """Do nothing: only stream priorities share the device."""


@dataclass(frozen=True, slots=True)
class Device:
    """`layers`: progress of steps. `adapters`: with --enable-lora.

    `states`, `windows`: pools of recurrent and window layers. `parts`: shares of the device; `give`
    sets those of decode beside prompts.
    """

    executor: Executor
    layers: LayerMarks
    adapters: LoraStore | None
    states: StatePool | None
    windows: KVPool | None
    parts: int = 1
    give: Callable[[int], None] = nothing_to_give


def build_device(
    config: EngineConfig,
    model_config: ModelConfig,
    model: DenseDecoder,
    memory: StepMemory,
    *,
    records: Recording,
    seat: RankSeat,
    stream: Stream | None = None,
) -> Device:
    """Assemble the executor and record its steps. Raises ConfigError."""
    assert config.num_threads is not None and config.max_running_requests is not None, "resolved"
    device, num_slots = memory.pool.device, config.max_running_requests
    parts = build_forward(config, model, memory, records, exchange=seat.exchange)
    in_graphs = isinstance(parts.backend, CapturableBackend)
    future_map = seat.future_map or FutureMap.on(device, num_slots=num_slots)
    inputs = with_draft_futures(config, seat.inputs or future_map, device)
    sampler = make_sampler(num_slots=num_slots, vocab_size=model_config.vocab_size, device=device, in_graphs=in_graphs)
    end = SampledEnd(sampler, future_map, device=device) if isinstance(sampler, CapturableSampler) else None
    recorder = make_recorder(config, parts, records, inputs=inputs)
    drafts = make_drafter(config, model, parts, records, recorder=recorder, sampler=sampler, inputs=inputs)
    graphs = make_graphs(config, model, parts, records, recorder=recorder, end=end, drafter=drafts)
    beside = [] if drafts is None else drafts.recorded
    runner = ModelRunner(
        model=model,
        copies=make_copies(memory, parts.states),
        forward_pass=parts.forward_pass(inputs, graphs, drafts, beside=beside),
        sample_pass=SamplePass(sampler=sampler, future_map=future_map, device=device),
        drafts=drafts,
        states=parts.states,
    )
    executor = Executor([DeviceStream(runner=runner, stream=stream or make_stream(config, device))])
    with memory_for_graphs():
        executor.call(runner.running.record)
    adapters = None if parts.adapters is None else adapter_store(config, model, parts.adapters, in_order=executor.call)
    states = None if parts.states is None else parts.states.pool
    return Device(executor, parts.layers, adapters, states, memory.windows)


@contextmanager
def own_steps(
    config: EngineConfig, model_config: ModelConfig, model: DenseDecoder, seat: RankSeat, memory: StepMemory
) -> Iterator[Callable[[Plan], None]]:
    device = build_device(
        replace(config, enable_lora=False, max_mamba_cache_size=2),
        model_config,
        model,
        memory,
        records=Recording(),
        seat=seat,
    )
    try:
        yield by_executor(device.executor)
    finally:
        device.executor.close()


def make_stream(config: EngineConfig, device: torch.device) -> Stream:
    assert config.num_threads is not None, "resolved"
    if config.stream == "cuda":
        return CudaStream(device)
    if config.stream == "threaded":
        return ThreadStream(
            num_threads=config.num_threads, max_delay_s=config.stream_delay_s, seed=config.random_seed or 0
        )
    return InlineStream()


def adapter_store(
    config: EngineConfig, model: DenseDecoder, bank: AdapterBank, *, in_order: Callable[[Callable[[], object]], object]
) -> LoraStore:
    """Work passed to `in_order` runs after all launched steps."""
    return LoraStore(
        bank=bank,
        sites=[site.shape for site in model.linear_sites()],
        elsewhere=model.other_sites(),
        dtype=DTYPES[config.dtype],
        device=torch.device(config.device),
        max_rank=config.max_lora_rank,
        in_order=in_order,
    )
