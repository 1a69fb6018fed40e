"""Pinned memory: as large as asked, touched before it is registered, given back once."""

from pathlib import Path

import pytest
import torch

from engine.kv.host_pool import PinnedBytes
from engine.kv.page_copies import CudaRows, equal_groups, word_cuts
from tests.engine.device.test_cpu_memory import HUGE_PAGE, resident
from tests.transfer.engines.cuda_driver import build_library

ODD_BYTES = 3 * HUGE_PAGE + 4096 * 5 + 64  # no power of two


class RegistrarInATest:
    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, size_bytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_the_size_asked_is_mapped_and_registered_and_unregistered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.host_pool.PART_BYTES", HUGE_PAGE)
    registrar = RegistrarInATest()
    pinned = PinnedBytes(ODD_BYTES, registrar=registrar, threads=2)
    assert pinned.tensor.numel() == pinned.tensor.untyped_storage().nbytes() == ODD_BYTES
    assert registrar.registered == {pinned.tensor.data_ptr(): ODD_BYTES}
    assert resident(pinned.tensor) == {True}
    assert not pinned.tensor.any()
    pinned.close()
    pinned.close()
    assert registrar.registered == {}


def test_a_refused_registration_is_raised() -> None:
    class Refusing(RegistrarInATest):
        def register(self, address: int, size_bytes: int) -> None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        PinnedBytes(4096, registrar=Refusing(), threads=1)


# ---- Columns of host pages to the device, with a library in the driver's place that copies as the
# driver's documentation says.

DRIVER = """
#include <stddef.h>
#include <string.h>
typedef struct {  /* CUDA_MEMCPY2D of cuda.h */
    size_t srcXInBytes, srcY; int srcMemoryType; const void *srcHost; unsigned long long srcDevice; void *srcArray; size_t srcPitch;
    size_t dstXInBytes, dstY; int dstMemoryType; void *dstHost; unsigned long long dstDevice; void *dstArray; size_t dstPitch;
    size_t WidthInBytes, Height;
} Copy;
int cuMemcpy2DAsync_v2(const Copy *c, void *stream) {
    if (stream != (void *)0x123456789abc) return 400;
    if (c->srcMemoryType != 1 || c->dstMemoryType != 2 || c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY) return 1;
    if (c->srcPitch < c->WidthInBytes || c->dstPitch < c->WidthInBytes) return 1;
    for (size_t i = 0; i < c->Height; i++)
        memcpy((char *)c->dstDevice + i * c->dstPitch, (const char *)c->srcHost + i * c->srcPitch, c->WidthInBytes);
    return 0;
}
"""
STREAM = 0x123456789ABC


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> CudaRows:
    return CudaRows(library=build_library(tmp_path_factory.mktemp("driver"), DRIVER, "libcuda.so.1"))


def test_columns_arrive_where_they_belong_and_nothing_else_changes(rows: CudaRows) -> None:
    pages, staging = torch.arange(60).view(6, 10), torch.zeros(6, 4, dtype=torch.int64)
    for begin, n in ((1, 3), (5, 1)):
        rows.copy_on(STREAM, staging[begin : begin + n, :3], pages[begin : begin + n, 4:7])
    expected = torch.zeros_like(staging)
    for row in (1, 2, 3, 5):
        expected[row, :3] = pages[row, 4:7]
    assert torch.equal(staging, expected)


def test_what_the_driver_refuses_is_an_error(rows: CudaRows) -> None:
    page = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="host tier: cuMemcpy2DAsync failed with CUDA error 400"):
        rows.copy_on(7, page, page.clone())


def test_a_machine_without_the_driver_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="libcuda"):
        CudaRows(library=str(tmp_path / "libcuda.so.1"))


def test_layers_are_cut_into_equal_groups() -> None:
    assert equal_groups(36, 36) == list(range(1, 37)) and equal_groups(7, 3) == [2, 4, 7] and equal_groups(7, 1) == [7]


def test_a_word_that_two_layers_share_comes_with_the_first() -> None:
    assert word_cuts([12, 24, 64], 8) == [0, 2, 3, 8]
