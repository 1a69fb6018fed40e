"""Replays a request trace through the router's policies: how much of the prompts is cached where they go, how even the load.

usage: python -m benchmarks.router_policies --trace PATH [--trace PATH] [--workers N] [--output FILE] [--plot PNG]

The policies are the router's own, the workers a simple model (benchmarks/trace_workers.py). "longest prefix" is the rule
of SGLang's router with its default thresholds, written here to compare with: the longest match if it is longer
than 0.3 of the prompt, else the worker with the smallest tree; the shortest queue while queues are unequal by more than
64 requests and 1.5 times.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.trace_workers import DecodeModel, PrefillModel, TraceRequest, read_trace, replay_decode, replay_prefill
from deploy.bench.environment import describe
from router.choice.cache_aware import CacheAware, cached_of, unbalanced
from router.choice.policies import (
    ConsistentHashing,
    Draw,
    LeastLoad,
    Placement,
    Policy,
    PowerOfTwo,
    Random,
    RoundRobin,
    RoutingHints,
)
from router.choice.prefix_index import PrefixIndex
from router.config import ChoiceFlags
from router.pool.worker import Pool

TREE_BLOCKS = (1 << 26) // 512  # --max-tree-size
SPEEDS = (0.5, 1.0, 1.5, 2.0)
SMALL_CACHES = (250_000, 500_000)  # tokens a worker: what is sent there does not stay for long
SMALL_CACHES_SPEED = 1.5
SMALL_CACHES_POLICIES = ("least_load", "longest prefix", "cache_aware", "cache_aware, KV events")
SEED = 1


class LongestPrefix:
    """SGLang's rule, see above."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._settings = ChoiceFlags()

    def choose(self, candidates: Pool, ask: RoutingHints) -> Placement:
        matched = self._index.match(ask.keys)
        best = max(candidates, key=lambda w: matched.depth(w.worker_id))
        queues = [worker.inflight_requests for worker in candidates]
        if unbalanced(min(queues), max(queues), self._settings):
            best = min(candidates, key=lambda w: w.inflight_requests)
        elif cached_of(matched, best, ask) <= self._settings.cache_threshold * ask.prompt_tokens:
            best = min(candidates, key=lambda w: self._index.num_blocks(w.worker_id))
        self._index.touch(best.worker_id, ask.keys)
        return Placement(best, cached_of(matched, best, ask))


def _draw() -> Draw:
    return random.Random(SEED).randrange


PREFILL: dict[str, Callable[[PrefixIndex], Policy]] = {
    "random": lambda index: Random(_draw()),
    "round_robin": lambda index: RoundRobin(_draw()),
    "power_of_two": lambda index: PowerOfTwo(_draw()),
    "least_load": lambda index: LeastLoad(_draw()),
    "consistent_hashing": lambda index: ConsistentHashing(_draw()),
    "longest prefix": LongestPrefix,
    "cache_aware": lambda index: CacheAware(_draw(), index, ChoiceFlags()),
    "cache_aware, KV events": lambda index: CacheAware(_draw(), index, ChoiceFlags()),
}
DECODE: dict[str, Callable[[Draw], Policy]] = {
    "random": Random,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "least_load": LeastLoad,
    "consistent_hashing": ConsistentHashing,
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    report: dict[str, Any] = {"environment": describe(), "workers": args.workers, "traces": []}
    for path in args.trace:
        report["traces"].append(_run(path, args.workers, args.speeds))
    print(render(report))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router_policies", description=__doc__)
    parser.add_argument("--trace", type=Path, action="append", required=True, help="JSON lines, may be gzipped")
    parser.add_argument("--workers", type=int, default=8, help="of each role")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS, help="multiples of the trace's rate")
    parser.add_argument("--output", type=Path, help="write the JSON here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (needs matplotlib)")
    return parser.parse_args(argv)


