"""Prefault on real maps: which of their memory the system has found, by mincore."""

import ctypes
import mmap
import time
from pathlib import Path

import torch

from engine.kv.kv_pool import zeroed_bytes
from engine.kv.prefault import RESERVE_BYTES, Prefault
from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import make_tiny_checkpoint

MIB = 1 << 20
DEADLINE_S = 60.0


def resident(memory: torch.Tensor, begin: int, end: int) -> set[bool]:
    """Whether the memory pages of these bytes are there: {True}, {False}, or both."""
    count = -(-(end - begin) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(memory.data_ptr() + begin, end - begin, found) == 0, ctypes.get_errno()
    return {bool(page & 1) for page in found}


def fresh(size: int) -> torch.Tensor:
    memory = zeroed_bytes(size, torch.device("cpu"))
    assert resident(memory, 0, size) == {False}
    return memory


def test_the_first_stretch_is_ready_and_the_rest_is_left_to_the_system() -> None:
    memory = fresh(32 * MIB)
    prefault = Prefault(memory, ahead_bytes=8 * MIB)
    assert resident(memory, 0, 32 * MIB) == {False}
    prefault.start(num_threads=3, timeout_s=DEADLINE_S)
    assert resident(memory, 0, 8 * MIB) == {True}
    assert resident(memory, 16 * MIB, 32 * MIB) == {False}  # a huge page may reach past the end
    assert not prefault.piece()


def test_a_start_without_time_leaves_it_to_whoever_rests() -> None:
    memory = fresh(32 * MIB)
    prefault = Prefault(memory, ahead_bytes=8 * MIB)
    prefault.start(num_threads=2, timeout_s=0.0)
    assert resident(memory, 0, 32 * MIB) == {False}
    pieces = 0
    while prefault.piece():
        pieces += 1
    assert 4 <= pieces <= 5  # the first may be a part of a huge page
    assert resident(memory, 0, 8 * MIB) == {True} and resident(memory, 16 * MIB, 32 * MIB) == {False}


def test_it_stays_ahead_of_what_is_in_use() -> None:
    memory = fresh(32 * MIB)
    prefault = Prefault(memory, ahead_bytes=8 * MIB, on_its_own=lambda: True)
    prefault.start(num_threads=1, timeout_s=DEADLINE_S)
    prefault.reach(4 * MIB)  # half of it is left: enough
    assert prefault.wait(DEADLINE_S) and resident(memory, 16 * MIB, 32 * MIB) == {False}
    prefault.reach(8 * MIB)
    assert prefault.wait(DEADLINE_S) and resident(memory, 8 * MIB, 16 * MIB) == {True}
    assert resident(memory, 24 * MIB, 32 * MIB) == {False}
    prefault.reach(32 * MIB)
    prefault.reach(0)
    assert prefault.wait(DEADLINE_S) and not prefault.piece()


def test_without_a_thread_of_its_own_reach_only_says_what_is_to_be_done() -> None:
    memory = fresh(32 * MIB)
    prefault = Prefault(memory, ahead_bytes=8 * MIB)
    prefault.reach(8 * MIB)
    assert prefault.wait(DEADLINE_S) and resident(memory, 0, 32 * MIB) == {False}
    while prefault.piece():
        pass
    assert resident(memory, 8 * MIB, 16 * MIB) == {True} and resident(memory, 24 * MIB, 32 * MIB) == {False}


def test_what_lies_there_stays() -> None:
    memory = fresh(4 * MIB + 100)
    memory[::MIB] = 7
    Prefault(memory, ahead_bytes=100 * MIB).start(num_threads=2, timeout_s=DEADLINE_S)
    assert memory.sum() == 5 * 7 and resident(memory, 0, 4 * MIB) == {True}


def test_a_reserve_is_left_to_everybody_else() -> None:
    memory = fresh(32 * MIB)
    left = RESERVE_BYTES + 4 * MIB
    prefault = Prefault(memory, ahead_bytes=32 * MIB, available=lambda: left)
    while prefault.piece() and left > RESERVE_BYTES:
        left -= 4 * MIB
    assert not prefault.piece() and resident(memory, 12 * MIB, 32 * MIB) == {False}
    left = RESERVE_BYTES + 100 * MIB  # somebody has ended
    while prefault.piece():
        pass
    assert resident(memory, 0, 32 * MIB) == {True}


def test_an_engine_starts_with_memory_ready_and_keeps_more_ready_at_rest(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    flags = {"page_size": 1024, "chunked_prefill_size": 4096, "max_total_tokens": 1024 * 128}
    engine = EngineInProcess(path, prefault_tokens=1024 * 16, **flags)
    try:
        pool = engine.parts.pool
        size = pool.page_bytes
        assert size >= MIB // 2
        assert resident(pool.buffer, 0, 16 * size) == {True}
        assert resident(pool.buffer, 16 * size + 2 * MIB, 128 * size) == {False}
        for i in range(20):
            engine.add(f"r{i}", list(range(30, 40)), max_new_tokens=2)
        engine.run()
        behind = (21 * size + 2 * MIB, 29 * size)  # pages 1 to 20 were used; the last one's huge page may reach further
        deadline_s = time.monotonic() + DEADLINE_S
        while resident(pool.buffer, *behind) != {True} and time.monotonic() < deadline_s:
            engine.parts.spare_work()
        assert resident(pool.buffer, *behind) == {True}
        assert resident(pool.buffer, 64 * size, 128 * size) == {False}
    finally:
        engine.close()


def test_an_engine_touches_nothing_when_it_is_told_so(tmp_path: Path) -> None:
    engine = EngineInProcess(make_tiny_checkpoint(tmp_path, "llama"), prefault_tokens=0)
    try:
        assert not engine.parts.spare_work() and engine.parts.pool.nbytes > 4 * MIB
        assert resident(engine.parts.pool.buffer, 2 * MIB, engine.parts.pool.nbytes) == {False}
    finally:
        engine.close()
