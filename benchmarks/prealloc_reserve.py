"""How much room decode should leave for growth before it takes a new request: static floors against measured growth.

    python -m benchmarks.prealloc_reserve [--seed N] [--json PATH]

The production scheduler in the decode role's order (retracted first, then new ones, first come, first served), with a
model that only says when each answer ends: no sockets, no torch. Time is simulated: a step costs STEP_S, plus a part
for each row, each token that a recompute adds, and each that it reads. Both workloads ask for up to MAX_NEW tokens, as clients do, and
use far less; their lengths are heavy-tailed. Counted are retractions, tokens that had to be computed again, and
output tokens per simulated second.
"""

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.growth import MeasuredGrowth
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.new_token_ratio import NewTokenRatio
from engine.core.page_allocator import PageAllocator
from engine.core.plan import ItemResult, Plan, StepResult
from engine.core.radix_cache import RadixCache
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.state import SchedulerState
from engine.sampling_params import SamplingParams

PAGE_SIZE, CAPACITY_TOKENS, MAX_RUNNING, MAX_NEW, NUM_REQUESTS = 16, 65536, 256, 4096, 800
TRANSFER_STEPS = 4
EOS, OTHER = 1, 2
STEP_S, ROW_S, EXTEND_TOKEN_S, KV_TOKEN_S = 0.010, 20e-6, 50e-6, 0.1e-6


class NoMeasure(NewTokenRatio):
    """Static reserves: the floor alone decides."""

    def growth_tokens(self, request: Request) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Reserve:
    name: str
    floor: int
    ratio: Callable[[], NewTokenRatio]
    growth: Callable[[], MeasuredGrowth] | None = None


RESERVES = (
    Reserve("static 64", 64, NoMeasure),
    Reserve("static 512", 512, NoMeasure),
    Reserve("static 2048", 2048, NoMeasure),
    Reserve("new_token_ratio", 0, NewTokenRatio),
    Reserve("measured", 0, NewTokenRatio, MeasuredGrowth),
    Reserve("measured, floor 64", 64, NewTokenRatio, MeasuredGrowth),
    Reserve("measured, floor 512", 512, NewTokenRatio, MeasuredGrowth),
)
WORKLOADS = {"chat": (300, 250, 1.0), "reasoning": (300, 1200, 0.7)}  # prompt mean, answer median, sigma of its log


@dataclass(slots=True)
class Sample:
    prompt: int
    answer: int


class Run:
    def __init__(self, reserve: Reserve, samples: list[Sample]) -> None:
        allocator = PageAllocator(num_pages=CAPACITY_TOKENS // PAGE_SIZE, page_size=PAGE_SIZE)
        state = SchedulerState(
            limits=Limits(
                page_size=PAGE_SIZE,
                max_running_requests=MAX_RUNNING,
                max_queued_requests=10 * NUM_REQUESTS,
                chunked_prefill_size=2048,
                reserve_floor=reserve.floor,
            ),
            memory=Memory(allocator=allocator, cache=RadixCache(allocator)),
            ratio=reserve.ratio(),
            growth=reserve.growth() if reserve.growth is not None else None,
        )
        self.scheduler = Scheduler(state)
        self._samples = {f"r{i}": s for i, s in enumerate(samples)}
        self._prealloc = deque(self._request(rid, s) for rid, s in self._samples.items())
        for request in self._prealloc:
            assert self.scheduler.held.adopt(request) is None
        self._transfer: deque[tuple[int, Request]] = deque()
        self.seconds, self.steps, self.recomputed, self.rows = 0.0, 0, 0, 0

    def _request(self, rid: str, sample: Sample) -> Request:
        return Request(
            rid=rid,
            input_ids=[hash((rid, k)) % 1000 for k in range(sample.prompt)],
            sampling=SamplingParams(max_new_tokens=MAX_NEW),
            eos_ids=frozenset({EOS}),
            arrived_s=0.0,
        )

    def run(self) -> dict[str, float]:
        while not self.scheduler.idle:
            self._land()
            self._preallocate()
            plan = self.scheduler.schedule()
            self.steps += 1
            self.seconds += STEP_S
            if plan is not None:
                self.scheduler.collect(plan, self._execute(plan))
        tokens = self.scheduler.counters.generation_tokens
        return {
            "output_tokens_per_s": round(tokens / self.seconds),
            "retractions": self.scheduler.counters.retractions,
            "recomputed_tokens": self.recomputed,
            "mean_running": round(self.rows / self.steps, 1),
            "seconds": round(self.seconds, 1),
        }

    def _land(self) -> None:
        while self._transfer and self._transfer[0][0] <= self.steps:
            request = self._transfer.popleft()[1]
            self.scheduler.held.start_decoding(request, ItemResult(self._token(request.rid, 0)), cached_tokens=0)

    def _preallocate(self) -> None:
        room_left = len(self.scheduler.stages.retracted()) == 0
        while self._prealloc and room_left and self.scheduler.num_running + len(self._transfer) < MAX_RUNNING:
            room_left = self.scheduler.held.reserve(self._prealloc[0])
            if room_left:
                self._transfer.append((self.steps + TRANSFER_STEPS, self._prealloc.popleft()))

    def _execute(self, plan: Plan) -> StepResult:
        for item in plan.items:
            self.seconds += ROW_S + item.kv_len * KV_TOKEN_S
            if item.extend:
                self.recomputed += item.q_len
                self.seconds += item.q_len * EXTEND_TOKEN_S
        self.rows += len(plan.items)
        return StepResult(
            plan.seq,
            [ItemResult(self._token(i.rid, i.output_len) if i.sample else None) for i in plan.items],
        )

    def _token(self, rid: str, output_len: int) -> int:
        return EOS if output_len + 1 >= self._samples[rid].answer else OTHER + output_len % 50


def samples_of(workload: str, *, seed: int) -> list[Sample]:
    prompt, answer, sigma = WORKLOADS[workload]
    rng = random.Random(seed)
    return [
        Sample(
            prompt=max(1, min(4000, round(rng.expovariate(1 / prompt)))),
            answer=max(1, min(MAX_NEW, round(answer * rng.lognormvariate(0.0, sigma)))),
        )
        for _ in range(NUM_REQUESTS)
    ]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prealloc_reserve", description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--seed", type=int, default=2, help="of the lengths (growth.SHARE was chosen on seed 1)")
    given = parser.parse_args(args)
    results = []
    for workload in WORKLOADS:
        samples = samples_of(workload, seed=given.seed)
        for reserve in RESERVES:
            results.append({"workload": workload, "reserve": reserve.name, **Run(reserve, samples).run()})
            print(results[-1], flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
