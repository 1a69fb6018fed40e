"""The CUDA driver's calls, with a library in its place that records the calling threads: there is no driver here."""

import ctypes
import threading

import pytest

from tests.transfer.engines.cuda_driver import build_driver
from transfer_backends.contract import BackendUnavailable, Region
from transfer_backends.engines.cuda_context import CudaContext
from transfer_backends.engines.trial_memory import GPU_BYTES, TrialMemory, trial_pieces


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_driver(tmp_path_factory.mktemp("driver"))


def test_each_thread_enters_the_primary_context_once(driver: str) -> None:
    context = CudaContext(1, library=driver)
    seen = ctypes.CDLL(driver)
    seen.seen_context.restype = ctypes.c_void_p
    assert seen.seen_device() == 71 and seen.seen_sets() == 0

    def drive() -> None:
        for _ in range(3):
            context.enter()

    drive()
    assert seen.seen_sets() == 1 and seen.seen_context() == 0x123456789ABC, "the pointer was cut"
    other = threading.Thread(target=drive)
    other.start()
    other.join()
    assert seen.seen_sets() == 2


def test_what_the_driver_refuses_is_said(driver: str) -> None:
    with pytest.raises(BackendUnavailable, match="cuda:2: cuDeviceGet failed with CUDA error 101"):
        CudaContext(2, library=driver)
    with pytest.raises(BackendUnavailable, match="cuda:0: the CUDA driver cannot be loaded"):
        CudaContext(0, library="/nowhere/libcuda.so")


def test_memory_for_trials_is_a_gpu_s_own_and_freed(driver: str) -> None:
    context = CudaContext(1, library=driver)
    seen = ctypes.CDLL(driver)
    seen.seen_allocated.restype, seen.seen_freed.restype = ctypes.c_size_t, ctypes.c_void_p
    trial = TrialMemory(1, context)
    assert trial.region == Region(0x7F0000000000, 1, GPU_BYTES, 1) and seen.seen_allocated() == GPU_BYTES
    for _ in range(2):
        trial.close()
    assert seen.seen_freed() == 0x7F0000000000
    with pytest.raises(BackendUnavailable, match="cuda:1: cuMemAlloc_v2 failed with CUDA error 2"):
        context.allocate(2 << 30)


def test_a_trial_copies_as_much_as_both_have_in_pieces() -> None:
    pieces = trial_pieces(Region(1000, 1, 96, 1), Region(5000, 1, 80, None), max_piece_bytes=32)
    assert pieces.src.tolist() == [1000, 1032, 1064] and pieces.dst.tolist() == [5000, 5032, 5064]
    assert pieces.lengths.tolist() == [32, 32, 16] and (pieces.src_device, pieces.dst_device) == (1, None)
