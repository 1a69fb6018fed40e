"""Measures KV transfer between two processes, in bytes a second: the managers, the raw engine, and memcpy.

One pair of processes for each backend. Each repeat measures, in turn: memcpy of the same pieces within the prefill process, the
engine alone (the same merged pieces, a window of posts), and a whole transfer through both managers, timed from
`sender.send` to `receiver.poll() == Success` in the other process (one monotonic clock on one machine). CPU seconds
are those of both processes. The raw engine is measured twice: with a loop that asks without pause, and with one that naps as the
managers do.

usage: python -m benchmarks.transfer_rate BACKEND NUM_PAGES PAGE_BYTES CONTROL INCARNATION     (the decode side)
"""

import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.cluster import ROOT
from benchmarks.measures import Measure, Row, Tables, medians, tell
from transfer_backends.contract import KVArgs, OpState, Pieces, Region, Route, TransferConfig
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.engines.registry import make_engine
from transfer_backends.kvpoll import KVPoll
from transfer_backends.merge import batches, plan_pieces
from transfer_backends.ports import Engine
from transfer_backends.prefill.driver import FIRST_NAP_S, LONG_NAP_S
from transfer_backends.prefill.manager import PrefillManager

AUX_BYTES = 4096
WAIT_S = 60.0
MIB = 1 << 20
SMALL_MIB = 4  # a hand-over as of a short prompt: what counts is what is added to the engine's time
PIECE_KIB = (16, 64, 1024)


