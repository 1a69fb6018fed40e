"""CPU time of the scheduler alone, with nothing behind it: one step at many running requests, waiting ones, big trees.

usage: python -m benchmarks.scheduler_step [--running N] [--steps N] [--peers DIR] [--output FILE]

    decode   N running decodes of 512-token prompts, prefix cache on, pages of 16: schedule() and collect() of a step
    beside   the same load on vLLM's scheduler, in turns with ours, where make_peers.sh put vLLM into DIR
    waiting  the same while W requests wait that share a prefix and cannot be admitted: must be flat in W
    radix    match and insert of 512-token prompts in a tree of so many nodes
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from engine.core.state import SchedulerState
from engine.sampling_params import SamplingParams

PROMPT_TOKENS = 512
NEW_TOKENS = 2048
PAGE_SIZE = 16
WAITING = (0, 1_000, 10_000)
TREE_NODES = (1_000, 10_000, 100_000)
TURNS = 10
ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "engine" / "models" / "recall" / "checkpoint"  # vLLM wants some checkpoint's config.json

Steps = dict[str, list[float]]  # "schedule_us" and "collect_us" of each step


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
        "beside": beside_vllm(args.peers / "vllm" / "bin" / "python", args.running, steps=args.steps),
        "radix": [radix(nodes) for nodes in tqdm(TREE_NODES, unit="tree")],
    }
    print(render(report))
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=256, help="running decodes")
    parser.add_argument("--steps", type=int, default=400, help="decode steps")
    parser.add_argument("--peers", type=Path, default=ROOT / ".build" / "peers", help="where make_peers.sh put them")
    parser.add_argument("--output", help="write the JSON here")
    return parser.parse_args()


def decode_step(running: int, waiting: int, *, steps: int, policy: str) -> dict[str, Any]:
    """CPU microseconds of a decode step with `running` requests in it and `waiting` behind them."""
    scheduler = _decoding(running, policy=policy)
    rng = random.Random(1)
    shared = [rng.randrange(1000) for _ in range(256)]
    for i in range(waiting):
        scheduler.add(_request(f"w{i}", shared + [rng.randrange(1000) for _ in range(PROMPT_TOKENS - 256)]))
    return {"policy": policy, "waiting": waiting, **_summary(_run(scheduler, steps))}


def beside_vllm(python: Path, running: int, *, steps: int) -> list[dict[str, Any]] | None:
    """Ours and vLLM's in turns, each in its own process; None where there is no vLLM."""
    if not python.exists():
        return None
    scheduler = _decoding(running, policy="fcfs")
    ours: Steps = {"schedule_us": [], "collect_us": []}
    theirs: Steps = {"schedule_us": [], "collect_us": []}
    with _vllm(python, running) as (version, run):
        for _ in range(TURNS):
            for seen, new in ((ours, _run(scheduler, steps // TURNS)), (theirs, run(steps // TURNS))):
                for name, values in new.items():
                    seen[name] += values
    return [{"name": "tandem", **_summary(ours)}, {"name": f"vLLM {version}", **_summary(theirs)}]


@contextmanager
def _vllm(python: Path, running: int) -> Iterator[tuple[str, Callable[[int], Steps]]]:
    """Its version, and what runs so many steps (benchmarks/vllm_scheduler.py)."""
    process = subprocess.Popen(
        [str(python), str(ROOT / "benchmarks" / "vllm_scheduler.py"), str(MODEL), str(running)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    asks, answers = process.stdin, process.stdout
    assert asks is not None and answers is not None

    def answer() -> dict[str, Any]:
        if not (line := answers.readline()):
            raise RuntimeError("vLLM's scheduler ended; its error stands above")
        return dict(json.loads(line))

    def run(steps: int) -> Steps:
        print(steps, file=asks, flush=True)
        return answer()

    try:
        yield str(answer()["ready"]), run
    finally:
        asks.close()
        process.wait(30)
        answers.close()


def _run(scheduler: Scheduler, steps: int) -> Steps:
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
    return {"schedule_us": schedule_us, "collect_us": collect_us}


def _summary(steps: Steps) -> dict[str, int]:
    both = [a + b for a, b in zip(steps["schedule_us"], steps["collect_us"], strict=True)]
    return {
        "schedule_p50_us": round(statistics.median(steps["schedule_us"])),
        "collect_p50_us": round(statistics.median(steps["collect_us"])),
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


FIGURES = ("schedule_p50_us", "collect_p50_us", "step_p50_us", "step_min_us")


def render(report: dict[str, Any]) -> str:
    lines = ["| policy | running | waiting | schedule p50 us | collect p50 us | step p50 us | step min us |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in report["steps"]:
        lines.append(f"| {r['policy']} | {report['running']} | {r['waiting']} | {_figures(r)} |")
    if report.get("beside"):
        ours, theirs = report["beside"]
        lines += ["", "In turns, a process each:", ""]
        lines += [
            "| scheduler | schedule p50 us | collect p50 us | step p50 us | step min us |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| {r['name']} | {_figures(r)} |" for r in report["beside"]]
        lines.append(f"| ours over theirs | {' | '.join(f'{ours[name] / theirs[name]:.2f}' for name in FIGURES)} |")
    lines += ["", "| tree nodes | insert 512 tokens, us | match 512 tokens, us |", "|---|---|---|"]
    lines += [f"| {r['nodes']} | {r['insert_p50_us']} | {r['match_p50_us']} |" for r in report["radix"]]
    return "\n".join(lines)


def _figures(row: dict[str, Any]) -> str:
    return " | ".join(str(row[name]) for name in FIGURES)


def _decoding(running: int, *, policy: str) -> Scheduler:
    """One with `running` requests, all past their prompts."""
    scheduler = _scheduler(running, policy=policy)
    rng = random.Random(0)
    for i in range(running):
        scheduler.add(_request(f"r{i}", [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]))
    while scheduler.num_waiting:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.collect(plan, _result(plan))
    return scheduler


def _scheduler(running: int, *, policy: str) -> Scheduler:
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
    state = SchedulerState(limits=limits, memory=memory)
    return Scheduler(state)


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
