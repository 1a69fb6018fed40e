"""KV pages from one process to another on the same GPU, through both managers and an engine, beside a copy within the device.

Two processes, as a prefill and a decode worker are; without MPS they take turns on the GPU, so figures of other work
beside them would mean nothing. NIXL moves the GPU's memory by UCX's cuda_ipc, where its wheel and this machine allow; Mooncake by
its transport `nvlink_intra`, and the metadata row crosses the control plane. What arrives is compared with what was sent. At the
small size the same goes over host memory.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.target import QWEN3_8B, Target
from benchmarks.transfer_rate import AUX_BYTES, receive, say, until
from transfer_backends.contract import KVArgs, Region, Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager

ROOT = Path(__file__).resolve().parents[2]
PAGE_SIZE = 16
REPEATS = 5
CHILD_WAIT_S = 20.0
PAGES_OF_THE_DEAD = 512
WATCHED_S, LOOK_EVERY_S = 5.0, 0.05  # what of their memory comes back


class DeviceMemory:
    """A KV pool on a device, and a metadata row on the host, as workers have them."""

    def __init__(self, *, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self.pool = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
        self.row = np.zeros(AUX_BYTES, np.uint8)
        if device.type == "cuda":
            torch.cuda.synchronize()  # zeroed on a stream; a peer's write knows no stream
        ordinal = device.index or 0 if device.type == "cuda" else None
        self.args = KVArgs(
            Region(self.pool.data_ptr(), num_pages, page_bytes, ordinal),
            Region(self.row.ctypes.data, 1, AUX_BYTES, None),
            signature="gpu-check",
            page_size=PAGE_SIZE,
            dtype="uint8",
        )

    def digest(self, pages: list[int]) -> int:
        """Depends on every byte of `pages` and on where it lies in a page, and on the metadata row."""
        rows = self.pool[torch.tensor(pages, device=self.pool.device)].view(torch.int32).to(torch.int64)
        weights = torch.arange(1, rows.shape[1] + 1, device=rows.device) % 8191
        return int((rows * weights).sum(1).cumsum(0).sum()) + int(self.row @ np.arange(len(self.row)))


def engine_of(backend: str, memory: DeviceMemory) -> Engine:
    device = memory.args.kv.device
    protocol = "auto" if device is None else "nvlink_intra"
    return make_engine(backend, device=device, mooncake_protocol=protocol)


def measure_mooncake(target: Target) -> dict[str, Any]:
    return measure(target, backend="mooncake", sizes=(8192,))


def measure(target: Target, *, backend: str = "nixl", sizes: tuple[int, ...] = (1024, 8192, 32768)) -> dict[str, Any]:
    """`sizes`: tokens of a prompt, where the target is no small one."""
    shape = QWEN3_8B
    page_bytes = target.pick(shape.layers * 2 * shape.kv_heads * shape.head_dim * 2 * PAGE_SIZE, 4096)
    found: dict[str, Any] = {"page_bytes": page_bytes, "rows": []}
    for tokens in target.pick(sizes, (64,)):
        found["rows"].append(_row(target, backend, num_send=tokens // PAGE_SIZE, page_bytes=page_bytes))
        print(json.dumps(found["rows"][-1]), flush=True)
    found["tcp_or_host"] = (
        "a rate far under the copy's says that the engine goes by way of the host: CUDA IPC is not there"
    )
    return found


def _row(target: Target, backend: str, *, num_send: int, page_bytes: int) -> dict[str, Any]:
    num_pages = 2 * num_send + 2
    memory = DeviceMemory(num_pages=num_pages, page_bytes=page_bytes, device=target.device)
    memory.pool.random_(0, 255)
    memory.row[:] = np.arange(AUX_BYTES) % 251
    target.sync()
    copy_ms = _copy_ms(target, memory, num_send)
    manager = PrefillManager(memory.args, engine_of(backend, memory), TransferConfig())
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    manager.start()
    child = start_peer(manager, memory, target.device, backend=backend)
    try:
        times = [
            send(manager, memory, child, changed, room=room, num_send=num_send)
            for room in range(1, target.pick(REPEATS + 2, 2))
        ]
        (path,) = manager.paths
    finally:
        end_peer(child)
        manager.close()
    size = num_send * page_bytes
    seconds = median(times[1:] or times)  # the first maps the peer's memory
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
    page_bytes = target.pick(QWEN3_8B.layers * 2 * QWEN3_8B.kv_heads * QWEN3_8B.head_dim * 2 * 16, 4096)
    num_pages = target.pick(4096, 2 * PAGES_OF_THE_DEAD + 2)
    first, *others = (
        _in_a_process(target, cache, num_pages=num_pages, page_bytes=page_bytes)
        for cache in target.pick(("", "y"), ("",))
    )
    return {**first, "ucx_default": others}


def _in_a_process(target: Target, cache: str, *, num_pages: int, page_bytes: int) -> dict[str, Any]:
    env = {**os.environ, **({"UCX_CUDA_IPC_CACHE": cache} if cache else {})}
    argv = [
        sys.executable,
        "-m",
        __spec__.name,
        "--kill",
        "--num-pages",
        str(num_pages),
        "--page-bytes",
        str(page_bytes),
    ]
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
        send(manager, memory, peer, changed, room=1, num_send=PAGES_OF_THE_DEAD)
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
    return {"peer_gb": num_pages * page_bytes / 1e9, "lost_gb": lost / 1e9, "back_s": back_s}


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return 0  # memory of a killed process on a CPU is back when it is gone


def start_peer(
    manager: PrefillManager, memory: DeviceMemory, device: torch.device, *, backend: str
) -> "subprocess.Popen[str]":
    """Start the decode process, with a pool of the same size."""
    num_pages, page_bytes = memory.pool.shape
    argv = [
        sys.executable,
        "-m",
        "benchmarks.gpu.transfer",
        "--num-pages",
        str(num_pages),
        "--page-bytes",
        str(page_bytes),
    ]
    argv += ["--control", manager.control_address, "--incarnation", manager.incarnation, "--device", str(device)]
    argv += ["--backend", backend]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _copy_ms(target: Target, memory: DeviceMemory, num_send: int) -> float:
    """The same pages, to another place in this process's memory."""
    src, dst = (torch.tensor(pages, device=target.device) for pages in _pages(num_send))
    pool = memory.pool.view(torch.int64)  # words: a gather of bytes is several times slower
    goal = torch.empty_like(pool)
    return target.ms(lambda: goal.index_copy_(0, dst, pool.index_select(0, src)), repeats=5)


