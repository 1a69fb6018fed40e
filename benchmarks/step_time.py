"""Measures what an engine's threads reach: decode against the memory's bandwidth, prefill against the rate of a matrix product.

A unified worker serves a random checkpoint, once with one thread and once with all cores. With N requests in flight from start to end, the
gap between two tokens of a request is one step of a batch of N, with everything a user pays for: scheduler, sampler, text, HTTP. The limit
is (bytes of the weights, and of the KV that the batch has in the middle of its answers) / (bytes per second that as many threads read from
memory, in huge pages), measured in the same run.

Prefill is the first token of a lone prompt. Its rate counts the layers' products alone (2 operations for each weight and token; attention
comes on top), against torch's bf16 product of two 2048 x 2048 matrices on as many threads in the same run.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.cluster import Cluster, load, tandem_up
from benchmarks.measures import Row, Tables, tell
from benchmarks.random_model import HEAD_DIM, KV_HEADS, write_model

BATCHES = (1, 8, 32)
INPUT_LEN = 64
READ_BYTES = 1 << 30
PROMPT_LEN = 1024
PROMPTS = 4
MATRIX = 2048


def measure(*, layers: int = 28, hidden: int = 1024, output_len: int = 48, threads: Sequence[int] = ()) -> Tables:
    """`threads`: numbers of threads of a worker; (): one, and all cores."""
    steps, prompts = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory(prefix="tandem-step-") as folder:
        weight_bytes = write_model(Path(folder), layers=layers, hidden=hidden)
        token_bytes = layers * 2 * KV_HEADS * HEAD_DIM * 2  # K and V, bf16
        for count in threads or sorted({1, os.cpu_count() or 1}):
            with tandem_up("--unified", "--model-path", folder, "--num-threads", str(count)) as cluster:
                steps += _steps(cluster, count, weight_bytes, token_bytes, output_len)
                prompts.append(_prefill(cluster, count, weight_bytes))
    return {
        f"{weight_bytes / 1e9:.2f} GB of weights.": steps,
        f"Prompts of {PROMPT_LEN} tokens, each alone:": prompts,
    }


def _steps(cluster: Cluster, threads: int, weight_bytes: int, token_bytes: int, output_len: int) -> list[Row]:
    rates, found = [read_rate(threads)], []
    for batch in BATCHES:
        shape = {"num_requests": batch, "concurrency": batch, "input_len": INPUT_LEN, "output_len": output_len}
        (summary,) = load(url=cluster.url, prompt="ids", warmup=1, **shape)
        assert summary.itl_s is not None
        rates.append(read_rate(threads, 3))
        found.append((batch, 1000 * summary.itl_s.p50, summary.output_tokens_per_s))
        tell(f"batch {batch}", threads=threads, step_ms=found[-1][1])
    rows: list[Row] = []
    for batch, step_ms, tokens_s in found:
        limit_ms = 1000 * (weight_bytes + batch * (INPUT_LEN + output_len // 2) * token_bytes) / max(rates)
        row: Row = {"threads": threads, "read, GB/s": max(rates) / 1e9, "batch": batch, "step p50, ms": step_ms}
        share = f"{100 * limit_ms / step_ms:.0f} %"
        rows.append(row | {"limit, ms": limit_ms, "of the limit": share, "output tok/s": tokens_s})
    return rows


def _prefill(cluster: Cluster, threads: int, weight_bytes: int) -> Row:
    products = [product_rate(threads)]
    shape = {"num_requests": PROMPTS, "concurrency": 1, "input_len": PROMPT_LEN, "output_len": 1}
    (summary,) = load(url=cluster.url, prompt="ids", warmup=1, **shape)
    products.append(product_rate(threads))
    assert summary.ttft_s is not None
    rate = weight_bytes * PROMPT_LEN / summary.ttft_s.p50  # bf16: as many operations as bytes, for each token
    return {
        "threads": threads,
        "first token, ms": 1000 * summary.ttft_s.p50,
        "GFLOP/s in the layers' products": rate / 1e9,
        f"of a {MATRIX} x {MATRIX} product": max(products) / 1e9,
        "share": f"{100 * rate / max(products):.0f} %",
    }


def read_rate(threads: int, repeats: int = 7) -> float:
    """Bytes per second that so many threads read from memory together: the best of several passes over 1 GiB.

    Two kinds of pass in turns: which one keeps more reads in flight depends on the CPU.
    """
    data = np.ones(READ_BYTES // 8, np.int64)
    parts = np.array_split(data, threads)
    with ThreadPoolExecutor(threads) as pool:  # numpy drops the GIL
        best_s = min(
            _time_of(lambda one_pass=one_pass: list(pool.map(one_pass, parts)))  # type: ignore[misc]
            for _ in range(repeats)
            for one_pass in (np.bitwise_or.reduce, np.maximum.reduce)
        )
    return data.nbytes / best_s


def product_rate(threads: int) -> float:
    """Operations per second of a bf16 matrix product on so many threads: the best of several."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(MATRIX, MATRIX).bfloat16() for _ in range(2))
    best_s = min(_time_of(lambda: a @ b) for _ in range(7))
    return 2 * MATRIX**3 / best_s


def _time_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
