"""The whole engine of one process (real model, pool, kernels, streams, scheduler), driven without sockets."""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, TypeVar

from engine.assembly.leader import build_engine
from engine.assembly.steps import loop_steps
from engine.config import EngineConfig
from engine.core.mem_cache.window_pages import WindowPages
from engine.core.outputs import StepEffects
from engine.core.plan import Plan
from engine.core.request import Grammar
from engine.device.step_memory import THIS_MACHINE, EngineUse, LocalMachine
from engine.hicache.storage import PageStorage
from engine.loop.pipeline import Pipeline, StepStrategy
from engine.loop.role import EngineRole, UnifiedRole
from engine.messages import FinishReason, LogprobOptions, TokenLogprob, TokenOutput
from engine.model_files.model_config import load_model_config
from engine.ranks.group import Group
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import new_request

T = TypeVar("T")


@dataclass
class Seen:
    """What the steps of a worker were."""

    overlapped: int = 0
    mixed: int = 0
    chunks: int = 0

    def plan(self, plan: Plan, *, in_flight: int) -> None:
        self.overlapped += in_flight > 0
        self.mixed += len({item.extend for item in plan.items}) == 2
        self.chunks += sum(not item.sample for item in plan.items)


class PartsInProcess(ABC):
    """Built parts under their role: `turn` takes the place of the loop, but what learns from the time of steps is not given any."""

    parts: Any  # EngineParts or EncoderParts
    paused = False
    storage: PageStorage | None = None

    def begin(self, role: EngineRole, pipeline: Pipeline[Any]) -> None:
        self.role, self.pipeline, self.seen = role, pipeline, Seen()

    @abstractmethod
    def hear(self, outputs: Sequence[TokenOutput]) -> None: ...

    def poll(self) -> None:
        self.hear(self.role.poll(time.monotonic()))

    def turn(self) -> bool:
        """Whether it did something."""
        if self.storage is not None:
            self.storage.on_turn(0.0)
        self.poll()
        now_s, in_flight = time.monotonic(), self.pipeline.num_launched
        plan = self.pipeline.next_plan(now_s, paused=self.paused)
        if plan is not None:
            self.role.on_launch(plan, now_s)
            self.seen.plan(plan, in_flight=in_flight)
        self.hear(self.pipeline.advance(plan))
        return self.pipeline.worked

    def collect(self, effects: StepEffects) -> list[TokenOutput]:
        now_s, reason = time.monotonic(), FinishReason(kind="abort", message=effects.failure, status=503)
        self.role.on_step(effects, now_s)
        return effects.outputs + [output for rid in effects.lost for output in self.role.abort(rid, now_s, reason)]

    @property
    def at_rest(self) -> bool:
        return not self.pipeline.num_launched and self.parts.scheduler.idle and not self.role.waits_for_outside()

    def check(self) -> None:
        self.parts.scheduler.check()
        self.role.check()
        counts = self.parts.scheduler.memory.allocator.counts()
        assert counts["held"] == counts["quarantined"] == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.role.close()
        if self.storage is not None:
            self.storage.close()
        self.parts.executor.close()


