"""Moves KV pages from one process to another through both managers and an engine, on host memory or on a GPU; measures the first.

Two processes, as a prefill and a decode worker are. Timed is a whole transfer, from `sender.send` to `receiver.poll() == Success` in the
other process (one monotonic clock on one machine). What arrives is compared with what was sent. NIXL moves a GPU's memory by UCX's
cuda_ipc, Mooncake by its transport `nvlink_intra`; the metadata row lies on the host.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import torch

from benchmarks.measures import Row, Tables, medians, tell
from transfer_backends.contract import KVArgs, Region, Route, SourcePages, TargetPages, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.ports import Engine
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.sides import KVPoll

AUX_BYTES = 4096
PAGE_SIZE = 16
WAIT_S, END_S = 60.0, 20.0
MIB = 1 << 20


class Memory:
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
            signature="benchmark",
            page_size=PAGE_SIZE,
            dtype="uint8",
        )

    def fill(self) -> None:
        """Write noise, so that every page is mapped and has bytes of its own."""
        self.pool.random_(0, 255)
        self.row[:] = np.arange(AUX_BYTES) % 251
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()

    def digest(self, pages: Sequence[int]) -> int:
        """Depends on every byte of `pages` and on where it lies in a page, and on the metadata row."""
        rows = self.pool[torch.tensor(pages, device=self.pool.device)].view(torch.int32).to(torch.int64)
        weights = torch.arange(1, rows.shape[1] + 1, device=rows.device) % 8191
        return int((rows * weights).sum(1).cumsum(0).sum()) + int(self.row @ np.arange(len(self.row)))

    def engine(self, backend: str) -> Engine:
        device = self.args.kv.device
        return make_engine(backend, device=device, mooncake_protocol="auto" if device is None else "nvlink_intra")


def until(done: Callable[[], bool], changed: threading.Event, *, what: str) -> None:
    """Look again whenever `changed` is set; raises TimeoutError after `WAIT_S`."""
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no end of: {what}")
        changed.wait(0.02)
        changed.clear()


# ---- the decode process


def receive(wire: Connection, backend: str, sizes: dict[str, Any], route: Route) -> None:
    """Receive the pages that come over `wire` as (room, pages), until it is closed."""
    memory = Memory(**sizes)
    manager = DecodeManager(memory.args, memory.engine(backend), TransferConfig(), lookup=lambda *_: route)
    manager.start()
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    with suppress(EOFError):
        while True:
            room, pages = wire.recv()
            receiver = manager.receiver(room, bootstrap="bench:1")
            until(lambda: receiver.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), changed, what="handshake")  # noqa: B023
            assert receiver.poll() is KVPoll.WaitingForInput, receiver.failure()
            receiver.provide(TargetPages(pages, 0))
            wire.send("provided")
            until(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed), changed, what="transfer")  # noqa: B023
            assert receiver.poll() is KVPoll.Success, receiver.failure()
            wire.send((time.monotonic(), time.process_time()))
            receiver.close()
            wire.send(memory.digest(pages))
    manager.close()


# ---- the prefill process


@dataclass(slots=True)
class Pair:
    """The prefill side of two processes."""

    memory: Memory
    manager: PrefillManager
    child: SpawnProcess
    wire: Connection
    changed: threading.Event
    room: int = 0

    def send(self, src: Sequence[int], dst: Sequence[int]) -> dict[str, float]:
        """Send pages; return the seconds until Success on the other side, and how far the other side's CPU seconds are."""
        self.room += 1
        sender = self.manager.sender(self.room)
        self.wire.send((self.room, list(dst)))
        self._answer()
        until(lambda: sender.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), self.changed, what="indices")
        assert sender.poll() is KVPoll.WaitingForInput, sender.failure()
        begin_s = time.monotonic()
        sender.send(SourcePages(src, metadata_row=0))
        success_at, peer_cpu_s = self._answer()
        until(lambda: sender.poll() is KVPoll.Success and sender.released(), self.changed, what="release")
        sender.close()
        if self._answer() != self.memory.digest(src):
            raise AssertionError("other bytes arrived than were sent")
        return {"s": success_at - begin_s, "peer_cpu_s": peer_cpu_s}

    def _answer(self) -> Any:
        try:
            return self.wire.recv()
        except EOFError:
            raise RuntimeError("the decode process ended; its error stands above") from None


