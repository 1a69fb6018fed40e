"""Host memory pages, and copies between them and KV pages."""

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from engine.core.plan import PageCopy, Plan, PlanItem, StateCopy
from engine.kv.kv_pool import KVPool, zeroed_bytes
from engine.kv.page_copies import Arrival, CudaRows, DirectCopies, PageCopies, SideStream, StagedCopies, word_cuts
from engine.kv.state_pool import StatePool
from service.flags import ConfigError
from service.waiter import usable_cores

PART_BYTES = 1 << 30  # touched by one thread at a time


class CudaRegistrar:
    """Pins memory for the GPU; `register` raises RuntimeError or OSError."""

    def register(self, address: int, size_bytes: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


class PinnedBytes:
    """Zeroed, pinned memory, first touched by `threads`: registration would use one core.

    Mapped, touched, then registered: torch's allocator would round up to powers of two and never
    free.
    """

    def __init__(self, size_bytes: int, *, registrar: CudaRegistrar, threads: int) -> None:
        self.tensor = zeroed_bytes(size_bytes, torch.device("cpu"))  # [size_bytes] uint8
        self._registrar = registrar
        with ThreadPoolExecutor(threads, thread_name_prefix="prefault") as pool:
            for touched in [pool.submit(_touch(self.tensor, at)) for at in range(0, size_bytes, PART_BYTES)]:
                touched.result()
        registrar.register(self.tensor.data_ptr(), size_bytes)
        self._registered = True

    def close(self) -> None:
        """Unpin; memory ends with its last view."""
        if self._registered:
            self._registered = False
            self._registrar.unregister(self.tensor.data_ptr())


def _touch(memory: torch.Tensor, at: int) -> Callable[[], object]:
    return lambda: memory[at : at + PART_BYTES : mmap.PAGESIZE].zero_()


WORD_BYTES = 8


class HostPool:
    """Host pages, or states by slot; pinned for CUDA pools, first touched by `threads`."""

    def __init__(self, pool: KVPool | StatePool, *, num_pages: int, threads: int = 1) -> None:
        self.num_pages = num_pages
        self.page_bytes, self._page_size, units, layer_ends = _pages_of(pool)
        size_bytes, device = num_pages * self.page_bytes, pool.device
        device_pages = _words(pool.buffer, pool.buffer.nbytes // self.page_bytes)
        self._pinned: PinnedBytes | None = None
        if device.type == "cpu":
            buffer = zeroed_bytes(size_bytes, device)
            self._copies: PageCopies = DirectCopies(device_pages, _words(buffer, num_pages))
        else:
            self._pinned = PinnedBytes(size_bytes, registrar=CudaRegistrar(), threads=threads)
            buffer = self._pinned.tensor
            self._copies = StagedCopies(
                device_pages,
                _words(buffer, num_pages),
                layer_cuts=word_cuts(layer_ends, WORD_BYTES),
                units=units,
                make_stream=lambda: SideStream(device),
                copy_rows=CudaRows().copy,
            )
        self._bytes = buffer.numpy().data

    def page(self, host_page: int) -> memoryview:
        """Writable bytes; no step in flight may use them."""
        return self._bytes[host_page * self.page_bytes : (host_page + 1) * self.page_bytes]

    def copy(self, seq: int, *, out: list[PageCopy], back: list[PageCopy]) -> None:
        """Copy out, then back, before later work."""
        self._copies.save(seq, out)
        self._copies.load(seq, back, by_layer=False).hold_all()

    def begin(self, plan: Plan) -> Arrival:
        """Copy between tiers before the forward, which awaits loads by layer."""
        self._copies.await_loads(page for item in plan.items for page in item.new_pages)
        self._copies.save(plan.seq, plan.to_host)
        arrival = self._load(plan) if plan.from_host else Arrival()
        self._copies.guard(_first_written(plan.items, self._page_size))
        return arrival

    def _load(self, plan: Plan) -> Arrival:
        touched = {page for item in plan.items for page in item.new_pages}
        arrival = self._copies.load(plan.seq, [c for c in plan.from_host if c.page in touched], by_layer=True)
        self._copies.load(plan.seq, [c for c in plan.from_host if c.page not in touched], by_layer=False)
        return arrival

    def wait(self, seq: int) -> None:
        """Block until copies of steps up to `seq` landed; a forward's end does not imply it."""
        self._copies.wait(seq)

    def close(self) -> None:
        """Unpin after all copies."""
        self._copies.wait(sys.maxsize)
        if self._pinned is not None:
            self._pinned.close()


class HostStates:
    """States of the host tier, copied in the stream of steps; pinned for CUDA pools."""

    def __init__(self, *, count: int, slot_bytes: int, device: str, threads: int = 1) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        size_bytes, on_cpu = count * slot_bytes, device == "cpu"
        self._pinned = None if on_cpu else PinnedBytes(size_bytes, registrar=CudaRegistrar(), threads=threads)
        buffer = zeroed_bytes(size_bytes, torch.device("cpu")) if self._pinned is None else self._pinned.tensor
        self._rows = buffer.view(count, slot_bytes)

    def slot(self, number: int) -> memoryview:
        return self._rows[number].numpy().data

    def save(self, slots: Tensor, copies: Iterable[PageCopy]) -> None:
        for copy in copies:
            self._rows[copy.host_page].copy_(slots[copy.page], non_blocking=True)

    def load(self, slots: Tensor, copy: StateCopy) -> None:
        assert copy.from_host and copy.src is not None
        slots[copy.dst].copy_(self._rows[copy.src], non_blocking=True)

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()


def _pages_of(pool: KVPool | StatePool) -> tuple[int, int, int, list[int]]:
    if isinstance(pool, StatePool):
        return pool.slot_bytes, 1, 1, [pool.slot_bytes]
    return pool.page_bytes, pool.page_size, pool.units, pool.layer_ends()


def allocate_host_pool(pool: KVPool | StatePool, num_pages: int, *, flag: str, remedy: str) -> HostPool:
    """Raises ConfigError with `remedy`."""
    try:
        return HostPool(pool, num_pages=num_pages, threads=usable_cores())
    except _NO_MEMORY as error:
        raise _too_large(num_pages * _pages_of(pool)[0], error, flag, remedy) from error


def allocate_host_states(count: int, slot_bytes: int, *, device: str, flag: str, remedy: str) -> HostStates | None:
    """Raises ConfigError."""
    try:
        return HostStates(count=count, slot_bytes=slot_bytes, device=device, threads=usable_cores()) if count else None
    except _NO_MEMORY as error:
        raise _too_large(count * slot_bytes, error, flag, remedy) from error


_NO_MEMORY = (MemoryError, OSError, RuntimeError, ValueError)


def _too_large(size_bytes: int, error: Exception, flag: str, remedy: str) -> ConfigError:
    return ConfigError(f"{flag}: no host memory for {size_bytes / 1e9:.1f} GB ({error}); {remedy}")


def _first_written(items: list[PlanItem], page_size: int) -> Iterator[int]:
    for item in items:
        yield from item.new_pages[max(0, item.start // page_size - item.page_start) :]


def _words(buffer: Tensor, num_pages: int) -> Tensor:
    return buffer.view(torch.int64).view(num_pages, -1)
