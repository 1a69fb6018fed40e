"""--prefault-kv on a real map: which of its memory the system has found, by mincore."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from tests.engine.engine_in_process import EngineInProcess
from tests.models.tiny_checkpoints import make_tiny_checkpoint

HUGE_PAGE = 2 << 20


def resident(memory: torch.Tensor) -> set[bool]:
    """Whether the memory pages behind the first huge page are there: {True}, {False}, or both."""
    size = memory.numel() - HUGE_PAGE
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(memory.data_ptr() + HUGE_PAGE, size, found) == 0, ctypes.get_errno()
    return {bool(page & 1) for page in found}


@pytest.mark.parametrize("prefault", [False, True])
def test_an_engine_touches_all_of_its_kv_memory_at_start_if_it_is_asked_to(tmp_path: Path, prefault: bool) -> None:
    with EngineInProcess(make_tiny_checkpoint(tmp_path, "llama"), prefault_kv=prefault) as engine:
        assert resident(engine.parts.pool.buffer) == {prefault}
