"""KV pages from one process to another on the same GPU (benchmarks/transfer.py).

Without MPS two processes take turns on a GPU, so figures of other work beside them would mean nothing. At the small size the same
goes over host memory.
"""

import json
from statistics import median
from typing import Any

from benchmarks.gpu.target import QWEN3_8B, Target
from benchmarks.transfer import PAGE_SIZE, copy_pages, process_pair, scattered

REPEATS = 5
PAGE_BYTES = QWEN3_8B.layers * 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim * 2 * PAGE_SIZE


def measure_mooncake(target: Target) -> dict[str, Any]:
    return measure(target, backend="mooncake", sizes=(8192,))


def measure(target: Target, *, backend: str = "nixl", sizes: tuple[int, ...] = (1024, 8192, 32768)) -> dict[str, Any]:
    """`sizes`: tokens of a prompt, where the target is no small one. A rate far under the copy's goes by way of the host."""
    page_bytes = target.pick(PAGE_BYTES, 4096)
    rows = []
    for tokens in target.pick(sizes, (64,)):
        rows.append(_row(target, backend, count=tokens // PAGE_SIZE, page_bytes=page_bytes))
        print(json.dumps(rows[-1]), flush=True)
    return {"page_bytes": page_bytes, "rows": rows}


def _row(target: Target, backend: str, *, count: int, page_bytes: int) -> dict[str, Any]:
    sizes = {"num_pages": 2 * count + 2, "page_bytes": page_bytes, "device": target.device}
    with process_pair(backend, **sizes) as pair:
        pair.memory.fill()
        copy_ms = target.ms(lambda: copy_pages(pair.memory, count), repeats=5)
        times = [pair.send(*scattered(count))["s"] for _ in range(target.pick(REPEATS + 1, 1))]
        (path,) = pair.manager.paths
    size, seconds = count * page_bytes, median(times[1:] or times)  # the first maps the peer's memory
    return {
        "bytes": size,
        "mb": size / 1e6,
        "ms": 1000 * seconds,
        "first_ms": 1000 * times[0],
        "transport": path.transport,
        "trial_gb_s": path.bytes_a_s / 1e9,
        "gb_s": size / seconds / 1e9,
        "scattered_copy_gb_s": size / copy_ms / 1e6,
        "of_scattered_copy": copy_ms / 1000 / seconds,
        # a copy's figure counts what it reads and what it writes
        "of_copy": target.share(2 * size / seconds / 1e9, "copy_gb_s"),
    }
