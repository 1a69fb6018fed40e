"""The production scheduler with the hash model, driven at any depth by literals: no sockets, no torch, no clock."""

import random
from collections import deque
from typing import Any

from engine.core.mem_cache.conversations import ConversationPages
from engine.core.outputs import StepEffects
from engine.core.plan import ItemResult, Phase, Plan, PlanItem, StepResult
from engine.core.request import Request, Variant
from engine.messages import FinishReason, GenerateRequest, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.engine_setup import EngineSetup
from tests.core.hash_model import next_token, prefix_hash
from tests.core.named_stops import stops_of


def request_of(prompt: list[int], *, generated: int = 0, eos: int | None = None, **given: Any) -> Request:
    """A request outside an engine, with `generated` output tokens. `given`: as for `new_request`, and of sampling."""
    params = SamplingParams(**{name: given.pop(name) for name in SamplingParams.__struct_fields__ if name in given})
    request = new_request(
        input_ids=prompt,
        sampling=params,
        stops=stops_of(params),
        eos_ids=frozenset() if eos is None else frozenset({eos}),
        **{"rid": "r", "arrived_s": 0.0, **given},
    )
    request.output_ids = [0] * generated
    return request


def new_request(**values: Any) -> Request:
    """A request of these fields: of the frontend's message, and of the scheduler's own."""
    if number := values.pop("adapter", 0):
        values["variant"] = Variant(number, str(number))
    sent = {name: values.pop(name) for name in GenerateRequest.__struct_fields__ if name in values}
    return Request(message=GenerateRequest(**sent), **values)


def plan_item(num_tokens: int = 1, *, start: int = 0, extend: bool, sample: bool = True) -> PlanItem:
    return PlanItem("r", 0, [1] * num_tokens, start, 0, [], sample, 0, extend)


class EngineInATest:
    """`lag`: a launched step runs when it is collected, as late as a stream may; otherwise at once. `given`: fields of `EngineSetup`, and limits.

    `multiplexed`: prompts and decodes in two lanes, each of this depth; which goes on is drawn.
    """

    def __init__(self, *, depth: int = 1, lag: bool = False, **given: Any) -> None:
        setup = EngineSetup.of(depth=depth, **given)
        self.model = setup.model()
        self.scheduler, self.events = setup.build(self.model)
        self.now_s = 0.0
        self.depth = depth
        self.lag = lag
        self.launched: deque[tuple[Plan, StepResult | None]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.plans: list[Plan] = []
        self.overlapped = 0  # steps launched before the last was collected
        self._checked: object = None
        self.phase: Phase | None = None  # of the next plan
        self.rng = random.Random(7)

    def add(self, rid: str, prompt: list[int], **asked: object) -> Request:
        request = self._request(rid, prompt, **asked)
        self.say(self.scheduler.add(request))
        return request

    def land(self, rid: str, prompt: list[int], **sampling: object) -> Request:
        """A request whose prompt was computed elsewhere: adopted, its KV written, its first token known."""
        request = self._request(rid, prompt, **sampling)
        assert self.scheduler.held.adopt(request) is None and self.scheduler.held.reserve(request)
        self.model.write(request.pages, prompt, state=request.recurrent.slot)
        first = ItemResult(next_token(prefix_hash(prompt)))
        self.say(self.scheduler.held.start_decoding(request, first, cached_tokens=0))
        return request

    def _request(self, rid: str, prompt: list[int], **asked: object) -> Request:
        return request_of(prompt, rid=rid, arrived_s=self.now_s, **{"max_new_tokens": 8, **asked})  # type: ignore[arg-type]

    def abort(self, rid: str) -> None:
        self.say(self.scheduler.abort(rid))

    def say(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            assert output.rid not in self.finish, f"{output.rid} spoke after its end"
            self.tokens.setdefault(output.rid, []).extend(output.new_ids)
            self.outputs.setdefault(output.rid, []).append(output)
            if output.finish is not None:
                self.finish[output.rid] = output.finish

    def turn(self) -> bool:
        """One turn of the loop; False when there is nothing left to do."""
        if self.scheduler.limits.multiplexed:
            return self._turn_of_lanes()
        plan = self.next_plan()
        at_most = self.scheduler.limits.micro_batches  # steps in flight without overlap
        while plan is not None and plan.sample_deferred and len(self.launched) >= at_most:
            self.collect()
        if plan is not None:
            self.launch(plan)
        if self.launched and (plan is None or len(self.launched) >= self.depth):
            self.collect()
            return True
        self.check()
        return plan is not None

    def _turn_of_lanes(self) -> bool:
        """Plan for one phase or both, and collect a step of either; all of it, where nothing else is left to do."""
        lanes = self.rng.sample(list(Phase), 2)
        planned = [self._plan_for(phase) for phase in lanes[: self.rng.choice([1, 2, 2])]]
        if not any(planned):
            planned = [self._plan_for(phase) for phase in lanes]
        if self.launched and (not any(planned) or self.rng.random() < 0.5):
            self.collect()
            return True
        self.check()
        return any(planned) or bool(self.launched)

    def _plan_for(self, phase: Phase) -> bool:
        self.phase = phase
        if self._in_flight(phase) >= self.depth or (plan := self.next_plan()) is None:
            return False
        while plan.sample_deferred and self._in_flight(phase):
            self.collect(phase)
        self.launch(plan)
        return True

    def _in_flight(self, phase: Phase) -> int:
        return sum(plan.phase is phase for plan, _ in self.launched)

    def turns(self, n: int) -> None:
        for _ in range(n):
            self.turn()

    def next_plan(self) -> Plan | None:
        for conversations in self.scheduler.memory.having(ConversationPages):
            conversations.now_s = self.now_s
        return self.scheduler.schedule(self.now_s, phase=self.phase)

    def launch(self, plan: Plan) -> None:
        self.scheduler.fill_masks(plan)
        self.plans.append(plan)
        self.overlapped += bool(self.launched)
        self.launched.append((plan, None if self.lag else self.model.run(plan)))

    def collect(self, phase: Phase | None = None) -> None:
        """Collect the oldest step, with lanes that of `phase`, or of one that is drawn."""
        if self.phase is not None:
            phase = phase or self.rng.choice([plan.phase for plan, _ in self.launched])
        at = next(at for at, (plan, _) in enumerate(self.launched) if plan.phase is phase)
        plan, result = self.launched[at]
        del self.launched[at]
        self.on_step(self.scheduler.collect(plan, result or self.model.run(plan)))
        self.check()

    def check(self) -> None:
        """Have every owner check itself, unless no memory and no request has moved since: most turns in which a role waits."""
        if (now := self._owners()) != self._checked:
            self.scheduler.check()
            self._checked = now

    def _owners(self) -> object:
        memory, stages = self.scheduler.memory, self.scheduler.stages
        groups = [allocator.counts() for allocator in memory.allocators]
        requests = [
            (r.rid, len(r.pages), r.launched_len, r.computed_len, r.recurrent.slot, r.pending) for r in stages.all()
        ]
        return groups, requests, memory.cache.num_pages, memory.cache.num_evictable, sorted(stages.live)

    def on_step(self, effects: StepEffects) -> None:
        self.say(effects.outputs)
        for rid in effects.lost:
            self.say(self.scheduler.abort(rid, FinishReason(kind="abort", message=effects.failure, status=503)))

    def run(self, max_turns: int = 10_000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("the engine did not come to rest")

    def answer(self, rid: str, prompt: list[int], **asked: object) -> list[int]:
        """The tokens of one more request, when nothing is left to do."""
        self.add(rid, prompt, **asked)
        self.run()
        return self.tokens[rid]
