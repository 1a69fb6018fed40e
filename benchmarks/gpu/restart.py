"""Memory of a peer that was killed: how much of it comes back while the process that wrote into it lives on, and when.

UCX maps a peer's whole pool by CUDA IPC, and the driver keeps memory that is mapped anywhere (openucx/ucx#11753). So each
setting of UCX's cache has a process of its own, which sends once, kills its peer, and watches what is free.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.gpu.target import QWEN3_8B, Target
from benchmarks.gpu.transfer import ROOT, DeviceMemory, end_peer, engine_of, send, start_peer
from transfer_backends.contract import TransferConfig
from transfer_backends.prefill.manager import PrefillManager

NUM_SEND = 512
WATCHED_S = 5.0
LOOK_EVERY_S = 0.05
GB = 1e9


def measure(target: Target) -> dict[str, Any]:
    """Measure with the setting that workers have, and with UCX's own."""
    page_bytes = target.pick(QWEN3_8B.layers * 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim * 2 * 16, 4096)
    num_pages = target.pick(4096, 2 * NUM_SEND + 2)
    first, *others = (
        _in_a_process(target, cache, num_pages=num_pages, page_bytes=page_bytes)
        for cache in target.pick(("", "y"), ("",))
    )
    return {**first, "ucx_default": others}


def _in_a_process(target: Target, cache: str, *, num_pages: int, page_bytes: int) -> dict[str, Any]:
    env = {**os.environ, **({"UCX_CUDA_IPC_CACHE": cache} if cache else {})}
    argv = [sys.executable, "-m", __spec__.name, "--num-pages", str(num_pages), "--page-bytes", str(page_bytes)]
    argv += ["--device", str(target.device)]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"UCX_CUDA_IPC_CACHE={cache}: {done.stderr[-1000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _kill_and_watch(device: torch.device, *, num_pages: int, page_bytes: int) -> dict[str, Any]:
    memory = DeviceMemory(num_pages=num_pages, page_bytes=page_bytes, device=device)
    manager = PrefillManager(memory.args, engine_of("nixl", memory), TransferConfig())
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    manager.start()
    before = _free_bytes(device)
    peer = start_peer(manager, memory, device, backend="nixl")
    try:
        send(manager, memory, peer, changed, room=1, num_send=NUM_SEND)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the comparison of bytes took is this process's own
        peer.kill()
        peer.wait()
        killed_at = time.monotonic()
        lost, back_s = before - _free_bytes(device), 0.0
        while lost > 0 and time.monotonic() < killed_at + WATCHED_S:
            time.sleep(LOOK_EVERY_S)
            now = before - _free_bytes(device)
            if now < lost:
                lost, back_s = now, time.monotonic() - killed_at
    finally:
        end_peer(peer)
        manager.close()
    return {"peer_gb": num_pages * page_bytes / GB, "lost_gb": lost / GB, "back_s": back_s}


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return 0  # memory of a killed process on a CPU is back when it is gone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    for name in ("--num-pages", "--page-bytes"):
        parser.add_argument(name, required=True, type=int)
    args = parser.parse_args()
    print(json.dumps(_kill_and_watch(torch.device(args.device), num_pages=args.num_pages, page_bytes=args.page_bytes)))


if __name__ == "__main__":
    main()
