"""An engine in virtual time whose device is a pipeline of stages: the production loop and scheduler, and a hash model for each stage.

    stage 0   | plan 1 | plan 2 | plan 3 |            a stage takes its plans in order, each for its part of the model
    stage 1            | plan 1 | plan 2 | plan 3 |   the last one samples: a step has ended when it has

A stage checks the KV that it reads, so a chunk that overtakes another one, or a page with two owners, ends the run.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from engine.assembly.worker import Clock
from engine.core.plan import Plan, StepResult
from engine.messages import GenerateRequest, TokenBatch
from engine.sampling_params import SamplingParams
from tests.core.engine_in_a_test import EngineInATest
from tests.core.hash_model import HashModel
from tests.loop.loop_in_a_test import loop_of

WEIGHTS_S, TOKEN_S = 0.020, 0.001  # of a step on one stage alone: it reads the weights, and computes each token


@dataclass
class Stage:
    """`busy`: from when to when it computed."""

    model: HashModel
    busy: list[tuple[float, float]] = field(default_factory=list)

    @property
    def free_s(self) -> float:
        return self.busy[-1][1] if self.busy else 0.0

    def occupancy(self, since_s: float, until_s: float) -> float:
        """The share of a span of time in which it computes."""
        within = (min(end_s, until_s) - max(start_s, since_s) for start_s, end_s in self.busy)
        return sum(max(0.0, part_s) for part_s in within) / (until_s - since_s)


@dataclass(eq=False)
class Step:
    plan: Plan
    ends_s: float
    result: StepResult


class StagedEngine:
    """Executor and ports of a loop. `plan_s`: what a turn of the loop takes before it launches."""

    def __init__(
        self, *, stages: int, plan_s: float, overlap: bool = True, async_depth: int = 0, **engine: Any
    ) -> None:
        self.engine = EngineInATest(pp_size=stages, pp_async_batch_depth=async_depth, num_pages=4096, **engine)
        page_size = self.engine.scheduler.limits.page_size
        self.stages = [Stage(HashModel(page_size=page_size)) for _ in range(stages)]
        self.now_s = 0.0
        self.inbox: list[tuple[float, GenerateRequest]] = []  # each with the time of its arrival
        self.in_flight: deque[Step] = deque()
        self.first_s: dict[str, float] = {}
        self._plan_s = plan_s
        self._chunk_ends: dict[str, int] = {}
        scheduler = self.engine.scheduler
        depth, ended = scheduler.limits.micro_batches + overlap, self.ended if stages > 1 else None
        self.loop = loop_of(scheduler, self, self, Clock(now_s=lambda: self.now_s), depth=depth, ended=ended)

    def ask(self, rid: str, prompt: list[int], *, new: int, at_s: float = 0.0) -> None:
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
        self.inbox.append((at_s, GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, stream=True)))

    def turn(self) -> bool:
        worked = self.loop.turn()
        self.engine.scheduler.check()
        if not worked:
            self.loop._rest()
        return worked

    def run(self) -> dict[str, list[int]]:
        """Until nothing is left; the tokens of each request."""
        while self.turn() or self.in_flight or self.inbox:
            pass
        return self.engine.tokens

    def occupancies(self, since_s: float, until_s: float) -> list[float]:
        return [stage.occupancy(since_s, until_s) for stage in self.stages]

    # executor

    def launch(self, plan: Plan) -> Step:
        self.now_s += self._plan_s
        self._check(plan)
        seconds = (WEIGHTS_S + TOKEN_S * sum(item.q_len for item in plan.items)) / len(self.stages)
        ends_s = self.now_s
        for stage in self.stages:
            begins_s = max(ends_s, stage.free_s)
            ends_s = begins_s + seconds
            stage.busy.append((begins_s, ends_s))
            result = stage.model.run(plan)
        self.in_flight.append(Step(plan, ends_s, result))
        return self.in_flight[-1]

    def _check(self, plan: Plan) -> None:
        """No request samples in two steps in flight, and each chunk begins where the one before it ends."""
        if len(self.stages) > 1:
            sampling = {item.rid for step in self.in_flight for item in step.plan.items if item.sample}
            assert not sampling & {item.rid for item in plan.items}
        for item in plan.items:
            assert item.start == self._chunk_ends.get(item.rid, item.start)
            self._chunk_ends[item.rid] = item.kv_len

    def launch_forward(self, plan: Plan) -> Step:
        raise AssertionError("no grammar is used here")

    def launch_sampling(self, launched: Step) -> None:
        raise AssertionError("no grammar is used here")

    def collect(self, launched: Step) -> StepResult:
        assert launched is self.in_flight.popleft()
        self.now_s = max(self.now_s, launched.ends_s)
        return launched.result

    def ended(self, launched: Step) -> bool:
        return launched.ends_s <= self.now_s

    # ports

    def receive(self) -> list[Any]:
        here = [message for at_s, message in self.inbox if at_s <= self.now_s]
        self.inbox = [(at_s, message) for at_s, message in self.inbox if at_s > self.now_s]
        return here

    def wait(self, timeout_s: float) -> None:
        """Until a step ends, a request arrives, or the time is over."""
        events = [*(step.ends_s for step in self.in_flight), *(at_s for at_s, _ in self.inbox)]
        self.now_s = min([self.now_s + timeout_s, *(at_s for at_s in events if at_s > self.now_s)])

    def to_frontend(self, message: Any) -> None:
        assert isinstance(message, TokenBatch)
        for output in message.outputs:
            if output.new_ids:
                self.first_s.setdefault(output.rid, self.now_s)
        self.engine.say(message.outputs)

    def call_attention(self) -> None:
        """It waits for nothing."""
