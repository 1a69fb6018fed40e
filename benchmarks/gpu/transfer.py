"""KV pages from one process to another on the same GPU (benchmarks/transfer.py), and the memory of a peer that was killed.

Without MPS two processes take turns on a GPU, so figures of other work beside them would mean nothing. At the small size the same
goes over host memory.
"""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.target import QWEN3_8B, Target
from benchmarks.transfer import PAGE_SIZE, copy_pages, process_pair, scattered

REPEATS = 5
PAGES_OF_THE_DEAD = 512
WATCHED_S, LOOK_EVERY_S = 5.0, 0.05  # what of their memory comes back
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


def restart(target: Target) -> dict[str, Any]:
    """Kill a peer, and see how much of its memory comes back while the process that wrote into it lives on, and when.

    UCX maps a peer's whole pool by CUDA IPC, and the driver keeps memory that is mapped anywhere (openucx/ucx#11753). So each
    setting of UCX's cache, that of workers and UCX's own, has a process of its own, which sends once and kills its peer.
    """
    sizes = target.device, *target.pick((4096, PAGE_BYTES), (2 * PAGES_OF_THE_DEAD + 2, 4096))
    found = []
    for cache in target.pick(("", "y"), ("",)):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(_lose_a_peer, cache, *sizes).result())
    return {**found[0], "ucx_default": found[1:]}


def _lose_a_peer(cache: str, device: torch.device, num_pages: int, page_bytes: int) -> dict[str, float]:
    if cache:
        os.environ["UCX_CUDA_IPC_CACHE"] = cache
    free: list[int] = []
    sizes = {"num_pages": num_pages, "page_bytes": page_bytes, "device": device}
    with process_pair("nixl", **sizes, before_peer=lambda: free.append(_free_bytes(device))) as pair:
        (before,) = free
        pair.send(*scattered(PAGES_OF_THE_DEAD))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the comparison of bytes took is this process's own
        pair.child.kill()
        pair.child.join()
        killed_at = time.monotonic()
        lost, back_s = before - _free_bytes(device), 0.0
        while lost > 0 and time.monotonic() < killed_at + WATCHED_S:
            time.sleep(LOOK_EVERY_S)
            now = before - _free_bytes(device)
            if now < lost:
                lost, back_s = now, time.monotonic() - killed_at
    return {"peer_gb": num_pages * page_bytes / 1e9, "lost_gb": lost / 1e9, "back_s": back_s}


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return 0  # memory of a killed process on a CPU is back when it is gone