def _run(path: Path, workers: int, speeds: Sequence[float]) -> dict[str, Any]:
    prefill, decode = [], []
    model = PrefillModel(num_workers=workers)
    for speed in speeds:
        trace = read_trace(path, speed=speed)
        for name in tqdm(PREFILL, unit="policy", desc=f"{path.name} x{speed:g}"):
            prefill.append({"policy": name, "speed": speed, **prefill_row(name, trace, model)})
    small = []
    trace = read_trace(path, speed=SMALL_CACHES_SPEED)
    for tokens in SMALL_CACHES:
        for name in tqdm(SMALL_CACHES_POLICIES, unit="policy", desc=f"{path.name}, caches of {tokens}"):
            row = prefill_row(name, trace, PrefillModel(num_workers=workers, cache_tokens=tokens))
            small.append({"policy": name, "cache_tokens": tokens, **row})
    trace = read_trace(path)
    done_s = replay_prefill(trace, LeastLoad(_draw()), model).done_s
    for name, make in DECODE.items():
        result = replay_decode(trace, done_s, make(_draw()), DecodeModel(num_workers=workers))
        decode.append({"policy": name, "spread": result.spread, "fullest_p99": _quantile(result.fullest, 0.99)})
    return {"trace": path.name, "requests": len(trace), "prefill": prefill, "small": small, "decode": decode}


def prefill_row(name: str, trace: list[TraceRequest], model: PrefillModel) -> dict[str, float]:
    """One policy of `PREFILL` over one trace."""
    index = PrefixIndex(max_blocks=TREE_BLOCKS)
    events = name.endswith("KV events")
    model = PrefillModel(num_workers=model.num_workers, cache_tokens=model.cache_tokens, events=events)
    result = replay_prefill(trace, PREFILL[name](index), model, index=index)
    return {
        "hit_rate": result.hit_rate,
        "spread": result.spread,
        "queue_tokens_p99": _quantile(result.queue_tokens, 0.99),
        "ttft_p50_s": _quantile(result.ttft_s, 0.5),
        "ttft_p99_s": _quantile(result.ttft_s, 0.99),
    }


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def render(report: dict[str, Any]) -> str:
    """Tables for Markdown: at the speed nearest to the trace's own."""
    lines: list[str] = []
    for trace in report["traces"]:
        speed = min((row["speed"] for row in trace["prefill"]), key=lambda s: abs(s - 1))
        lines += [
            f"`{trace['trace']}`, {trace['requests']} requests, {report['workers']} workers of each role:",
            "",
            "| prefill policy | cached tokens | busiest/mean work | p99 longest queue, tokens | TTFT p50 s | p99 s |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['policy']} | {r['hit_rate']:.1%} | {r['spread']:.2f} | {r['queue_tokens_p99']:,} "
            f"| {r['ttft_p50_s']:.2f} | {r['ttft_p99_s']:.1f} |"
            for r in trace["prefill"]
            if r["speed"] == speed
        ]
        lines += ["", f"Caches too small for what comes, at {SMALL_CACHES_SPEED} times the rate:", ""]
        lines += [
            "| prefill policy | cache, tokens | cached tokens | TTFT p50 s | p99 s |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['policy']} | {r['cache_tokens']:,} | {r['hit_rate']:.1%} | {r['ttft_p50_s']:.2f} | {r['ttft_p99_s']:.1f} |"
            for r in trace["small"]
        ]
        lines += ["", "| decode policy | fullest/mean KV | p99 KV of the fullest, tokens |", "|---|---:|---:|"]
        lines += [f"| {r['policy']} | {r['spread']:.2f} | {r['fullest_p99']:,} |" for r in trace["decode"]]
        lines.append("")
    return "\n".join(lines).rstrip()


def plot(report: dict[str, Any], path: Path) -> None:
    """p99 TTFT against the rate, a panel per trace, a line per policy with its hit rate."""
    import matplotlib  # a dev extra; a headless backend before anything else

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(report["traces"]), figsize=(6.2 * len(report["traces"]), 4.6), squeeze=False)
    for panel, trace in zip(panels[0], report["traces"], strict=True):
        for name in PREFILL:
            rows = [row for row in trace["prefill"] if row["policy"] == name]
            hit = next((row["hit_rate"] for row in rows if row["speed"] == 1), rows[-1]["hit_rate"])
            style = "-" if "cache" in name or "prefix" in name else "--"
            xs, ys = [row["speed"] for row in rows], [row["ttft_p99_s"] for row in rows]
            panel.plot(xs, ys, style, marker="o", markersize=3, label=f"{name} ({hit:.0%} cached)")
        panel.set(title=trace["trace"], xlabel="rate, multiples of the trace's", ylabel="p99 TTFT, s", yscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
