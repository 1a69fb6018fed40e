"""An engine with random weights, made on the device: model, pool, graphs, stream and scheduler as they are in a worker."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu.target import Shape, Target
from engine.assembly.leader import build_engine
from engine.assembly.parts import EngineParts
from engine.config import EngineConfig
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.core.request import Request
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import Capture, Work
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.messages import GenerateRequest
from engine.model_files.model_config import ModelConfig
from engine.models.decoder import DenseDecoder
from engine.models.part import ModelPart
from engine.parallel.layout import Extent, cut_of
from engine.sampling_params import SamplingParams

STD = 0.02


class EagerCapture:
    """Records nothing and does the work anew: what a graph computes, on any device."""

    def capture(self, work: Work) -> Work:
        return work


class RandomCheckpoint:
    """Tensors of whatever shape is asked for; as `engine.models.checkpoint.Checkpoint`."""

    def __init__(self, *, dtype: str, device: str) -> None:
        self.dtype_name = dtype
        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(0)

    def has(self, _name: str) -> bool:
        """Of the tensors that a checkpoint may leave out it has none."""
        return False

    def take(self, name: str, shape: Sequence[Extent]) -> torch.Tensor:
        return self.take_rows([name], [shape[0]], shape[1:])

    def take_rows(self, names: Sequence[str], rows: Sequence[Extent], rest: Sequence[Extent]) -> torch.Tensor:
        shape = [sum(len(cut_of(count)) for count in rows), *(len(cut_of(size)) for size in rest)]
        if "norm" in names[0]:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made.normal_(0.0, STD, generator=self._generator)

    def take_integers(self, *_: object) -> None:
        """It has none."""

    def ignore(self, name: str) -> None:
        pass


def random_model(_model_path: str, config: ModelConfig, *, dtype: str, device: str, **_: object) -> DenseDecoder:
    with torch.inference_mode():
        return DenseDecoder(ModelPart(config, RandomCheckpoint(dtype=dtype, device=device)))  # type: ignore[arg-type]


def make_engine(target: Target, shape: Shape, *, context: int, load: Any = random_model, **flags: Any) -> EngineParts:
    """On a CPU with eager graphs, so that the same code runs."""
    defaults: dict[str, Any] = {
        "model_path": "random",
        "dtype": target.dtype,
        "device": target.device.type,
        "attention_backend": "triton",
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
    }
    capture: Callable[[], Capture] | None = EagerCapture if target.small else None
    config = EngineConfig(**(defaults | flags))
    return build_engine(config, shape.config(context=context), machine=LocalMachine(capture=capture, load=load))


def request(rid: str, *, prompt: list[int], new_tokens: int) -> Request:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return Request(message=GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling), arrived_s=0.0)


class Run:
    """Drives scheduler and executor as the loop of a worker does, without messages."""

    def __init__(self, parts: EngineParts, *, depth: int) -> None:
        self.parts = parts
        self.tokens: dict[str, list[int]] = {}
        self._pipeline = Pipeline(
            self._on_step, strategy=StepStrategy(parts.scheduler), executor=parts.executor, depth=depth
        )

    def add(self, rid: str, *, prompt: list[int], new_tokens: int) -> None:
        assert self.parts.scheduler.add(request(rid, prompt=prompt, new_tokens=new_tokens)) == []

    def turn(self) -> bool:
        plan = self.parts.scheduler.schedule(perf_counter())
        worked = plan is not None or self._pipeline.num_launched > 0
        self._pipeline.advance(plan)
        return worked

    def drain(self) -> None:
        while self.turn():
            pass

    def _on_step(self, effects: Any) -> list[Any]:
        for output in effects.outputs:
            self.tokens.setdefault(output.rid, []).extend(output.new_ids)
        return []


class Steps:
    """Hand-made plans for an executor without a scheduler: `batch` requests of `context` tokens, whose KV is whatever it is.

    `adapters`: the number of each slot's adapter.
    """

    def __init__(self, parts: EngineParts, *, batch: int, context: int, adapters: Sequence[int] = ()) -> None:
        self._parts = parts
        self._batch, self._context = batch, context
        self._adapters = adapters or [0] * batch
        self._pages = -(-context // parts.config.page_size)
        assert batch * self._pages <= parts.pool.num_pages, (batch, self._pages, parts.pool.num_pages)
        self._seq = 0
        self._open = False

    def decode(self) -> Plan:
        """The last token of each, again and again: the same work every time."""
        return self._plan([self._item(slot, [1], self._context - 1) for slot in range(self._batch)], extend=False)

    def prefill(self) -> Plan:
        tokens = [1 + t % 500 for t in range(self._context)]
        return self._plan([self._item(slot, tokens, 0) for slot in range(self._batch)], extend=True)

    def _item(self, slot: int, tokens: list[int], start: int) -> PlanItem:
        first = 1 + slot * self._pages
        pages = [] if self._open else list(range(first, first + self._pages))
        return PlanItem(
            rid=str(slot),
            slot=slot,
            tokens=tokens,
            start=start,
            page_start=0,
            new_pages=pages,
            sample=True,
            output_len=1,
            extend=start == 0,
        )

    def _plan(self, items: list[PlanItem], *, extend: bool) -> Plan:
        opens = [] if self._open else [self._slot(slot) for slot in range(self._batch)]
        self._open, self._seq = True, self._seq + 1
        return Plan(seq=self._seq, extend=extend, items=items, opens=opens)

    def _slot(self, slot: int) -> SlotOpen:
        sampling = SamplingParams(max_new_tokens=1 << 20, temperature=0.0, ignore_eos=True, seed=0)
        return SlotOpen(
            slot=slot, sampling=sampling, prompt_ids=[], output_ids=[], eos_ids=(), adapter=self._adapters[slot]
        )

    def close(self) -> None:
        """The slots may be opened by others."""
        executor = self._parts.device.executor
        executor.collect(executor.launch(Plan(self._seq + 1, extend=False, items=[], closes=list(range(self._batch)))))
