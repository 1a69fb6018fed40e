"""Prefault on real maps: which of their memory the system has found, by mincore."""

import ctypes
import mmap

import torch

from engine.executor.kv_pool import zeroed_bytes
from engine.executor.prefault import Prefault

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
