"""Prefault on real maps: which of their memory the system has found, by mincore."""

import ctypes
import mmap
import time
from pathlib import Path

import torch

from engine.executor.kv_pool import zeroed_bytes
from engine.executor.prefault import Prefault
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


def test_the_first_stretch_is_ready_and_the_rest_is_left_to_the_system() -> None:
    memory = zeroed_bytes(32 * MIB, torch.device("cpu"))
    assert resident(memory, 0, 32 * MIB) == {False}
    assert Prefault(memory, ahead_bytes=8 * MIB).wait(DEADLINE_S)
    assert resident(memory, 0, 8 * MIB) == {True}
    assert resident(memory, 16 * MIB, 32 * MIB) == {False}  # a huge page may reach past the end


def test_it_stays_ahead_of_what_is_in_use() -> None:
    memory = zeroed_bytes(32 * MIB, torch.device("cpu"))
    prefault = Prefault(memory, ahead_bytes=8 * MIB)
    assert prefault.wait(DEADLINE_S)
    prefault.reach(4 * MIB)  # half of it is left: enough
    assert prefault.wait(DEADLINE_S) and resident(memory, 16 * MIB, 32 * MIB) == {False}
    prefault.reach(8 * MIB)
    assert prefault.wait(DEADLINE_S) and resident(memory, 8 * MIB, 16 * MIB) == {True}
    assert resident(memory, 24 * MIB, 32 * MIB) == {False}
    prefault.reach(32 * MIB)
    prefault.reach(0)
    assert prefault.wait(DEADLINE_S)


def test_what_lies_there_stays() -> None:
    memory = zeroed_bytes(4 * MIB + 100, torch.device("cpu"))
    memory[::MIB] = 7
    assert Prefault(memory, ahead_bytes=100 * MIB).wait(DEADLINE_S)
    assert memory.sum() == 5 * 7 and resident(memory, 0, 4 * MIB) == {True}


def test_an_engine_touches_the_pages_behind_those_in_use(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "llama")
    flags = {"page_size": 1024, "chunked_prefill_size": 4096, "max_total_tokens": 1024 * 128}  # 16 pages ahead
    engine = EngineInProcess(path, **flags)
    try:
        pool = engine.parts.pool
        size = pool.page_bytes
        assert size >= MIB // 2
        for i in range(20):
            engine.add(f"r{i}", list(range(30, 40)), max_new_tokens=2)
        engine.run()
        behind = (21 * size + 2 * MIB, 29 * size)  # pages 1 to 20 were used; the last one's huge page may reach further
        deadline_s = time.monotonic() + DEADLINE_S
        while resident(pool.buffer, *behind) != {True} and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert resident(pool.buffer, *behind) == {True}
        assert resident(pool.buffer, 64 * size, 128 * size) == {False}
    finally:
        engine.close()
