"""Calls of C kernels by a thread team (team.c), tapes of them, and memory in huge pages.

Python and torch took a fifth of a small batch's step (docs/reports/benchmarks.md). A tape repeats
calls with the same memory, like a CUDA graph: while it records, outputs come from its workspace,
and torch must compute nothing in between.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine.kernels.build import TEAM, failure

# ---- Huge-page memory for packed weights, shared by neighbours.
#
# One thread reads huge pages 1.7 times as fast as 4 KiB pages (docs/reports/benchmarks.md);
# separate matrices of some MiB would end in small pages.

HUGE_BYTES = 2 << 20
LINE_BYTES = 64
RUN_BYTES = 32 << 20  # of memory shared by matrices; freed with the last of them


class PackedMemory:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """Return uninitialized uint8[size], aligned to a cache line."""
        whole = -(-size // LINE_BYTES) * LINE_BYTES
        if whole > RUN_BYTES // 2:
            return _mapped(size)
        with self._lock:
            if whole > len(self._rest):
                self._rest = _mapped(RUN_BYTES)
            piece, self._rest = self._rest[:size], self._rest[whole:]
        return piece


class HugePages:
    """Uninitialized huge pages, if available; written pages become resident."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._begin = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages is slower, not wrong
                self._memory.madvise(mmap.MADV_HUGEPAGE, self._begin, size // HUGE_BYTES * HUGE_BYTES)

    def lend(self) -> memoryview:
        """Return a view that keeps the region alive."""
        return memoryview(self._memory)[self._begin : self._begin + self.size]


def _mapped(size: int) -> Tensor:
    return torch.frombuffer(HugePages(size).lend(), dtype=torch.uint8)


MAX_FREE_BYTES = 512 << 20  # kept for later tensors of these sizes


class Staging:
    """Allocator that reuses memory after its last tensor, as the OS clears new pages.
    Single-threaded.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[HugePages]] = defaultdict(list)
        self._free_bytes = 0

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `torch.empty`, in huge pages for large CPU tensors."""
        count = prod(shape)
        size = count * dtype.itemsize
        if device.type != "cpu" or size < HUGE_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        region = self._region(-(-size // HUGE_BYTES) * HUGE_BYTES)
        lent = region.lend()
        weakref.finalize(lent, self._take_back, region).atexit = False
        return torch.frombuffer(lent, dtype=dtype, count=count).view(*shape)

    def close(self) -> None:
        self._free.clear()
        self._free_bytes = 0

    def _region(self, size: int) -> HugePages:
        if not (free := self._free.get(size)):
            return HugePages(size)
        self._free_bytes -= size
        return free.pop()

    def _take_back(self, region: HugePages) -> None:
        if self._free_bytes + region.size <= MAX_FREE_BYTES:
            self._free[region.size].append(region)
            self._free_bytes += region.size


_CPU = torch.device("cpu")
TURNS = 4  # tensors of one kind in use at once; a layer needs two

Kernel = Any  # ctypes function that takes the address of a structure


class _Call(ctypes.Structure):
    _fields_ = [("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p)]


class Workspace:
    """Output buffers for at most `most_rows` rows: `TURNS` per row shape, round robin.

    A thread's tapes may share it.
    """

    def __init__(self, most_rows: int) -> None:
        self._max_rows = most_rows
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}
        self._lasting: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized [rows, ...], reused after `TURNS` outputs of its kind."""
        rows, *rest = shape
        buffers = self._buffers.setdefault((tuple(rest), dtype), [])
        if len(buffers) < TURNS:
            buffers.append(torch.empty((self._max_rows, *rest), dtype=dtype))
        else:
            buffers.append(buffers.pop(0))
        return buffers[-1][:rows]

    def lasting(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer reserved for the `number`-th lasting output."""
        rows, *rest = shape
        key = number, tuple(rest), dtype
        if key not in self._lasting:
            self._lasting[key] = torch.empty((self._max_rows, *rest), dtype=dtype)
        return self._lasting[key][:rows]


class Tape:
    """The caller keeps the data alive."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._kept: list[Any] = []
        self._calls: list[_Call] = []
        self._array: ctypes.Array[_Call] | None = None
        self._is_lasting = False
        self._num_lasting = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        assert _here.tape is None, "two tapes record in one thread"
        _here.tape = self
        try:
            yield
        finally:
            _here.tape = None

    @contextmanager
    def lasting(self) -> Iterator[None]:
        self._is_lasting = True
        try:
            yield
        finally:
            self._is_lasting = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not self._is_lasting:
            return self.workspace.empty(shape, dtype)
        self._num_lasting += 1
        return self.workspace.lasting(self._num_lasting, shape, dtype)

    def note(self, kernel: Kernel, args: ctypes.Structure) -> None:
        copy = type(args).from_buffer_copy(args)
        self._kept.append((kernel, copy))
        self._calls.append(_Call(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(copy)))

    def play(self) -> None:
        """Repeat all calls; drops the GIL. Raises MemoryError, RanksEnded."""
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        if failed := _library().tandem_team_play(self._array, len(self._array), _num_threads()):
            raise failure(failed)


class _Here(threading.local):
    tape: Tape | None = None
    count: Callable[[], int] | None = None  # returns how many threads may compute now
    sms: int | None = None  # multiprocessors of kernels, if not all of the GPU

    def __init__(self) -> None:
        self.outputs = Staging()  # of this thread


_here = _Here()


def call(kernel: Kernel, args: ctypes.Structure) -> int:
    """`call_once`, recorded by an active tape."""
    if _here.tape is not None:
        _here.tape.note(kernel, args)
    return call_once(kernel, args)


def call_once(kernel: Kernel, args: ctypes.Structure) -> int:
    """Call `kernel(&args)`; drops the GIL."""
    failed: int = _library().tandem_team_call(kernel, ctypes.byref(args), _num_threads())
    return failed


def let_count(count: Callable[[], int]) -> None:
    """Set this thread's source of thread counts per call; it may block."""
    _here.count = count


@contextmanager
def limit_sms(number: int | None) -> Iterator[None]:
    """Let GPU kernels that this thread launches divide work among so many multiprocessors."""
    before, _here.sms = _here.sms, number
    try:
        yield
    finally:
        _here.sms = before


def sm_limit() -> int | None:
    return _here.sms


def _num_threads() -> int:
    count = _here.count
    return torch.get_num_threads() if count is None else count()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if _here.tape is not None:
        return _here.tape.empty(shape, dtype)
    return _here.outputs.empty(shape, dtype=dtype, device=_CPU)


def lasting() -> AbstractContextManager[None]:
    """Protect outputs in the block from a tape's later calls."""
    return nullcontext() if _here.tape is None else _here.tape.lasting()


def _library() -> ctypes.CDLL:
    library = tape_library()
    assert library is not None, "a kernel is there, so its team is"
    return library


@cache
def tape_library() -> ctypes.CDLL | None:
    library = TEAM.load()
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.tandem_team_play.argtypes = [ctypes.POINTER(_Call), number, number]
        library.tandem_team_call.argtypes = [pointer, pointer, number]
    return library
