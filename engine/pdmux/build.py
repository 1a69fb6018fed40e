"""Prefill and decode streams of PD multiplexing: one executor each, over one model and KV pool.

On a CPU they divide the threads (engine/pdmux/core_share.py), on a GPU the multiprocessors
(engine/pdmux/cuda_lane.py), or have stream priorities where it cannot be divided.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from engine.config import EngineConfig, ModelFlags
from engine.core.plan import Phase
from engine.device.device import Device, nothing_to_give
from engine.device.step_memory import Recording
from engine.executor.executor import Executor, Stream, ThreadStream
from engine.flags.pdmux import itl_objective_s
from engine.kernels import tape
from engine.kernels.linear import linear_kernel
from engine.pdmux.core_share import CoreShare, be_nice
from engine.pdmux.cuda_lane import CudaLane, Partition
from engine.pdmux.green_contexts import NotDivisible, divided
from engine.pdmux.phases import PARTS, SmShare, divisions, grain_of

ORDER = {Phase.DECODE: -1, Phase.PREFILL: 0}  # of streams: lower numbers first

log = logging.getLogger(__name__)


class Build(Protocol):
    """`build_device` with its other arguments given: the streams differ in these."""

    def __call__(self, *, records: Recording, stream: Stream) -> Device: ...


def build_lanes(build: Build, config: EngineConfig, records: Recording, *, attention: Callable[[], None]) -> Device:
    """Decode's device, with the executor of both."""
    lanes = _on_gpu(config) if config.device == "cuda" else _on_cpu(config)
    decode, prefill = (
        build(records=_records_of(records, phase, lanes.streams[phase]), stream=lanes.streams[phase]) for phase in ORDER
    )
    both = Executor([*decode.executor.streams, *prefill.executor.streams], attention=attention)
    return replace(decode, executor=both, parts=lanes.parts, give=lanes.give)


def _records_of(records: Recording, phase: Phase, stream: Stream) -> Recording:
    capture = records.capture
    if capture is None and isinstance(stream, CudaLane):
        capture = stream.new_capture
    return replace(records, decodes=phase is Phase.DECODE, prefills=phase is Phase.PREFILL, capture=capture)


@dataclass(frozen=True, slots=True)
class _Streams:
    streams: Mapping[Phase, Stream]
    parts: int = 1
    give: Callable[[int], None] = nothing_to_give


# ---- GPU


def streams_per_phase(config: EngineConfig) -> int:
    return 1 + len(_decode_sms(config)) if config.device == "cuda" else 1


def _decode_sms(config: EngineConfig) -> list[int]:
    """SMs of decodes in each division; without an objective a half."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts = 2 if itl_objective_s(config) is None else PARTS
    return divisions(gpu.multi_processor_count, grain_of(gpu.major), parts=parts)


def _on_gpu(config: EngineConfig) -> _Streams:
    device = torch.device("cuda", torch.cuda.current_device())
    whole = {phase: Partition(torch.cuda.Stream(device, priority=at)) for phase, at in ORDER.items()}  # type: ignore[no-untyped-call]
    pairs = _divided(device, _decode_sms(config))
    share = SmShare(len(pairs))
    streams = {
        phase: CudaLane([partition, *(pair[phase] for pair in pairs)], chosen=lambda: share.division)
        for phase, partition in whole.items()
    }
    torch.cuda.synchronize(device)  # as in CudaStream
    return _Streams(streams, parts=1 + len(pairs), give=share.give)


def _divided(device: torch.device, decode_sms: Sequence[int]) -> list[dict[Phase, Partition]]:
    try:
        pairs = divided(device, decode_sms, order=ORDER)
    except NotDivisible as error:
        log.warning("PD multiplexing: decodes have priority over prompts, but no SMs of their own: %s", error)
        return []
    sms = " or ".join(f"{pair[Phase.DECODE].sms} + {pair[Phase.PREFILL].sms}" for pair in pairs)
    log.info("PD multiplexing: SMs of decodes + prompts beside each other: %s", sms)
    return pairs


# ---- CPU


def _on_cpu(config: EngineConfig) -> _Streams:
    assert config.num_threads is not None, "resolved"
    share, seed = CoreShare(config.num_threads), config.random_seed or 0
    own = partial(ThreadStream, num_threads=config.num_threads, max_delay_s=config.stream_delay_s)

    def begin_prompts() -> None:
        be_nice()
        tape.let_count(share.for_prompts)

    decodes = own(
        seed=seed,
        begin=lambda: tape.let_count(share.for_decodes),
        around=_around(config, share, Phase.DECODE, share.decode_step),
    )
    prompts = own(seed=seed + 1, begin=begin_prompts, around=_around(config, share, Phase.PREFILL, share.prompt_step))
    return _Streams({Phase.DECODE: decodes, Phase.PREFILL: prompts}, parts=share.num_threads, give=share.give)


def _around(
    config: ModelFlags, share: CoreShare, phase: Phase, step: Callable[[], AbstractContextManager[None]]
) -> Callable[[], AbstractContextManager[None]]:
    """`step`, in which torch has the phase's threads where it multiplies itself."""
    if config.dtype == "bfloat16" and linear_kernel() is not None:
        return step

    @contextmanager
    def with_threads() -> Iterator[None]:
        with step():
            if (threads := share.torch_for(phase)) != torch.get_num_threads():
                torch.set_num_threads(threads)
            yield

    return with_threads
