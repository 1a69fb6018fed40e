"""Prefill and decode streams of PD multiplexing: one executor each, over one model and KV pool.

On a CPU they divide the threads (engine/pdmux/core_share.py). On a GPU they are CUDA streams,
decode's with the higher priority.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.config import EngineConfig, ModelFlags
from engine.core.plan import Phase
from engine.device.device import Device, nothing_to_give
from engine.device.step_memory import Recording
from engine.executor.executor import Executor, Stream, StreamTask, ThreadStream
from engine.executor.graphs import CudaCapture
from engine.kernels import tape
from engine.kernels.linear import linear_kernel
from engine.pdmux.core_share import CoreShare, be_nice
from service.waiter import run_into, start_in_thread

ORDER = {Phase.DECODE: -1, Phase.PREFILL: 0}  # of streams: lower numbers first

T = TypeVar("T")


class Build(Protocol):
    """`build_device` with its other arguments given: the streams differ in these."""

    def __call__(self, *, records: Recording, stream: Stream) -> Device: ...


def build_lanes(build: Build, config: EngineConfig, records: Recording, *, attention: Callable[[], None]) -> Device:
    """Decode's device, with the executor of both."""
    assert config.num_threads is not None, "resolved"
    parts = 1
    give: Callable[[int], None] = nothing_to_give
    if config.device == "cuda":
        device = torch.device(config.device)
        streams: dict[Phase, Stream] = {phase: CudaLane(device, priority=at) for phase, at in ORDER.items()}
    else:
        share = CoreShare(config.num_threads)
        parts, give = share.num_threads, share.give
        streams = {Phase.DECODE: _decodes(config, share), Phase.PREFILL: _prompts(config, share)}
    decode, prefill = (build(records=_records_of(records, phase, config), stream=streams[phase]) for phase in ORDER)
    both = Executor([*decode.executor.streams, *prefill.executor.streams], attention=attention)
    return replace(decode, executor=both, parts=parts, give=give)


def _records_of(records: Recording, phase: Phase, config: EngineConfig) -> Recording:
    """Its steps, on a GPU with its priority."""
    capture = records.capture
    if capture is None and config.device == "cuda":
        stream = torch.cuda.Stream(torch.device("cuda"), priority=ORDER[phase])  # type: ignore[no-untyped-call]
        capture = partial(CudaCapture, stream)
    return replace(records, decodes=phase is Phase.DECODE, prefills=phase is Phase.PREFILL, capture=capture)


def _decodes(config: EngineConfig, share: CoreShare) -> ThreadStream:
    assert config.num_threads is not None, "resolved"
    return ThreadStream(
        num_threads=config.num_threads,
        max_delay_s=config.stream_delay_s,
        seed=config.random_seed or 0,
        begin=lambda: tape.let_count(share.for_decodes),
        around=_around(config, share, Phase.DECODE, share.decode_step),
    )


def _prompts(config: EngineConfig, share: CoreShare) -> ThreadStream:
    assert config.num_threads is not None, "resolved"

    def begin() -> None:
        be_nice()
        tape.let_count(share.for_prompts)

    return ThreadStream(
        num_threads=config.num_threads,
        max_delay_s=config.stream_delay_s,
        seed=(config.random_seed or 0) + 1,
        begin=begin,
        around=_around(config, share, Phase.PREFILL, share.prompt_step),
    )


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


# ---- A CUDA stream whose work is enqueued by a thread of its own.


class _CudaLaneTask(Generic[T]):
    def __init__(self, future: Future[T], enqueued: Future[torch.cuda.Event]) -> None:
        self._future = future
        self._enqueued = enqueued

    def result(self) -> T:
        self._enqueued.result().synchronize()
        return self._future.result()

    def done(self) -> bool:
        return self._enqueued.done() and bool(self._enqueued.result().query())  # type: ignore[no-untyped-call]

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        start_in_thread(lambda: self._enqueued.result().synchronize(), name="step end", when_done=lambda: call(self))


class CudaLane:
    """Stream with a `priority`, CUDA's."""

    def __init__(self, device: torch.device, *, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)  # as in CudaStream
        self._thread = ThreadStream(num_threads=1, around=lambda: torch.cuda.stream(self._stream))

    def submit(self, work: Callable[[], T]) -> StreamTask[T]:
        future = Future[T]()

        def enqueue() -> torch.cuda.Event:
            run_into(future, work)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as in CudaStream
            event.record(self._stream)
            return event

        enqueued = Future[torch.cuda.Event]()
        self._thread.submit(lambda: run_into(enqueued, enqueue))
        return _CudaLaneTask(future, enqueued)

    def close(self) -> None:
        self._thread.close()
        self._stream.synchronize()
