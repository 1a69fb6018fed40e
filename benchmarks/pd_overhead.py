"""What disaggregation costs on one machine: unified against prefill + decode, in turns within one run.

usage: python -m benchmarks.pd_overhead [--backend nixl --backend mooncake] [--requests 40] [--model-path DIR] [--output FILE]

Both clusters are up at the same time, one has load at a time. Prompts are random token ids, so nothing is cached.
- start: `tandem up` to all healthy, and to the first token of a first request (the venv is set up)
- TTFT at one request in flight, for several prompt lengths; what PD adds is the difference of the medians. Of that the
  transfer is what the prefill worker measures itself, from the last chunk's hand-over (or decode's word where it goes, if
  that comes later) until all has landed, the mean of the last requests; the rest is routing, handshake and hand-overs
- throughput and latencies at 8 requests in flight
"""

import argparse
import json
import re
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, load, tandem_up
from deploy.bench import environment
from deploy.bench.report import table
from deploy.bench.stats import Summary
from disagg.page_sender import KEPT

PROMPT_LENS = (64, 512, 2048)
TRANSFER = re.compile(r"^sglang:kv_transfer_latency_ms(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
BUSY = {"concurrency": 8, "input_len": 256, "output_len": 64}


def measure_start(*args: str) -> dict[str, float]:
    """Seconds from the start of `tandem up` to all healthy and to the first token."""
    begin = time.monotonic()
    with tandem_up(*args) as cluster:
        before = time.monotonic()
        (first,) = load(url=cluster.url, num_requests=1, input_len=16, output_len=2, warmup=0, prompt="ids")
        assert first.ttft_s is not None
        return {"healthy_s": cluster.ready_s, "first_token_s": before - begin + first.ttft_s.p50}


def compare(unified: Cluster, split: Cluster, *, requests: int) -> dict[str, Any]:
    """TTFT by prompt length, and the loaded case."""
    rows = []
    for length in PROMPT_LENS:
        alone = {"concurrency": 1, "input_len": length, "output_len": 8, "num_requests": requests}
        one, two = load(url=unified.url, compare=split.url, prompt="ids", **alone)
        pd = {**_latencies(two), "transfer_ms": transfer_ms(split)}
        rows.append({"prompt_len": length, "unified": _latencies(one), "pd": pd})
    one, two = load(url=unified.url, compare=split.url, prompt="ids", num_requests=4 * requests, **BUSY)
    return {"ttft": rows, "busy": {"unified": _latencies(one), "pd": _latencies(two), "load": BUSY}}


def transfer_ms(split: Cluster) -> float:
    """Of the last `KEPT` requests, by the prefill worker itself."""
    (prefill,) = (url for role, url in split.workers if role == "prefill")
    with urllib.request.urlopen(f"{prefill}/metrics", timeout=10.0) as answer:
        found = TRANSFER.search(answer.read().decode())
    assert found is not None, "the prefill worker says nothing of its transfers"
    return float(found[1])


def _latencies(summary: Summary) -> dict[str, float]:
    assert summary.ttft_s is not None and summary.itl_s is not None
    return {
        "ttft_p50_ms": 1000 * summary.ttft_s.p50,
        "ttft_p99_ms": 1000 * summary.ttft_s.p99,
        "itl_p50_ms": 1000 * summary.itl_s.p50,
        "itl_p99_ms": 1000 * summary.itl_s.p99,
        "output_tok_s": summary.output_tokens_per_s,
    }


def render(result: dict[str, Any]) -> str:
    """The tables of a result (benchmarks/report.py uses it too)."""
    starts = [[name, f"{s['healthy_s']:.1f}", f"{s['first_token_s']:.1f}"] for name, s in result["start"].items()]
    parts = [table(["`tandem up`", "all healthy, s", "first token, s"], starts)]
    ttft, busy = [], []
    for backend, found in result["backends"].items():
        for row in found["ttft"]:
            one, two = row["unified"]["ttft_p50_ms"], row["pd"]["ttft_p50_ms"]
            name = f"{backend}, {row['prompt_len']} tokens"
            moved = row["pd"].get("transfer_ms")
            parts_of = ["", ""] if moved is None else [f"{moved:.1f}", f"{two - one - moved:+.1f}"]
            ttft.append([name, f"{one:.1f}", f"{two:.1f}", f"{two - one:+.1f}", *parts_of])
        for name in ("unified", "pd"):
            label = name if name == "unified" else f"pd, {backend}"
            values = found["busy"][name]
            busy.append([label, *(f"{values[key]:.1f}" for key in values)])
    header = [
        "one request at a time, TTFT p50",
        "unified, ms",
        "PD, ms",
        "PD adds, ms",
        "transfer, ms",
        "beyond it, ms",
    ]
    parts.append(table(header, ttft))
    header = ["8 at once, 256 in, 64 out", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "output tok/s"]
    return "\n\n".join([*parts, table(header, busy)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=("nixl", "mooncake"))
    parser.add_argument(
        "--requests", type=int, default=KEPT, help="of each length; the transfer is that of the last 64"
    )
    parser.add_argument("--model-path")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model = ["--model-path", args.model_path] if args.model_path else []
    start = {"unified": measure_start("--unified", *model)}
    backends = {}
    for backend in args.backend or ("nixl", "mooncake"):
        start[f"1 prefill + 1 decode, {backend}"] = measure_start("--transfer-backend", backend, *model)
        with ExitStack() as stack:
            unified = stack.enter_context(tandem_up("--unified", *model))
            split = stack.enter_context(tandem_up("--transfer-backend", backend, *model))
            backends[backend] = compare(unified, split, requests=args.requests)
    result = {"environment": environment.describe(), "start": start, "backends": backends}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