class EngineInProcess(PartsInProcess):
    """`depth=None`: what the configuration resolves to."""

    def __init__(
        self,
        model_path: str,
        *,
        depth: int | None = None,
        machine: LocalMachine = THIS_MACHINE,
        use: EngineUse | None = None,
        group: Group | None = None,
        wakeup: Callable[[], None] = lambda: None,
        **flags: object,
    ) -> None:
        config = EngineConfig(model_path=model_path, **{"max_total_tokens": 8192, **flags})  # type: ignore[arg-type]
        self.model = load_model_config(model_path)
        self._wakeup, self._attention = wakeup, threading.Event()
        self.parts = build_engine(
            config,
            self.model,
            use=use or EngineUse(),
            machine=machine,
            group=group,
            wakeup=self._on_wakeup,
        )
        self.storage = self.parts.storage
        self._steps = loop_steps(self.parts, depth=depth)
        self.begin(self.make_role(), self._pipeline(depth or self.parts.depth))
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.input_logprobs: dict[str, list[TokenLogprob]] = {}
        self.hidden: dict[str, list[bytes]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}

    def make_role(self) -> EngineRole:
        return UnifiedRole(self.parts.scheduler)

    def recorded(self, kind: type[T]) -> T | None:
        """Return its recorded steps of a kind."""
        runner = self.parts.device.executor.streams[0].runner
        return next((one for one in runner.forward_pass.recorded if isinstance(one, kind)), None)

    def _pipeline(self, depth: int) -> Pipeline[Any]:
        if self.parts.config.enable_pdmux:
            return self._steps.pipeline(self.collect)
        strategy = StepStrategy(self.parts.scheduler)
        return Pipeline(self.collect, strategy=strategy, executor=self.parts.executor, depth=depth)

    def _on_wakeup(self) -> None:
        self._attention.set()
        self._wakeup()

    def add(
        self,
        rid: str,
        prompt: list[int],
        *,
        logprobs: LogprobOptions | None = None,
        grammar: Grammar | None = None,
        adapter: int = 0,
        wanted: Mapping[str, Any] = MappingProxyType({}),
        **sampling: object,
    ) -> None:
        """`wanted`: other fields of the request."""
        values = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
        request = new_request(
            rid=rid,
            input_ids=prompt,
            sampling=SamplingParams(**values),  # type: ignore[arg-type]
            eos_ids=frozenset(self.model.eos_token_ids),
            arrived_s=0.0,
            logprobs=logprobs,
            grammar=grammar,
            adapter=adapter,
            **wanted,
        )
        assert self.parts.scheduler.add(request) == []

    def run(self) -> None:
        while self.turn():
            pass
        self.check()
        windows = self.parts.scheduler.memory.part(WindowPages)
        assert windows is None or windows.num_available == windows.allocator.num_pages, "window pages are left"

    def answer(self, rid: str, prompt: list[int], **asked: Any) -> list[int]:
        """The tokens of one more request, when nothing is left to do."""
        self.add(rid, prompt, **asked)
        self.run()
        return self.tokens[rid]

    def all_logprobs(self) -> dict[str, list[float]]:
        """Of the prompt and the tokens of each request."""
        entries = {rid: [*self.input_logprobs[rid], *self.logprobs[rid]] for rid in self.tokens}
        return {rid: [entry.logprob or 0.0 for entry in of_one] for rid, of_one in entries.items()}

    def turn(self) -> bool:
        """As that of parts; where steps have ends that are watched, it waits for one."""
        if super().turn():
            return True
        if self.parts.config.enable_pdmux and self.pipeline.num_launched:
            rest_s = 1.0
            for listener in self._steps.listeners:
                rest_s = listener.shorten(rest_s, time.monotonic())
            self._attention.wait(rest_s)
            self._attention.clear()
        return self.pipeline.num_launched > 0

    def hear(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.rid, []).extend(output.new_ids)
            self.logprobs.setdefault(output.rid, []).extend(output.logprobs)
            self.input_logprobs.setdefault(output.rid, []).extend(output.input_logprobs)
            self.hidden.setdefault(output.rid, []).extend([output.input_hidden, *output.hidden])
            self.cached[output.rid] = output.cached_tokens
            if output.finish is not None:
                self.finish[output.rid] = output.finish


def tokens_of(checkpoint: str, bodies: Sequence[Mapping[str, Any]], **flags: object) -> list[list[int]]:
    """What one engine samples for these bodies of /generate."""
    with EngineInProcess(checkpoint, **flags) as engine:  # type: ignore[arg-type]
        for i, body in enumerate(bodies):
            engine.add(str(i), body["input_ids"], **body["sampling_params"])
        engine.run()
        return [engine.tokens[str(i)] for i in range(len(bodies))]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 272) for _ in range(length)]