@contextmanager
def process_pair(
    backend: str,
    *,
    num_pages: int,
    page_bytes: int,
    device: torch.device,
) -> Iterator[Pair]:
    """Start both sides, each with a pool of this size."""
    sizes: dict[str, Any] = {"num_pages": num_pages, "page_bytes": page_bytes, "device": device}
    memory, changed = Memory(**sizes), threading.Event()
    manager = PrefillManager(memory.args, memory.engine(backend), TransferConfig())
    manager.set_wakeup(changed.set)
    manager.start()
    spawn = get_context("spawn")
    wire, theirs = spawn.Pipe()
    route = Route(control=manager.control_address, incarnation=manager.incarnation)
    child = spawn.Process(target=receive, args=(theirs, backend, sizes, route), daemon=True)
    child.start()
    theirs.close()
    try:
        yield Pair(memory, manager, child, wire, changed)
    finally:
        wire.close()
        child.join(END_S)
        child.kill()
        child.join()
        manager.close()


def scattered(count: int) -> tuple[list[int], list[int]]:
    """Return odd ids in random order, of both sides: no two pages adjoin, so no two pieces merge."""
    draw = np.random.default_rng(1)
    src, dst = ((2 * draw.permutation(count) + 1).tolist() for _ in range(2))
    return src, dst


def copy_pages(memory: Memory, count: int) -> None:
    """Copy as many scattered pages to another place in this process's memory."""
    src, dst = (torch.tensor(pages, device=memory.pool.device) for pages in scattered(count))
    pool = memory.pool.view(torch.int64)  # words: a gather of bytes is several times slower
    torch.empty_like(pool).index_copy_(0, dst, pool.index_select(0, src))


def measure(
    *, total_mib: int = 64, small_mib: int = 4, repeats: int = 9, backends: Sequence[str] = ("nixl", "mooncake")
) -> Tables:
    """Pages of several sizes on the host, and `small_mib` as of a short prompt."""
    cases = [*((kib, total_mib) for kib in (16, 64, 1024)), (64, small_mib)]
    return {"": [_case(backend, *case, repeats=repeats) for backend in backends for case in cases]}


def _case(backend: str, page_kib: int, total_mib: int, *, repeats: int) -> Row:
    count = max(1, total_mib * MIB // (page_kib * 1024))
    src, dst = scattered(count)
    samples = []
    with process_pair(backend, num_pages=2 * count + 2, page_bytes=page_kib * 1024, device=torch.device("cpu")) as pair:
        pair.memory.fill()
        peer_before_s = 0.0
        for _ in range(repeats + 1):  # the first warms up
            begin_s = time.monotonic()
            copy_pages(pair.memory, count)
            copied_s, before_s = time.monotonic() - begin_s, time.process_time()
            found = pair.send(src, dst)
            cpu_s = time.process_time() - before_s + found["peer_cpu_s"] - peer_before_s
            peer_before_s, gb = found["peer_cpu_s"], total_mib * MIB / 1e9
            samples.append(
                {"ms": 1e3 * found["s"], "GB/s": gb / found["s"], "copy, GB/s": gb / copied_s}
                | {"over a copy": copied_s / found["s"], "CPU s/GB": cpu_s / gb}
            )
        pair.manager.check()
    row = medians(samples[1:])
    tell(f"{backend}, {page_kib} KiB", **row)
    return {"": f"{backend}, {total_mib} MiB, {page_kib} KiB pages, scattered", **row}