class Memory:
    """A pool of `num_pages` pages and one aux row, filled with noise (so that every page is mapped)."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.pool = np.random.default_rng(0).integers(0, 255, num_pages * page_bytes, dtype=np.uint8)
        self.aux = np.zeros(AUX_BYTES, np.uint8)
        self.kv_region = Region(self.pool.ctypes.data, num_pages, page_bytes, None)
        self.aux_region = Region(self.aux.ctypes.data, 1, AUX_BYTES, None)

    def args(self) -> KVArgs:
        return KVArgs(self.kv_region, self.aux_region, signature="bench", page_size=16, dtype="uint8")


def until(done: Callable[[], bool], changed: threading.Event, *, what: str) -> None:
    """Looks again whenever `changed` is set."""
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no end of: {what}")
        changed.wait(0.02)
        changed.clear()


# ---- the decode process


def decode_main(backend: str, num_pages: int, page_bytes: int, control: str, incarnation: str) -> None:
    """Serve commands, one JSON line each, until stdin ends."""
    memory = Memory(num_pages, page_bytes)
    raw = make_engine(backend)
    raw.register([memory.kv_region])
    route = Route(control=control, incarnation=incarnation)
    manager = DecodeManager(memory.args(), make_engine(backend), TransferConfig(), lookup=lambda *_: route)
    manager.start()
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    ended = threading.Event()
    alone = threading.Event()  # the raw engine is measured: nobody else drives it
    alone.set()
    driver = threading.Thread(target=_drive, args=(raw, alone, ended))
    driver.start()
    say(base=memory.kv_region.base_ptr, descriptor=raw.descriptor().hex())
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "receive":
            alone.clear()
            receive(manager, changed, command["room"], command["pages"])
            alone.set()
        say(cpu_s=time.process_time())
    ended.set()
    alone.set()
    driver.join()
    manager.close()
    raw.close()


def _drive(raw: Engine, alone: threading.Event, ended: threading.Event) -> None:
    while raw.caps.target_must_poll and not ended.wait(0.0005):
        alone.wait()
        raw.progress()


def receive(manager: DecodeManager, changed: threading.Event, room: int, pages: Sequence[int]) -> None:
    """`changed` is set by the manager's wake-ups, as a worker's loop is woken."""
    receiver = manager.receiver(room, bootstrap="bench:1")
    until(lambda: receiver.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), changed, what="handshake")
    assert receiver.poll() is KVPoll.WaitingForInput, receiver.failure()
    receiver.provide(pages, 0)
    say(provided=True)
    until(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed), changed, what="transfer")
    assert receiver.poll() is KVPoll.Success, receiver.failure()
    say(success_at=time.monotonic())
    receiver.close()


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# ---- the prefill process


@dataclass
class Pair:
    """The prefill side of a process pair."""

    memory: Memory
    manager: PrefillManager
    raw: Engine
    peer: Any
    peer_base: int
    child: "subprocess.Popen[str]"
    changed: threading.Event
    room: int = 0

    def ask(self, **command: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError("the decode process ended; its error stands above")
        return dict(json.loads(line))

    def cpu_s(self) -> float:
        """CPU seconds of both processes so far."""
        self.ask(do="cpu")
        return float(self.answer()["cpu_s"]) + time.process_time()


@contextmanager
def process_pair(backend: str, *, num_pages: int, page_bytes: int) -> Iterator[Pair]:
    memory = Memory(num_pages, page_bytes)
    raw = make_engine(backend)
    raw.register([memory.kv_region])
    manager = PrefillManager(memory.args(), make_engine(backend), TransferConfig())
    changed = threading.Event()
    manager.set_wakeup(changed.set)
    manager.start()
    argv = [sys.executable, "-m", "benchmarks.transfer_rate", backend, str(num_pages), str(page_bytes)]
    argv += [manager.control_address, manager.incarnation]
    child = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pair = Pair(memory, manager, raw, None, 0, child, changed)
        hello = pair.answer()
        pair.peer_base = hello["base"]
        pair.peer = raw.connect("raw", bytes.fromhex(hello["descriptor"]))
        drain(raw, [raw.probe(pair.peer)])
        yield pair
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        manager.close()
        raw.close()


def drain(raw: Engine, ops: list[Any]) -> None:
    while ops:
        ops[:] = still_pending(raw, ops)


def still_pending(raw: Engine, ops: list[Any]) -> list[Any]:
    states = [(op, raw.poll(op)) for op in ops]
    assert all(state is not OpState.FAILED for _, state in states), "the raw engine failed"
    return [op for op, state in states if state is OpState.PENDING]


def time_memcpy(pair: Pair, pieces: Pieces, target: "np.ndarray[Any, Any]") -> float:
    """Copy each piece into a buffer of this process by numpy (one call a piece, as an engine has one request a piece)."""
    pool, base = pair.memory.pool, pair.memory.kv_region.base_ptr
    spans = [(int(s) - base, int(n)) for s, n in zip(pieces.src, pieces.lengths, strict=True)]
    begin = time.monotonic()
    at = 0
    for start, length in spans:
        target[at : at + length] = pool[start : start + length]
        at += length
    return time.monotonic() - begin


def time_raw(pair: Pair, pieces: Pieces, *, naps: bool = False) -> float:
    """Post all pieces within the engine's limits and poll to the end; `naps`: rest when nothing has ended."""
    caps = pair.raw.caps
    begin = time.monotonic()
    running: dict[Any, int] = {}  # operation -> its pieces
    nap_s = FIRST_NAP_S
    parts = deque(batches(pieces, max_pieces=caps.max_post_pieces, max_bytes=caps.max_post_bytes))
    while parts or running:
        while parts and (not running or sum(running.values()) + len(parts[0]) <= caps.max_inflight):
            part = parts.popleft()
            running[pair.raw.post(pair.peer, part)] = len(part)
            nap_s = FIRST_NAP_S
        left = still_pending(pair.raw, list(running))
        if naps and len(left) == len(running):
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONG_NAP_S)
        running = {op: running[op] for op in left}
    return time.monotonic() - begin


def time_managers(pair: Pair, src: Sequence[int], dst: Sequence[int]) -> float:
    """Seconds from `send` to Success on the other side."""
    pair.room += 1
    sender = pair.manager.sender(pair.room)
    pair.ask(do="receive", room=pair.room, pages=list(dst))
    assert pair.answer()["provided"]
    until(lambda: sender.poll() in (KVPoll.WaitingForInput, KVPoll.Failed), pair.changed, what="indices")
    assert sender.poll() is KVPoll.WaitingForInput, sender.failure()
    begin = time.monotonic()
    sender.send(src, start=0, metadata_row=0)
    success_at = float(pair.answer()["success_at"])
    until(lambda: sender.poll() is KVPoll.Success and sender.released(), pair.changed, what="release")
    pair.answer()
    sender.close()
    return success_at - begin


