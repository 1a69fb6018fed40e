"""Attention on this CPU, the C kernels and the torch path: decode against the bandwidth this machine reads at,
prompts by their rate of operations.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_attention [--threads N] [--repeats N] [--output FILE]

Prints JSON: per case the time of one layer in ms and the KV bytes read, or the operations done (masked ones not counted),
in a second, with the hardware, the command and the commit. Times are the least of the repeats: the machine may be shared.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from engine.attention.base import AttentionBackend
from engine.attention.cpu_backend import CpuBackend
from engine.attention.torch_backend import TorchBackend
from engine.kv.cache_spec import FullAttentionSpec
from engine.kv.kv_pool import KVPool
from engine.kv.step_batch import StepBatch

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 8, 128, 16  # Qwen3-0.6B
CASES = [(1, 512), (1, 8192), (8, 512), (16, 512), (64, 512), (16, 2048)]  # batch, tokens of each request
DTYPES = ("bfloat16", "float32")
# prompts: requests, cached tokens and new tokens of each
PROMPTS = [(1, 0, 64), (1, 0, 1024), (8, 0, 1024), (1, 1024, 1024), (1, 7168, 1024), (16, 768, 32)]


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    bandwidth = _read_bandwidth(args.repeats)
    cases = [(batch, tokens, dtype) for dtype in DTYPES for batch, tokens in CASES]
    rows = [_case(*case, repeats=args.repeats) for case in tqdm(cases, unit="case", file=sys.stderr)]
    prompts = [_prompts(*case, repeats=args.repeats) for case in tqdm(PROMPTS, unit="case", file=sys.stderr)]
    report = {**_provenance(), "threads": args.threads, "read_gb_s": bandwidth, "cases": rows, "prompts": prompts}
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each case; the least time counts")
    parser.add_argument("--output", help="also write the JSON here")
    return parser.parse_args()


def _case(batch: int, tokens: int, dtype: str, *, repeats: int) -> dict[str, float | int | str]:
    spec = FullAttentionSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    pages = -(-tokens // PAGE_SIZE)
    pool = KVPool([spec], num_pages=batch * pages, page_size=PAGE_SIZE, device="cpu")
    pool.k(0).normal_()
    pool.v(0).normal_()
    step = _step(batch, tokens, pages)
    read_bytes = batch * tokens * spec.bytes_per_token()
    kernel = _time(CpuBackend(pool), step, dtype, repeats)
    fallback = _time(TorchBackend(pool), step, dtype, repeats)
    return {
        "dtype": dtype,
        "batch": batch,
        "tokens": tokens,
        "kv_mb": round(read_bytes / 1e6, 1),
        "c_ms": round(kernel * 1e3, 3),
        "torch_ms": round(fallback * 1e3, 3),
        "c_gb_s": round(read_bytes / kernel / 1e9, 1),
        "torch_gb_s": round(read_bytes / fallback / 1e9, 1),
        "speedup": round(fallback / kernel, 1),
    }


def _prompts(requests: int, cached: int, new: int, *, repeats: int) -> dict[str, float | int]:
    spec = FullAttentionSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16")
    pages = -(-(cached + new) // PAGE_SIZE)
    pool = KVPool([spec], num_pages=requests * pages, page_size=PAGE_SIZE, device="cpu")
    pool.k(0).normal_()
    pool.v(0).normal_()
    step = _step(requests, cached + new, pages, new=new)
    kernel, fallback = (_time(backend(pool), step, "bfloat16", repeats) for backend in (CpuBackend, TorchBackend))
    operations = 4 * HEADS * HEAD_DIM * requests * sum(range(cached + 1, cached + new + 1))
    return {
        "requests": requests,
        "cached": cached,
        "new": new,
        "c_ms": round(kernel * 1e3, 3),
        "torch_ms": round(fallback * 1e3, 3),
        "c_gflop_s": round(operations / kernel / 1e9),
        "torch_gflop_s": round(operations / fallback / 1e9),
        "speedup": round(fallback / kernel, 1),
    }


def _step(batch: int, tokens: int, pages: int, *, new: int = 1) -> StepBatch:
    """The last `new` tokens of `batch` requests of `tokens` each."""
    table = (1 + torch.randperm(batch * pages)).to(torch.int32).view(batch, pages)
    positions = torch.arange(tokens - new, tokens)
    return StepBatch(
        extend=new > 1,
        q_lens=[new] * batch,
        kv_lens=[tokens] * batch,
        page_table=table,
        positions=positions.repeat(batch),
        token_pages=table[:, positions // PAGE_SIZE].long().flatten(),
        token_offsets=(positions % PAGE_SIZE).repeat(batch),
    )


def _time(backend: AttentionBackend, step: StepBatch, dtype: str, repeats: int) -> float:
    q, k, v = (
        torch.randn(len(step.positions), h, HEAD_DIM).to(getattr(torch, dtype)) for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    backend.begin(step)
    return _least(lambda: backend.attend(0, q, k, v), repeats)


def _least(call: Callable[[], object], repeats: int) -> float:
    """Least seconds of one call."""
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _read_bandwidth(repeats: int) -> dict[str, float]:
    """GB/s of summing an array: what reading costs at best, from DRAM and from the shared cache."""
    sizes = {"1GiB": 1 << 30, "32MiB": 32 << 20}
    arrays = {name: torch.zeros(size // 4) for name, size in sizes.items()}
    return {name: round(sizes[name] / _least(arrays[name].sum, repeats) / 1e9, 1) for name in sizes}


def _provenance() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join(["python -m benchmarks.cpu_attention", *sys.argv[1:]]),
        "commit": commit,
        "cpu": _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()


if __name__ == "__main__":
    main()
