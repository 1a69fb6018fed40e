"""Decode against the memory's bandwidth, prefill against the rate of a matrix product: what an engine's threads reach.

usage: python -m benchmarks.step_time [--layers 28] [--hidden 1024] [--output-len 48] [--threads 1 N] [--output FILE]

A unified worker serves a random checkpoint (benchmarks/random_model.py), once with one thread and once with all cores. With N
requests in flight from start to end, the gap between two tokens of a request is one step of a batch of N, with everything a
user pays for: scheduler, sampler, text, HTTP. The limit is (bytes of the weights, and of the KV that the batch has in the
middle of its answers) / (bytes per second that as many threads read from memory, in huge pages), measured in the same run.

Prefill is the first token of a lone prompt. Its rate counts the layers' products alone (2 operations for each weight and
token; attention comes on top), against torch's bf16 product of two 2048 x 2048 matrices on as many threads in the same run.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.cluster import load, tandem_up
from benchmarks.random_model import HEAD_DIM, KV_HEADS, write_model
from deploy.bench import environment
from deploy.bench.report import table

BATCHES = (1, 8, 32)
INPUT_LEN = 64
READ_BYTES = 1 << 30
PROMPT_LEN = 1024
PROMPTS = 4
MATRIX = 2048


def read_rate(threads: int, repeats: int = 7, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that so many threads read from memory together: the best of several passes over 1 GiB.

    Two kinds of pass in turns: which one keeps more reads in flight depends on the CPU.
    """
    data = np.ones(READ_BYTES // 8, np.int64)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:  # numpy drops the GIL
        best_s = min(
            _time_of(lambda one_pass=one_pass: list(pool.map(one_pass, parts)), clock)  # type: ignore[misc]
            for _ in range(repeats)
            for one_pass in (np.bitwise_or.reduce, np.maximum.reduce)
        )
    return data.nbytes / best_s


def product_rate(threads: int, repeats: int = 7) -> float:
    """Operations per second of a bf16 matrix product on so many threads: the best of several."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(MATRIX, MATRIX).bfloat16() for _ in range(2))
    best_s = min(_time_of(lambda: a @ b) for _ in range(repeats))
    return 2 * MATRIX**3 / best_s


def _time_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    work()
    return clock() - begin


def prefill(url: str, *, weight_bytes: int, threads: int) -> dict[str, float]:
    """First tokens of prompts that come one at a time, no two alike."""
    products = [product_rate(threads)]
    (summary,) = load(
        url=url, prompt="ids", warmup=1, num_requests=PROMPTS, concurrency=1, input_len=PROMPT_LEN, output_len=1
    )
    products.append(product_rate(threads))
    assert summary.ttft_s is not None
    rate = weight_bytes * PROMPT_LEN / summary.ttft_s.p50  # bf16: as many operations as bytes, for each token
    return {
        "tokens": PROMPT_LEN,
        "ttft_ms": 1000 * summary.ttft_s.p50,
        "gflop_s": rate / 1e9,
        "product_gflop_s": max(products) / 1e9,
        "of_limit": rate / max(products),
    }


def measure(folder: Path, *, threads: int, weight_bytes: int, layers: int, output_len: int) -> dict[str, Any]:
    """Figures of a worker with so many threads."""
    rates = [read_rate(threads)]
    steps = []
    with tandem_up("--unified", "--model-path", str(folder), "--num-threads", str(threads)) as cluster:
        for batch in BATCHES:
            shape = {"num_requests": batch, "concurrency": batch, "input_len": INPUT_LEN, "output_len": output_len}
            (summary,) = load(url=cluster.url, prompt="ids", warmup=1, **shape)
            assert summary.itl_s is not None
            rates.append(read_rate(threads, 3))
            steps.append((batch, 1000 * summary.itl_s.p50, summary.output_tokens_per_s))
        first = prefill(cluster.url, weight_bytes=weight_bytes, threads=threads)
    token_bytes = layers * 2 * KV_HEADS * HEAD_DIM * 2  # K and V, bf16
    rows = []
    for batch, step_ms, tok_s in steps:
        read = weight_bytes + batch * (INPUT_LEN + output_len // 2) * token_bytes
        limit_ms = 1000 * read / max(rates)
        rows.append(
            {"batch": batch, "step_ms": step_ms, "limit_ms": limit_ms, "of_limit": limit_ms / step_ms, "tok_s": tok_s}
        )
    return {
        "threads": threads,
        "read_gb_s": max(rates) / 1e9,
        "read_gb_s_median": median(rates) / 1e9,
        "rows": rows,
        "prefill": first,
    }


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    lines = [
        [
            str(of["threads"]),
            str(r["batch"]),
            f"{r['step_ms']:.1f}",
            f"{r['limit_ms']:.1f}",
            f"{100 * r['of_limit']:.0f} %",
            f"{r['tok_s']:.0f}",
        ]
        for of in result["threads"]
        for r in of["rows"]
    ]
    text = table(["threads", "batch", "step p50, ms", "limit, ms", "of the limit", "output tok/s"], lines)
    rates = ", ".join(f"{of['threads']} read {of['read_gb_s']:.1f} GB/s" for of in result["threads"])
    prompts = "\n\n".join(_prefill_line(of["threads"], of["prefill"]) for of in result["threads"])
    return f"{result['weight_gb']:.2f} GB of weights; threads: {rates}\n\n{text}\n\n{prompts}"


def _prefill_line(threads: int, first: dict[str, Any]) -> str:
    return (
        f"A prompt of {first['tokens']} tokens alone, threads: {threads}: first token after {first['ttft_ms']:.0f} ms, "
        f"{first['gflop_s']:.0f} GFLOP/s in the layers' products, {100 * first['of_limit']:.0f} % of the "
        f"{first['product_gflop_s']:.0f} GFLOP/s of a {MATRIX} x {MATRIX} bf16 product."
    )


def measure_all(threads: Sequence[int], *, layers: int, hidden: int, output_len: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-step-") as folder:
        weight_bytes = write_model(Path(folder), layers=layers, hidden=hidden)
        shape = {"weight_bytes": weight_bytes, "layers": layers, "output_len": output_len}
        found = [measure(Path(folder), threads=count, **shape) for count in threads]
    return {"weight_gb": weight_bytes / 1e9, "threads": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = measure_all(args.threads, layers=args.layers, hidden=args.hidden, output_len=args.output_len)
    result = {"environment": environment.describe(), **found}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