def _pages(num_send: int) -> tuple[list[int], list[int]]:
    """Odd ids in random order: no two pages adjoin."""
    draw = np.random.default_rng(1)
    src, dst = ((2 * draw.permutation(num_send) + 1).tolist() for _ in range(2))
    return src, dst


def send(
    manager: PrefillManager,
    memory: DeviceMemory,
    child: "subprocess.Popen[str]",
    changed: threading.Event,
    *,
    room: int,
    num_send: int,
) -> float:
    """Send `num_send` scattered pages; return the seconds from `send` to Success on the other side."""
    src, dst = _pages(num_send)
    sender = manager.sender(room)
    _ask(child, room=room, pages=dst)
    assert _answer(child)["provided"]
    until(lambda: sender.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), changed, what="indices")
    assert sender.poll() is KVPoll.WaitingForInput, sender.failure()
    begin = time.monotonic()
    sender.send(src, start=0, metadata_row=0)
    seconds = float(_answer(child)["success_at"]) - begin
    until(lambda: sender.poll() is KVPoll.Success and sender.released(), changed, what="release")
    sender.close()
    found = _answer(child)["digest"]
    if found != memory.digest(src):
        raise AssertionError("other bytes arrived than were sent")
    return seconds


def _ask(child: "subprocess.Popen[str]", **command: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(command) + "\n")
    child.stdin.flush()


def _answer(child: "subprocess.Popen[str]") -> dict[str, Any]:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("the decode process ended; its error stands above")
    return dict(json.loads(line))


def end_peer(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(timeout=CHILD_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main() -> None:
    """Run the decode process, which receives what stdin names until it ends; or with --kill one of `restart`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--device", type=torch.device)
    for name in ("--control", "--incarnation", "--backend"):
        parser.add_argument(name)
    for name in ("--num-pages", "--page-bytes"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    sizes = {"num_pages": args.num_pages, "page_bytes": args.page_bytes}
    if args.kill:
        print(json.dumps(_kill_and_watch(args.device, **sizes)))
        return
    memory = DeviceMemory(device=args.device, **sizes)
    route = Route(control=args.control, incarnation=args.incarnation)
    manager = DecodeManager(memory.args, engine_of(args.backend, memory), TransferConfig(), lookup=lambda *_: route)
    manager.start()
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    for line in sys.stdin:
        command = json.loads(line)
        receive(manager, changed, command["room"], command["pages"])
        say(digest=memory.digest(command["pages"]))
    manager.close()


if __name__ == "__main__":
    main()
