"""KV of 8 bits beside bf16 in one run, on a CPU: attention of a decode step at long contexts, and of a chunk of a prompt.

usage: python -m benchmarks.kv_dtype [--layers 28] [--rounds 5] [--threads 1] [--contexts 1024 4096 16384] [--output FILE]

Heads of a 0.6B model: 16 of 128 over 8 kv heads. Pages are scattered over a pool that is larger than the caches. The least CPU time of
the rounds, in which both take turns: a busy machine disturbs that less.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deploy.bench import environment
from deploy.bench.report import table
from engine.attention.cpu_backend import CpuBackend
from engine.kernels.paged_decode import make_paged_decode
from engine.kernels.paged_extend import make_paged_extend
from engine.kernels.softmax import plain_softmax
from engine.kv.cache_spec import CacheSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

HEADS, KV_HEADS, DIM, PAGE_SIZE, CHUNK = 16, 8, 128, 16, 512


class Reader:
    """A request of `context` tokens in a pool of its own, the last `rows` of them new."""

    def __init__(self, *, fp8: bool, context: int, rows: int, layers: int) -> None:
        pages = -(-context // PAGE_SIZE)
        spec = CacheSpec(num_kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16", fp8=fp8)
        self.pool = KVPool([spec] * layers, num_pages=pages, page_size=PAGE_SIZE, device="cpu")
        kernel = make_paged_decode(self.pool) if rows == 1 else make_paged_extend(self.pool)
        assert kernel is not None and CpuBackend(self.pool).has_kernel, "no C kernel here"
        self._kernel = kernel
        order = (torch.randperm(pages, generator=torch.Generator().manual_seed(0)) + 1).int()[None]
        all_tokens = torch.arange(context)
        k, v = torch.randn(2, context, KV_HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
        for layer in range(layers):
            self.pool.write(layer, order[0, all_tokens // PAGE_SIZE].long(), all_tokens % PAGE_SIZE, k, v)
        at = all_tokens[-rows:]
        self._step = StepBatch(
            extend=rows > 1,
            q_lens=[rows],
            kv_lens=[context],
            page_table=order,
            slots=torch.zeros(1, dtype=torch.int64),
            token_pages=order[0, at // PAGE_SIZE].long(),
            token_offsets=at % PAGE_SIZE,
        )
        self._q = torch.randn(rows, HEADS, DIM).bfloat16()
        self._k, self._v = k[-rows:], v[-rows:]

    def read(self) -> None:
        self._kernel.begin(self._step)
        for layer in range(self.pool.num_layers):
            self._kernel.attend_turned(layer, self._q, self._k, self._v, plain_softmax(DIM))


def times(ways: list[Callable[[], None]], rounds: int) -> list[float]:
    """Least CPU seconds of a thread, the ways in turns."""
    best = [float("inf")] * len(ways)
    for _ in range(rounds):
        for i, way in enumerate(ways):
            begin = time.process_time()
            way()
            best[i] = min(best[i], (time.process_time() - begin) / torch.get_num_threads())
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 28), ("rounds", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {"environment": environment.describe(), "rows": measure(args)}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for new in (1, CHUNK):
        layers = args.layers if new == 1 else 1
        for context in args.contexts:
            readers = [Reader(fp8=fp8, context=context, rows=new, layers=layers) for fp8 in (False, True)]
            bf16, fp8 = times([reader.read for reader in readers], args.rounds)
            rows.append({"new": new, "context": context, "bf16_ms": 1000 * bf16, "fp8_ms": 1000 * fp8})
    return rows


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    return table(
        ["new tokens of all", "bf16, ms", "fp8, ms", "times as fast"],
        [
            [
                f"{r['new']} of {r['context']}",
                f"{r['bf16_ms']:.2f}",
                f"{r['fp8_ms']:.2f}",
                f"{r['bf16_ms'] / r['fp8_ms']:.2f}",
            ]
            for r in result["rows"]
        ],
    )


if __name__ == "__main__":
    main()
