"""Runs the benchmarks (or takes their JSON) and writes docs/reports/benchmarks.md from them.

usage: python -m benchmarks.report [--results DIR] [--quick] [--reuse] [--only NAME ...] [--trace PATH ...]     (`make bench` runs it)

Results are kept in DIR as JSON, one file a benchmark; --reuse only writes the page again from what is there. Sections of which
nothing is there stay as they are, and so does what was written behind a section's last line. Benchmarks that replay traces run where
--trace names some (none is shipped).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import (
    frontends,
    gpu_check,
    interference,
    kv_dtype,
    kv_event_rate,
    kv_quality,
    layerwise,
    long_bodies,
    moe_step,
    neighbour,
    pd_overhead,
    prefix_fetch,
    quantized_step,
    router_cost,
    router_path,
    router_policies,
    scale,
    scheduler_step,
    start_time,
    step_gap,
    step_time,
    tapes,
    token_path,
    transfer_rate,
)

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "reports"
PAGE = KEPT / "benchmarks.md"

QUICK: dict[str, list[str]] = {
    "kv_event_rate": ["--workers", "50", "--rates", "200", "--seconds", "1"],
    "interference": ["--rounds", "1"],
    "pd_overhead": ["--requests", "10"],
    "prefix_fetch": ["--rounds", "1", "--tokens", "512"],
    "step_time": ["--layers", "4", "--output-len", "16"],
    "moe_step": ["--layers", "2", "--hidden", "256", "--intermediate", "320", "--steps", "6"],
    "kv_quality": ["--most", "600"],
    "kv_dtype": ["--layers", "2", "--contexts", "1024"],
    "tapes": ["--layers", "4", "--steps", "4"],
    "neighbour": ["--layers", "2", "--rounds", "1", "--seconds", "0.2"],
    "quantized_step": ["--layers", "4", "--steps", "6"],
    "step_gap": ["--layers", "2", "--batches", "1", "8", "--steps", "8"],
    "layerwise": ["--layers", "2", "--hidden", "256", "--requests", "2", "--prompt-len", "2048"],
    "transfer_rate": ["--total-mib", "16", "--repeats", "3"],
    "scheduler_step": ["--steps", "50"],
    "router_cost": ["--seconds", "0.5", "--rounds", "1"],
    "router_path": ["--seconds", "0.5"],
    "long_bodies": ["--streams", "2", "--megabytes", "4", "--rounds", "1"],
    "start_time": ["--rounds", "1"],
    "token_path": ["--seconds", "1", "--rounds", "1"],
    "frontends": ["--seconds", "1", "--rounds", "1"],
}
SECTIONS = {
    "interference": (
        "What prompts do to running answers",
        "Four long decodes alone, and while a prompt of 1,024 tokens arrives every second. These cores cannot prefill"
        " that many, so a queue builds up. The aim for a core each: p99 within 1.3 of alone.",
        interference.render,
    ),
    "pd_overhead": (
        "Unified against prefill + decode",
        "Both on this one machine, in turns within one run. Prefill and decode together have no more hardware than "
        "the unified worker alone, so this shows what PD costs, not what it gains.",
        pd_overhead.render,
    ),
    "transfer_rate": (
        "KV transfer",
        "Between two processes: through both managers (from `send` to `Success` on the other side); the engine alone "
        "with the same pieces; memcpy of the same pieces within one process. The raw loop polls without a pause. "
        "Managers pause between polls, because a polling core does not compute. An engine with threads of its own "
        "(Mooncake over TCP) gains or loses by where the kernel puts the raw loop, so small pages are measured with "
        "the managers' pauses, too.",
        transfer_rate.render,
    ),
    "layerwise": (
        "Pages that leave layer by layer",
        "A random checkpoint with layers like those of Qwen3-0.6B, but fewer and narrower, so that the transfer "
        "weighs more. One thread computes; the other cores belong to the sender. The most that there is to gain is "
        "the time of the transfer, and the gain needs an idle core. On a shared machine look at the best row.",
        layerwise.render,
    ),
    "prefix_fetch": (
        "Prefixes of other workers",
        "Time to the first token of a prompt that one prefill worker has cached and another one does not, by its length; the shipped model (a "
        "KiB of KV a token), prefill and decode on this one machine, over NIXL. *Chosen*: by `--prefix-fetch`, which compares costs. Each "
        "answer's tokens are compared.",
        prefix_fetch.render,
    ),
    "step_time": (
        "Decode step and prefill",
        "A random checkpoint with the layers of Qwen3-0.6B in bf16, one thread and all cores. The limit of a step is "
        "the time to read the weights and the batch's KV from huge pages with as many threads; that of a prefill is "
        "torch's bf16 matrix product. With all cores the threads share them with HTTP and the load's client.",
        step_time.render,
    ),
    "tapes": (
        "Steps from a tape",
        "The forward of a decode step on a CPU, in turns in one process: Python and torch between the kernels, and "
        "the same kernel calls recorded and repeated by one call from C (`engine/kernels/tape.py`). The bits are the "
        "same.",
        tapes.render,
    ),
    "neighbour": (
        "A busy neighbour",
        "Decode steps with one thread and with two while other processes take a share of the cores, in turns within one run: what a way keeps "
        "of its steps without a neighbour, and how fast it is over the first row's. The kernel divides cores fairly: two threads beside two "
        "neighbours that want a core each have half of both. The aim beside half a core of two: 70 % kept.",
        neighbour.render,
    ),
    "moe_step": (
        "A mixture of experts",
        "A decode step of 8 experts of 0.1B, two of which a token takes, beside that of a dense model whose MLPs are as wide as the experts "
        "that the step reads, in turns in one process. The aim: 1.2 times. The limit is the time to read these experts, the other weights and "
        "the KV from memory. With one thread times are what it computes, so others on "
        "the machine disturb little. A dense MLP multiplies each row by all it reads, a mixture by two experts: so larger batches gain.",
        moe_step.render,
    ),
    "quantized_step": (
        "Integer weights",
        "A decode step on a CPU with `--quantization` beside bf16, in turns in one process: a random checkpoint with the layers of "
        "Qwen3-0.6B. The aim at batch 1: 1.7 times bf16's rate with 8 bits, 2.6 times with 4. Larger batches are bound by "
        "arithmetic, which is bf16's. Panels lie in pairs because a core reads 37 GB/s from one run of memory and 25 from two in turns.",
        quantized_step.render,
    ),
    "kv_quality": (
        "KV of 8 bits: quality",
        "Perplexity of Tandem's design pages and of the GPL with `--kv-cache-dtype fp8_e4m3` beside bf16, in pieces of 2,048 tokens; how often the "
        "likeliest next token is the same, always after the right ones.",
        kv_quality.render,
    ),
    "kv_dtype": (
        "KV of 8 bits: attention",
        "Attention of a decode step over 28 layers, and of a prompt's last 512 tokens in one layer, with Qwen3-0.6B's heads: CPU time of one "
        "thread, the least of five rounds in turns.",
        kv_dtype.render,
    ),
    "step_gap": (
        "Between two steps",
        "Time for which the executor's stream has nothing to do between two decode steps, with one step in flight "
        "(depth 1) and with two; one thread computes. Inline is the default on a CPU: the scheduler's own thread "
        "computes, and its work between steps is the gap. `threaded` hides the gap on a core of its own, but both "
        "threads need Python's lock.",
        step_gap.render,
    ),
    "scheduler_step": (
        "Scheduler alone",
        "CPU time of the pure core with nothing behind it, decodes of 512-token prompts. The aim: at most half of "
        "vLLM's scheduler under the same load, however many requests wait.",
        scheduler_step.render,
    ),
    "token_path": (
        "What a token costs outside the engine",
        "CPU time of everything that handles a token after the scheduler, for each token of chat streams through a PD"
        " cluster of the shipped model, including requests, health checks and reports. The client and the schedulers "
        "are not counted, but they share the cores. The aim: 40 us. With few streams most of the cost is a process "
        "that wakes up for one token.",
        token_path.render,
    ),
    "frontends": (
        "Several frontends",
        "Real frontends of one worker (`--tokenizer-worker-num`) over a stand-in for the scheduler that answers at once, in turns within "
        "one run; answers are not streamed. Client and stand-in share the cores: a second frontend has what they leave.",
        frontends.render,
    ),
    "long_bodies": (
        "Streams beside long bodies",
        "The longest silence of any of 16 streams of SmolLM2 while one body is read, refused or answered; the slowest of short requests that come "
        "beside it. Router, prefill and decode worker, and the client, share this machine. The least of three rounds (scores of thousands: one). "
        "The aim: no silence above 0.25 s. A score or a rerank "
        "computes thousands of prompts: streams wait for the cores too, and a short request for the prompts of a turn.",
        long_bodies.render,
    ),
    "start_time": (
        "Start",
        "From the start of the process until it answers; a cluster: until router and all workers are healthy (the shipped model).",
        start_time.render,
    ),
    "router_cost": (
        "What a router costs",
        "In front of one prefill and one decode worker that answer at once; bodies of 300 bytes. CPU time is that of "
        "the router's processes. Health checks run beside the load, so slow loads pay for them too. SGLang's router "
        "(Rust, from PyPI) in the same run; its late first bytes are the delayed ACK of kept-alive connections.",
        router_cost.render,
    ),
    "router_path": (
        "Where the router's time goes",
        "The router's own code from the client's bytes to the answer's, without sockets. The three writes and reads "
        "of a request, which every router has, come on top.",
        router_path.render,
    ),
    "router_policies": (
        "Router policies on traces",
        "Mooncake's traces through the router's own policies and a simple model of 8 prefill workers (8,000 tokens/s, a "
        "cache of 2 M tokens) and 8 decode workers; what the figures mean: [router.md](../router.md#which-policy). [Plot](router_policies.png).",
        router_policies.render,
    ),
    "gpu_check": (
        "On a GPU",
        "Kernels, steps and transfers of Qwen3-8B's shape with random weights, beside what this GPU copies within its memory and "
        "multiplies in bf16; all figures: [gpu_check.json](gpu_check.json), what they mean: [gpu.md](../gpu.md).",
        gpu_check.render,
    ),
    "scale": (
        "Scale",
        "The router's core at work for many workers, and the bootstrap server's registry: production code in virtual "
        "time, fed by a trace that repeats with new prompts, at a rate that suits the workers. Every 1,000 requests "
        "one worker goes down and comes back, so pools are made anew. Sockets and bodies are not included; their cost"
        " does not depend on the number of workers. Half of the workers are of each role. Each request of the row with `and` is "
        "chosen twice; objectives (`--slo-ttft`, `--slo-itl`) ask the forecast. [Plot](scale.png).",
        scale.render,
    ),
    "kv_event_rate": (
        "KV events of 1,000 workers",
        "Each message stores the pages of a prompt of 2,048 tokens, which one worker alone has, and removes as many: one a request, at a full cache. "
        "Our workers name pages as requests are looked up; of other engines the router has to read and hash the tokens. All go through one "
        "router process, whose event loop gives them half its time at most; the rest waits in the sockets, 256 messages of each worker, "
        "and is lost beyond. So the router's CPU is what ends first, requests go on, and each further router process has all events again.",
        kv_event_rate.render,
    ),
}
ARGUMENTS = {
    "moe_step": ["--threads", "1", "--steps", "60"],
    "kv_quality": ["docs/design", "/usr/share/common-licenses/GPL-3"],
}
REPLAYS = ("router_policies", "scale")
ELSEWHERE = ("gpu_check",)  # run where a GPU is: `make gpu-check`


def run(name: str, *, results: Path, quick: bool) -> None:
    """Run one benchmark in a process of its own."""
    argv = [
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        "--output",
        str(results / f"{name}.json"),
        *ARGUMENTS.get(name, []),
    ]
    subprocess.run([*argv, *(QUICK[name] if quick else [])], cwd=ROOT, check=True)


def replay(name: str, traces: list[Path]) -> None:
    """Run one that replays traces; its figures and its plot are kept in docs/reports."""
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(KEPT / f"{name}.json")]
    argv += ["--plot", str(KEPT / f"{name}.png")]
    for trace in traces:
        argv += ["--trace", str(trace.resolve())]
    subprocess.run(argv, cwd=ROOT, check=True)


def page(before: str, names: Iterable[str], results: Path) -> str:
    """Return docs/reports/benchmarks.md, which says `before`, with the sections of `names` of which there are results."""
    text = before or "# Benchmarks\n\n`make bench` writes this page (benchmarks/report.py). Do not edit it by hand.\n"
    for name in names:
        path = (KEPT if name in (*REPLAYS, *ELSEWHERE) else results) / f"{name}.json"
        if path.exists():
            text = with_section(text, name, json.loads(path.read_text()))
    return text


def with_section(page: str, name: str, result: dict[str, Any]) -> str:
    """Put a section in the place of its last version up to that one's stamp, or where its place among the others is."""
    title, text, render = SECTIONS[name]
    section = f"\n## {title}\n\n{text}\n\n{render(result)}\n\n{_where(name, result['environment'])}\n"
    begin = page.find(f"\n## {title}\n")
    if begin >= 0:
        end = _end_of(page, begin)
        stamp = page.find(f"\n`python -m benchmarks.{name}", begin, end)
        rest = page[page.index("\n", stamp + 1) + 1 :] if stamp >= 0 else page[end:]
        return page[:begin] + section + rest
    order = list(SECTIONS)
    later = (page.find(f"\n## {SECTIONS[other][0]}\n") for other in order[order.index(name) + 1 :])
    at = min((found for found in later if found >= 0), default=len(page))
    return page[:at] + section + page[at:]


def _end_of(page: str, begin: int) -> int:
    """Where the section that begins at `begin` ends."""
    end = page.find("\n## ", begin + 1)
    return len(page) if end < 0 else end


def _where(name: str, env: dict[str, Any]) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in env["versions"].items())
    machine = f"{env['cpu']}, {env['cores']} cores, {env['memory_gib']} GiB" + (f", {env['gpu']}" if env["gpu"] else "")
    command = " ".join([f"python -m benchmarks.{name}", *ARGUMENTS.get(name, [])])
    return f"`{command}` on {machine}; commit {env['commit']}, {env['time']}; {versions}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / ".build" / "bench")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that everything runs")
    parser.add_argument("--reuse", action="store_true", help="write the page from the JSON that is there")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME", help="these benchmarks"
    )
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a trace to replay; repeatable")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        if name in REPLAYS and args.trace:
            replay(name, args.trace)
        elif name not in (*REPLAYS, *ELSEWHERE) and not args.reuse:
            run(name, results=args.results, quick=args.quick)
    PAGE.write_text(page(PAGE.read_text() if PAGE.exists() else "", args.only, args.results))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
