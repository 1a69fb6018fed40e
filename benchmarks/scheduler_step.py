"""Measures the CPU time of the scheduler alone, with nothing behind it: a step of many running requests, and trees of prefixes."""

import random
import time
from statistics import median

from benchmarks.measures import Row, Tables, tell
from engine.core.mem_cache.page_allocator import PageAllocator
from engine.core.mem_cache.radix_cache import RadixCache
from engine.core.memory import Memory
from engine.core.plan import ItemResult, Plan, StepResult
from engine.core.policy import Limits
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.state import SchedulerState
from engine.messages import GenerateRequest
from engine.sampling_params import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, PAGE_SIZE = 512, 2048, 16
WAITING = (0, 1_000, 10_000)
TREE_NODES = (1_000, 10_000, 100_000)


def measure(*, running: int = 256, steps: int = 400) -> Tables:
    """Decode steps while others wait that share a prefix and cannot be admitted: flat in their number. Then radix trees."""
    loads = [(policy, waiting) for policy in ("fcfs", "lpm") for waiting in WAITING]
    rows: list[Row] = []
    for policy, waiting in loads:
        found = decode_step(running, waiting, steps=steps, policy=policy)
        rows.append({"policy": policy, "running": running, "waiting": waiting, **found})
        tell(f"{policy}, {waiting} wait", **found)
    return {"": rows, "The prefix tree, 512 tokens:": [radix(nodes) for nodes in TREE_NODES]}


def decode_step(running: int, waiting: int, *, steps: int, policy: str) -> dict[str, int]:
    """Return CPU microseconds of a decode step with `running` requests in it and `waiting` behind them."""
    scheduler = _decoding(running, policy=policy)
    rng = random.Random(1)
    shared = [rng.randrange(1000) for _ in range(256)]
    for i in range(waiting):
        scheduler.add(_request(f"w{i}", shared + [rng.randrange(1000) for _ in range(PROMPT_TOKENS - 256)]))
    schedule_us, collect_us = [], []
    for _ in range(steps):
        started_s = time.process_time()
        plan = scheduler.schedule()
        planned_s = time.process_time()
        assert plan is not None and not plan.extend
        result = _result(plan)
        computed_s = time.process_time()
        scheduler.collect(plan, result)
        schedule_us.append((planned_s - started_s) * 1e6)
        collect_us.append((time.process_time() - computed_s) * 1e6)
    both = [a + b for a, b in zip(schedule_us, collect_us, strict=True)]
    return {
        "schedule_p50_us": round(median(schedule_us)),
        "collect_p50_us": round(median(collect_us)),
        "step_p50_us": round(median(both)),
        "step_min_us": round(min(both)),
    }


def radix(nodes: int) -> Row:
    """Match and insert in a tree of `nodes` nodes that share prefixes."""
    allocator = PageAllocator(num_pages=nodes + 400_000, page_size=PAGE_SIZE)
    cache = RadixCache(allocator)
    rng = random.Random(0)
    stems = [[rng.randrange(1000) for _ in range(PAGE_SIZE * 4)] for _ in range(100)]
    for _ in range(nodes):
        _insert(allocator, cache, [*rng.choice(stems), *(rng.randrange(1000) for _ in range(PAGE_SIZE))])
    insert_us, match_us = [], []
    for _ in range(500):
        prompt = [*rng.choice(stems), *(rng.randrange(1000) for _ in range(PROMPT_TOKENS - 64))]
        started_s = time.process_time()
        _insert(allocator, cache, prompt)
        inserted_s = time.process_time()
        cache.match(prompt)
        insert_us.append((inserted_s - started_s) * 1e6)
        match_us.append((time.process_time() - inserted_s) * 1e6)
    return {"tree nodes": nodes, "insert p50, us": median(insert_us), "match p50, us": median(match_us)}


def _decoding(running: int, *, policy: str) -> Scheduler:
    """A scheduler with `running` requests, all past their prompts."""
    pages = running * (PROMPT_TOKENS + NEW_TOKENS) // PAGE_SIZE
    allocator = PageAllocator(num_pages=pages, page_size=PAGE_SIZE)
    limits = Limits(
        page_size=PAGE_SIZE,
        max_running_requests=running,
        max_queued_requests=100_000,
        chunked_prefill_size=8192,
        policy=policy,
    )
    memory = Memory(allocator=allocator, cache=RadixCache(allocator))
    scheduler = Scheduler(SchedulerState(limits=limits, memory=memory))
    rng = random.Random(0)
    for i in range(running):
        scheduler.add(_request(f"r{i}", [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]))
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.collect(plan, _result(plan))
    return scheduler


def _request(rid: str, prompt: list[int]) -> Request:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    message = GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling)
    return Request(message=message, eos_ids=frozenset({1_000_000}), arrived_s=0.0)


def _result(plan: Plan) -> StepResult:
    return StepResult(plan.seq, [ItemResult(token=7 if item.sample else None) for item in plan.items])


def _insert(allocator: PageAllocator, cache: RadixCache, tokens: list[int]) -> None:
    pages = allocator.allocate(len(tokens) // PAGE_SIZE)
    allocator.free(pages[: cache.insert(tokens, pages).existing])
