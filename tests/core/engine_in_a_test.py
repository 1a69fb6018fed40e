"""The production scheduler with the hash model, driven at any depth by literals: no sockets, no torch, no clock."""

import random
from collections import deque

from engine.core.growth import MeasuredGrowth
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.plan import Plan
from engine.core.policy import Priorities
from engine.core.radix_cache import RadixCache
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.messages import FinishReason, TokenOutput
from engine.sampling_params import SamplingParams
from tests.core.hash_model import HashModel


class EngineInATest:
    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_running: int = 8,
        chunk: int | None = 16,
        depth: int = 1,
        radix: bool = True,
        max_queued: int = 1000,
        policy: str = "fcfs",
        priorities: Priorities | None = None,
        conservativeness: float = 1.0,
        backup_pages: int = 0,
        reserve_floor: int = 0,
        resume_elsewhere: bool = False,
        vocab_size: int | None = None,
        **limits: object,
    ) -> None:
        allocator = PageAllocator(num_pages=num_pages, page_size=page_size)
        bounds = Limits(
            page_size=page_size,
            max_running_requests=max_running,
            max_queued_requests=max_queued,
            chunked_prefill_size=chunk,
            **{"max_prefill_tokens": 64, **limits},  # type: ignore[arg-type]
        )
        memory = Memory(allocator=allocator, cache=RadixCache(allocator, enabled=radix))
        self.scheduler = Scheduler(
            limits=bounds,
            memory=memory,
            tail_text=lambda ids: "".join(f"<{i}>" for i in ids),
            policy=policy,
            priorities=priorities,
            ratio=NewTokenRatio(conservativeness=conservativeness),
            draw=random.Random(5).random,
            backup_pages=backup_pages,
            reserve_floor=reserve_floor,
            growth=MeasuredGrowth(),
            resume_elsewhere=resume_elsewhere,
            vocab_size=vocab_size,
        )
        self.now_s = 0.0
        self.model = HashModel(page_size=page_size)
        self.depth = depth
        self.launched: deque[tuple[Plan, object]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.plans: list[Plan] = []

    def add(
        self, rid: str, prompt: list[int], *, eos: int | None = None, priority: int = 0, **sampling: object
    ) -> Request:
        request = Request(
            rid=rid,
            input_ids=prompt,
            sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),  # type: ignore[arg-type]
            eos_ids=frozenset() if eos is None else frozenset({eos}),
            arrived_s=self.now_s,
            priority=priority,
        )
        self.say(self.scheduler.add(request))
        return request

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
        plan = self.scheduler.schedule(self.now_s)
        while plan is not None and (plan.wait or plan.draw_late) and self.launched:
            self.collect()
        if plan is not None:
            self.scheduler.fill_masks(plan)
            self.plans.append(plan)
            self.launched.append((plan, self.model.run(plan)))
        if self.launched and (plan is None or len(self.launched) >= self.depth):
            self.collect()
            return True
        self.scheduler.check()
        return plan is not None

    def collect(self) -> None:
        done, result = self.launched.popleft()
        self.say(self.scheduler.collect(done, result).outputs)  # type: ignore[arg-type]
        self.scheduler.check()

    def run(self, max_turns: int = 10_000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError("the engine did not come to rest")
