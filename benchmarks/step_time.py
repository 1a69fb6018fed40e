"""Decode against the memory's bandwidth, prefill against the rate of a matrix product: what one thread of an engine reaches.

usage: python -m benchmarks.step_time [--layers 28] [--hidden 1024] [--output-len 48] [--output FILE]

A unified worker serves a random checkpoint (benchmarks/random_model.py). With N requests in flight from start to end,
the gap between two tokens of a request is one step of a batch of N, with everything a user pays for: scheduler,
sampler, detokenizer, HTTP. The limit is (weight bytes) / (bytes per second that one thread reads from memory, in huge
pages), measured in the same run.

Prefill is the first token of a lone prompt. Its rate counts the layers' products alone (2 operations for each weight and
token; attention comes on top), against torch's bf16 product of two 2048 x 2048 matrices on one thread in the same run.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.cluster import load, tandem_up
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table

BATCHES = (1, 8, 32)
INPUT_LEN = 64
READ_BYTES = 1 << 30
PROMPT_LEN = 1024
PROMPTS = 4
MATRIX = 2048


def read_rate(repeats: int = 7) -> float:
    """Bytes per second that one thread reads from memory: the best of several sums over 1 GiB."""
    data = np.ones(READ_BYTES // 8, np.int64)
    best_s = min(_time_of(lambda: np.bitwise_or.reduce(data)) for _ in range(repeats))
    return data.nbytes / best_s


def product_rate(repeats: int = 7) -> float:
    """Operations per second of a bf16 matrix product on one thread: the best of several."""
    torch.set_num_threads(1)
    a, b = (torch.randn(MATRIX, MATRIX).bfloat16() for _ in range(2))
    best_s = min(_time_of(lambda: a @ b) for _ in range(repeats))
    return 2 * MATRIX**3 / best_s


def _time_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def prefill(url: str, *, weight_bytes: int) -> dict[str, float]:
    """First tokens of prompts that come one at a time, no two alike."""
    products = [product_rate()]
    (summary,) = load(
        url=url, prompt="ids", warmup=1, num_requests=PROMPTS, concurrency=1, input_len=PROMPT_LEN, output_len=1
    )
    products.append(product_rate())
    assert summary.ttft_s is not None
    rate = weight_bytes * PROMPT_LEN / summary.ttft_s.p50  # bf16: as many operations as bytes, for each token
    return {
        "tokens": PROMPT_LEN,
        "ttft_ms": 1000 * summary.ttft_s.p50,
        "gflop_s": rate / 1e9,
        "product_gflop_s": max(products) / 1e9,
        "of_limit": rate / max(products),
    }


def measure(*, layers: int, hidden: int, output_len: int) -> dict[str, Any]:
    rate = read_rate()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-step-") as folder:
        weight_bytes = write_model(Path(folder), layers=layers, hidden=hidden)
        with tandem_up("--unified", "--model-path", folder) as cluster:
            rates = [rate]
            for batch in BATCHES:
                shape = {"num_requests": batch, "concurrency": batch, "input_len": INPUT_LEN, "output_len": output_len}
                (summary,) = load(url=cluster.url, prompt="ids", warmup=1, **shape)
                assert summary.itl_s is not None
                rates.append(read_rate(3))
                rows.append({"batch": batch, "step_ms": 1000 * summary.itl_s.p50, "tok_s": summary.output_tokens_per_s})
            first = prefill(cluster.url, weight_bytes=weight_bytes)
    limit_ms = 1000 * weight_bytes / max(rates)
    return {
        "weight_gb": weight_bytes / 1e9,
        "read_gb_s": max(rates) / 1e9,
        "read_gb_s_median": median(rates) / 1e9,
        "limit_ms": limit_ms,
        "rows": [row | {"of_limit": limit_ms / row["step_ms"]} for row in rows],
        "prefill": first,
    }


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    rows = [
        [
            str(r["batch"]),
            f"{r['step_ms']:.1f}",
            f"{result['limit_ms']:.1f}",
            f"{100 * r['of_limit']:.0f} %",
            f"{r['tok_s']:.0f}",
        ]
        for r in result["rows"]
    ]
    text = table(["batch", "step p50, ms", "limit, ms", "of the limit", "output tok/s"], rows)
    first = result["prefill"]
    return (
        f"{result['weight_gb']:.2f} GB of weights, one thread reads {result['read_gb_s']:.1f} GB/s\n\n{text}\n\n"
        f"A prompt of {first['tokens']} tokens alone: first token after {first['ttft_ms']:.0f} ms, {first['gflop_s']:.0f} "
        f"GFLOP/s in the layers' products, {100 * first['of_limit']:.0f} % of the {first['product_gflop_s']:.0f} GFLOP/s "
        f"of a {MATRIX} x {MATRIX} bf16 product on one thread."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = measure(layers=args.layers, hidden=args.hidden, output_len=args.output_len)
    result = {"environment": environment.describe(), **found}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
