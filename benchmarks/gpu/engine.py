"""An engine with generated weights, made on the device: model, pool, graphs, stream and scheduler as they are in a worker."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.gpu.target import Target
from engine.assembly.leader import build_engine
from engine.assembly.parts import EngineParts
from engine.config import EngineConfig
from engine.core.plan import Plan, PlanItem, SlotOpen
from engine.core.request import Request
from engine.device.step_memory import LocalMachine
from engine.executor.graphs import Capture, Work
from engine.kv.kv_pool import KVPool
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.messages import GenerateRequest
from engine.model_files.model_config import load_model_config
from engine.sampling_params import SamplingParams

STRIDE = 7919  # between tokens of neighbours; a prime


class EagerCapture:
    """Records nothing and does the work anew: what a graph computes, on any device."""

    def capture(self, work: Work) -> Work:
        return work


def make_engine(target: Target, fields: Mapping[str, object], **flags: Any) -> EngineParts:
    """`fields`: config.json. On a CPU with eager graphs, so that the same code runs."""
    capture: Callable[[], Capture] | None = EagerCapture if target.small else None
    with TemporaryDirectory(prefix="tandem-gpu-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        defaults: dict[str, Any] = {
            "model_path": folder,
            "load_format": "dummy",
            "dtype": target.dtype,
            "device": target.device.type,
            "attention_backend": "triton",
            "disable_radix_cache": True,
            "chunked_prefill_size": -1,
        }
        config = EngineConfig(**(defaults | flags))
        return build_engine(config, load_model_config(folder), machine=LocalMachine(capture=capture))


def fill_kv(pool: KVPool) -> None:
    """Random K and V: rows that read zeros alone would be alike, and a product of zeros costs less power."""
    for layer in range(pool.num_layers):
        for cache in (pool.k(layer), pool.v(layer)):
            cache.normal_()


def experts_reached(parts: EngineParts, run: Callable[[], object]) -> float:
    """Return how many experts of a layer got a token while `run` computed, on average."""
    [stream] = parts.device.executor.streams
    before = stream.runner.expert_loads()
    run()
    after = stream.runner.expert_loads()
    counts = [sum(map(operator.gt, now, then)) for now, then in zip(after, before, strict=True)]
    return sum(counts) / len(counts)


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
    """Hand-made plans for an executor without a scheduler: `batch` requests of `context` tokens, all different, over random KV.

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
        fill_kv(parts.pool)

    def decode(self) -> Plan:
        """The last token of each, again and again: the same work every time."""
        return self._plan(
            [self._item(slot, [self._token(slot, 0)], self._context - 1) for slot in range(self._batch)], extend=False
        )

    def prefill(self) -> Plan:
        prompts = [[self._token(slot, t) for t in range(self._context)] for slot in range(self._batch)]
        return self._plan([self._item(slot, prompt, 0) for slot, prompt in enumerate(prompts)], extend=True)

    def _token(self, slot: int, place: int) -> int:
        return 1 + (slot + place) * STRIDE % (self._parts.model.vocab_size - 1)

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
