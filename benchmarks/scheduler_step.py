"""CPU time of the scheduler alone, with nothing behind it: one step at many running requests, waiting ones, big trees.

usage: python -m benchmarks.scheduler_step [--running N] [--steps N] [--output FILE]

    decode   N running decodes of 512-token prompts, prefix cache on, pages of 16: schedule() and collect() of a step.
             The same load as the vLLM scheduler figure in the house's facts (p50 2,738 us a step for 256).
    waiting  the same while W requests wait that share a prefix and cannot be admitted: must be flat in W
    radix    match and insert of 512-token prompts in a tree of so many nodes
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deploy.bench.environment import describe
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.page_allocator import PageAllocator
from engine.core.plan import ItemResult, Plan, StepResult
from engine.core.radix_cache import RadixCache
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.sampling_params import SamplingParams

PROMPT_TOKENS = 512
NEW_TOKENS = 2048
PAGE_SIZE = 16
WAITING = (0, 1_000, 10_000)
TREE_NODES = (1_000, 10_000, 100_000)


def main() -> None:
    args = _arguments()
    rows = []
    for policy in ("fcfs", "lpm"):
        for waiting in tqdm(WAITING, unit="load", desc=policy):
            rows.append(decode_step(args.running, waiting, steps=args.steps, policy=policy))
    report = {
        "environment": describe(),
        "running": args.running,
        "steps": rows,
        "radix": [radix(nodes) for nodes in tqdm(TREE_NODES, unit="tree")],
    }
    print(render(report))
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=256, help="running decodes")
    parser.add_argument("--steps", type=int, default=400, help="decode steps")
    parser.add_argument("--output", help="write the JSON here")
    return parser.parse_args()


def decode_step(running: int, waiting: int, *, steps: int, policy: str) -> dict[str, Any]:
    """CPU microseconds of a decode step with `running` requests in it and `waiting` behind them."""
    scheduler = _scheduler(running, policy=policy)
    rng = random.Random(0)
    for i in range(running):
        scheduler.add(_request(f"r{i}", [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]))
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.collect(plan, _result(plan))
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
        "policy": policy,
        "waiting": waiting,
        "schedule_p50_us": round(statistics.median(schedule_us)),
        "collect_p50_us": round(statistics.median(collect_us)),
        "step_p50_us": round(statistics.median(both)),
        "step_min_us": round(min(both)),
    }


def radix(nodes: int) -> dict[str, Any]:
    """Microseconds to match and to insert in a tree of `nodes` nodes that share prefixes."""
    allocator = PageAllocator(num_pages=nodes + 400_000, page_size=PAGE_SIZE)
    cache = RadixCache(allocator)
    rng = random.Random(0)
    stems = [[rng.randrange(1000) for _ in range(PAGE_SIZE * 4)] for _ in range(100)]
    for _ in range(nodes):
        _insert(allocator, cache, [*rng.choice(stems), *(rng.randrange(1000) for _ in range(PAGE_SIZE))])
    prompts = [[*rng.choice(stems), *(rng.randrange(1000) for _ in range(PROMPT_TOKENS - 64))] for _ in range(500)]
    insert_us, match_us = [], []
    for prompt in prompts:
        started_s = time.process_time()
        _insert(allocator, cache, prompt)
        inserted_s = time.process_time()
        cache.match(prompt)
        insert_us.append((inserted_s - started_s) * 1e6)
        match_us.append((time.process_time() - inserted_s) * 1e6)
    return {
        "nodes": nodes,
        "insert_p50_us": round(statistics.median(insert_us), 1),
        "match_p50_us": round(statistics.median(match_us), 1),
    }


def render(report: dict[str, Any]) -> str:
    lines = ["| policy | running | waiting | schedule p50 us | collect p50 us | step p50 us | step min us |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in report["steps"]:
        numbers = [r[name] for name in ("schedule_p50_us", "collect_p50_us", "step_p50_us", "step_min_us")]
        lines.append(f"| {r['policy']} | {report['running']} | {r['waiting']} | {' | '.join(map(str, numbers))} |")
    lines += ["", "| tree nodes | insert 512 tokens, us | match 512 tokens, us |", "|---|---|---|"]
    lines += [f"| {r['nodes']} | {r['insert_p50_us']} | {r['match_p50_us']} |" for r in report["radix"]]
    return "\n".join(lines)


def _scheduler(running: int, *, policy: str) -> Scheduler:
    pages = running * (PROMPT_TOKENS + NEW_TOKENS) // PAGE_SIZE
    allocator = PageAllocator(num_pages=pages, page_size=PAGE_SIZE)
    limits = Limits(
        page_size=PAGE_SIZE, max_running_requests=running, max_queued_requests=100_000, chunked_prefill_size=8192
    )
    memory = Memory(allocator=allocator, cache=RadixCache(allocator))
    return Scheduler(limits=limits, memory=memory, tail_text=lambda ids: "", policy=policy)


def _request(rid: str, prompt: list[int]) -> Request:
    return Request(
        rid=rid,
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        eos_ids=frozenset({1_000_000}),
        arrived_s=0.0,
    )


def _result(plan: Plan) -> StepResult:
    return StepResult(plan.seq, [ItemResult(token=7 if item.sample else None) for item in plan.items])


def _insert(allocator: PageAllocator, cache: RadixCache, tokens: list[int]) -> None:
    pages = allocator.allocate(len(tokens) // PAGE_SIZE)
    allocator.free(pages[: cache.insert(tokens, pages).existing])


if __name__ == "__main__":
    main()
