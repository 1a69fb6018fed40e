"""Decode steps of a random model in a process of their own, for benchmarks/neighbour.py: each line of stdin asks for some seconds.

usage: python -P benchmarks/neighbour_steps.py FOLDER THREADS TOKENS   (run by its path: PYTHONPATH names the checkout that is measured)

Each line of stdin is JSON {"batch": rows, "seconds": how long}; the answer is one line {"steps", "wall_s", "cpu_s", "median_ms", "best_ms"}.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from engine.attention.cpu_backend import CpuBackend
from engine.executor.decode_tapes import DecodeTapes
from engine.kernels.linear import linear_kernel
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model

PAGE_SIZE = 16
WARM_UP = 3  # a tape is recorded beside the first step and checked beside the second


class DecodeBatch(NamedTuple):
    """A decode step of requests whose KV is there. `positions` [batch]: of the tokens that it computes."""

    backend: CpuBackend
    step: StepBatch
    positions: torch.Tensor


def decode_batch(
    model: DenseDecoder, batch: int, *, tokens: int, order: Callable[[int], torch.Tensor] = torch.randperm
) -> DecodeBatch:
    """`batch` requests with `tokens` in the cache. `order`: of their pages in memory."""
    pages = -(-tokens // PAGE_SIZE)
    pool = KVPool(model.cache_specs(), num_pages=batch * pages, page_size=PAGE_SIZE, device="cpu")
    pool.buffer.zero_()  # memory that was never written is no memory yet
    table = (order(batch * pages) + 1).int().reshape(batch, pages)
    positions = torch.full((batch,), tokens - 1)
    step = StepBatch(
        extend=False,
        q_lens=[1] * batch,
        kv_lens=[tokens] * batch,
        page_table=table,
        slots=torch.arange(batch),
        token_pages=table[:, -1].long(),
        token_offsets=positions % PAGE_SIZE,
    )
    return DecodeBatch(CpuBackend(pool), step, positions)


def make_step(model: DenseDecoder, batch: int, *, tokens: int) -> Callable[[], Any]:
    """A decode step of `batch` requests with `tokens` in the cache, to its tokens."""
    backend, step, positions = decode_batch(model, batch, tokens=tokens)
    ids = torch.arange(batch)
    forward = partial(DecodeTapes().forward, model) if linear_kernel() is not None else model.forward

    def one() -> Any:
        backend.begin(step)
        logits = model.logits(forward(ids, positions, backend.attend))
        assert logits is not None
        return logits.argmax(dim=-1).tolist()

    for _ in range(WARM_UP):
        one()
    return one


def run_for(seconds: float, step: Callable[[], Any]) -> dict[str, float]:
    """Steps for so long; CPU time is that of all threads here."""
    took: list[float] = []
    begin, begin_cpu = time.perf_counter(), time.process_time()
    wall = 0.0
    while wall < seconds:
        now = time.perf_counter()
        step()
        took.append(time.perf_counter() - now)
        wall = time.perf_counter() - begin
    cpu = time.process_time() - begin_cpu
    return {
        "steps": len(took),
        "wall_s": wall,
        "cpu_s": cpu,
        "median_ms": 1000 * median(took),
        "best_ms": 1000 * min(took),
    }


def main() -> None:
    folder, threads, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    steps: dict[int, Callable[[], Any]] = {}
    with torch.inference_mode():
        model = load_model(folder, load_model_config(folder), dtype="bfloat16", device="cpu", progress=False)
        for line in sys.stdin:
            asked = json.loads(line)
            batch = asked["batch"]
            if batch not in steps:
                steps[batch] = make_step(model, batch, tokens=tokens)
            print(json.dumps(run_for(asked["seconds"], steps[batch])), flush=True)


if __name__ == "__main__":
    main()
