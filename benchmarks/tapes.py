"""What decode tapes bring: the forward of a decode step kernel by kernel, and from a tape, in turns in one process.

usage: python -m benchmarks.tapes [--layers 28] [--hidden 1024] [--tokens 100] [--steps 40] [--threads 1 N] [--output FILE]

A random checkpoint with the layers of Qwen3-0.6B; both ways compute the same step over the same KV, and the bits of the
results are compared.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.neighbour_steps import decode_batch
from benchmarks.random_model import write_model
from deploy.bench import environment
from deploy.bench.report import table
from engine.executor.decode_tapes import DecodeTapes
from engine.model_files.model_config import load_model_config
from engine.models.decoder import DenseDecoder
from engine.models.load import load_model

BATCHES = (1, 8, 32)
WARM_UP = 2  # a tape is recorded beside the first step and checked beside the second


def measure(model: DenseDecoder, batch: int, *, tokens: int, steps: int, bar: "tqdm[Any]") -> dict[str, float]:
    """Medians of `steps` forwards each way, of `batch` requests with `tokens` in the cache."""
    backend, step, positions = decode_batch(model, batch, tokens=tokens)
    ids, tapes = torch.arange(batch), DecodeTapes()
    assert tapes is not None, "no C kernels here"
    plain_s, taped_s = [], []
    for _ in range(steps + WARM_UP):
        backend.begin(step)
        begin = time.perf_counter()
        expected = model.forward(ids, positions, backend.attend)
        middle = time.perf_counter()
        found = tapes.forward(model, ids, positions, backend.attend)
        taped_s.append(time.perf_counter() - middle)
        plain_s.append(middle - begin)
        assert torch.equal(found, expected), "a tape gave other bits"
        bar.update()
    return {"plain_ms": 1000 * median(plain_s[WARM_UP:]), "taped_ms": 1000 * median(taped_s[WARM_UP:])}


def measure_all(threads: Sequence[int], *, layers: int, hidden: int, tokens: int, steps: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="tandem-tapes-") as folder, torch.inference_mode():
        write_model(Path(folder), layers=layers, hidden=hidden)
        config = load_model_config(folder)
        torch.set_num_threads(max(threads))
        model = load_model(folder, config, dtype="bfloat16", device="cpu", progress=False)
        with tqdm(total=len(threads) * len(BATCHES) * (steps + WARM_UP), unit="step", disable=None) as bar:
            for count in threads:
                torch.set_num_threads(count)
                for batch in BATCHES:
                    found = measure(model, batch, tokens=tokens, steps=steps, bar=bar)
                    rows.append({"threads": count, "batch": batch, **found})
    return rows


def render(result: dict[str, Any]) -> str:
    """The table of a result (benchmarks/report.py uses it too)."""
    rows = [
        [
            str(r["threads"]),
            str(r["batch"]),
            f"{r['plain_ms']:.1f}",
            f"{r['taped_ms']:.1f}",
            f"{r['plain_ms'] / r['taped_ms']:.2f}",
        ]
        for r in result["rows"]
    ]
    return table(["threads", "batch", "kernel by kernel, ms", "from a tape, ms", "times as fast"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=100, help="of each request in the cache")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = measure_all(args.threads, layers=args.layers, hidden=args.hidden, tokens=args.tokens, steps=args.steps)
    result = {"environment": environment.describe(), "rows": rows}
    print(render(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
