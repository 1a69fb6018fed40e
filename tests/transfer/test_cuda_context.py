"""The CUDA driver's calls, with a library in its place that records the calling threads: there is no driver here."""

import ctypes
import threading

import pytest

from tests.transfer.cuda_driver import build_driver
from transfer_backends.contract import BackendUnavailable
from transfer_backends.engines.cuda_context import CudaContext


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
