"""What it brings to launch the forward of a constrained step before its masks are known ("sampling delayed").

usage: python -m benchmarks.deferred_sampling [--running N] [--steps N] [--forward-ms MS] [--mask-us US] [--output FILE]

The production scheduler, pipeline and threaded stream. The model is a stand-in that leaves the processor alone for the
time of a forward, as a GPU does; a mask takes the processor as long as llguidance does for a vocabulary of 128k.

    depth 1    collect, masks, forward, sampling, one after the other
    wait       depth 2, but a constrained step is launched when the one before it is collected (what we did before)
    deferred sampling  depth 2: the forward runs while the step before it is collected and masks are computed
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from deploy.bench.environment import describe
from engine.core.limits import Limits
from engine.core.memory import Memory
from engine.core.page_allocator import PageAllocator
from engine.core.plan import Plan
from engine.core.radix_cache import RadixCache
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.executor.executor import Executor
from engine.executor.model_runner import Forward
from engine.executor.sample_pass import StepOutput
from engine.executor.stream import ThreadStream
from engine.loop.pipeline import Pipeline
from engine.sampling_params import SamplingParams

WAYS = ("depth 1", "wait", "deferred sampling")


class Costly:
    """A grammar that accepts anything; a mask keeps the processor as long as a real one."""

    ended, problem = False, ""

    def __init__(self, mask_s: float) -> None:
        self._mask_s = mask_s

    def accept(self, token: int) -> bool:
        return True

    def bitmask(self) -> bytes:
        until_s = time.perf_counter() + self._mask_s
        while time.perf_counter() < until_s:
            pass
        return b""


class StandIn:
    """A runner: the forward sleeps, sampling costs nothing."""

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s

    def run(self, plan: Plan) -> StepOutput:
        self.forward(plan, Forward())
        return self.sample(plan, Forward())

    def forward(self, plan: Plan, out: Forward) -> None:
        time.sleep(self._forward_s)

    def sample(self, plan: Plan, forward: Forward) -> StepOutput:
        tensor = torch.zeros(len(plan.items), dtype=torch.int64)
        return StepOutput(list(range(len(tensor))), tensor, tensor.bool(), {}, {})


class Waiting(Scheduler):
    """A scheduler whose constrained steps wait as a whole."""

    def schedule(self, now_s: float = 0.0) -> Plan | None:
        plan = super().schedule(now_s)
        if plan is not None:
            plan.wait = plan.wait or plan.sample_deferred
        return plan


def main() -> None:
    args = _arguments()
    rows = [measure(way, args) for way in WAYS]
    report = {
        "environment": describe(),
        "running": args.running,
        "forward_ms": args.forward_ms,
        "mask_us": args.mask_us,
        "ways": rows,
    }
    print(render(report))
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def render(report: dict[str, Any]) -> str:
    """A table of ms a step; the ratio is to `wait`."""
    by = {row["way"]: row["step_ms"] for row in report["ways"]}
    lines = [f"| {way} | {ms:.2f} ms | {by['wait'] / ms:.2f} x |" for way, ms in by.items()]
    head = f"{report['running']} constrained requests, a forward of {report['forward_ms']:g} ms, a mask of {report['mask_us']:g} us\n"
    return "\n".join([head, "| way | a step (median) | steps/s against waiting |", "|---|---|---|", *lines])


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median ms between two collected decode steps."""
    running, steps = args.running, args.steps
    scheduler = (Waiting if way == "wait" else Scheduler)(
        limits=Limits(page_size=16, max_running_requests=running, max_queued_requests=running),
        memory=_memory(running, steps),
        tail_texts=lambda ids, skip: (),
    )
    stream = ThreadStream(num_threads=1)
    executor = Executor(runner=StandIn(args.forward_ms / 1000), stream=stream)
    times: list[float] = []

    def on_step(effects: object) -> list[Any]:
        times.append(time.perf_counter())
        return []

    pipeline = Pipeline(scheduler=scheduler, executor=executor, depth=1 if way == "depth 1" else 2, on_step=on_step)
    for i in range(running):
        sampling = SamplingParams(max_new_tokens=steps)
        scheduler.add(
            Request(
                rid=f"r{i}",
                input_ids=[i] * 32,
                sampling=sampling,
                eos_ids=frozenset(),
                arrived_s=0.0,
                grammar=Costly(args.mask_us / 1e6),
            )
        )
    while not scheduler.idle:
        pipeline.advance(scheduler.schedule())
    executor.close()
    gaps = [b - a for a, b in itertools.pairwise(times[2:])]
    return {"way": way, "step_ms": statistics.median(gaps) * 1000}


def _memory(running: int, steps: int) -> Memory:
    allocator = PageAllocator(num_pages=running * (steps + 64) // 16 + running, page_size=16)
    return Memory(allocator=allocator, cache=RadixCache(allocator, enabled=False))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=32, help="constrained requests")
    parser.add_argument("--steps", type=int, default=200, help="decode steps")
    parser.add_argument("--forward-ms", type=float, default=5.0, help="time of a forward")
    parser.add_argument("--mask-us", type=float, default=50.0, help="time of a mask")
    parser.add_argument("--output", help="write the JSON here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