def measure(*, total_mib: int = 64, repeats: int = 9, backends: Sequence[str] = ("nixl", "mooncake")) -> Tables:
    """Scattered pages of several sizes, adjacent ones, and a hand-over as of a short prompt."""
    cases = [*((kib, False, total_mib) for kib in PIECE_KIB), (64, True, total_mib), (64, False, SMALL_MIB)]
    return {"": [_case(backend, *case, repeats=repeats) for backend in backends for case in cases]}


def _case(backend: str, page_kib: int, contiguous: bool, total_mib: int, *, repeats: int) -> Row:
    page_bytes = page_kib * 1024
    count = max(1, total_mib * MIB // page_bytes)
    rng = np.random.default_rng(1)
    with process_pair(backend, num_pages=2 * count + 2, page_bytes=page_bytes) as pair:
        target = np.zeros(count * page_bytes, np.uint8)
        samples = []
        for _ in range(repeats + 1):
            src, dst = _pages(rng, count, contiguous), _pages(rng, count, contiguous)
            samples.append(_repeat(pair, src, dst, target))
        pair.manager.check()
    kind = "adjacent" if contiguous else "scattered"
    name = f"{backend}, {total_mib} MiB, {page_kib} KiB pages, {kind}"
    found = medians(samples[1:])  # the first warms up
    tell(name, **found)
    return {"": name, **found}


def _repeat(pair: Pair, src: Any, dst: Any, target: "np.ndarray[Any, Any]") -> dict[str, float]:
    own = pair.memory.kv_region
    peer = Region(pair.peer_base, own.num_items, own.item_bytes, None)
    pieces = plan_pieces(src, dst, src=own, dst=peer, max_piece_bytes=pair.raw.caps.max_piece_bytes)
    memcpy_s, raw_s = time_memcpy(pair, pieces, target), time_raw(pair, pieces)
    napping_s = time_raw(pair, pieces, naps=True)
    before_s = pair.cpu_s()
    managers_s = time_managers(pair, src.tolist(), dst.tolist())
    cpu_s, gb = pair.cpu_s() - before_s, pieces.size_bytes / 1e9
    return {
        "managers, GB/s": gb / managers_s,
        "raw engine": gb / raw_s,
        "raw, napping": gb / napping_s,
        "memcpy": gb / memcpy_s,
        "managers/raw": raw_s / managers_s,
        "managers/memcpy": memcpy_s / managers_s,
        "managers add, ms": 1e3 * (managers_s - raw_s),
        "CPU s/GB": cpu_s / gb,
    }


def _pages(rng: np.random.Generator, count: int, contiguous: bool) -> "np.ndarray[Any, np.dtype[np.int64]]":
    if contiguous:
        return np.arange(1, count + 1, dtype=np.int64)
    return (2 * rng.permutation(count) + 1).astype(np.int64)  # odd ids: no two pages adjoin, no two pieces merge


def main() -> None:
    backend, num_pages, page_bytes, control, incarnation = sys.argv[1:]
    decode_main(backend, int(num_pages), int(page_bytes), control, incarnation)


MEASURES = {
    "transfer_rate": Measure(
        title="KV transfer",
        about="Between two processes: through both managers (from `send` to `Success` on the other side); the engine alone "
        "with the same pieces; memcpy of the same pieces within one process. The raw loop polls without a pause. "
        "Managers pause between polls, because a polling core does not compute. An engine with threads of its own "
        "(Mooncake over TCP) gains or loses by where the kernel puts the raw loop, so small pages are measured with "
        "the managers' pauses, too.",
        run=measure,
        quick={"total_mib": 16, "repeats": 3},
    )
}

if __name__ == "__main__":
    main()
