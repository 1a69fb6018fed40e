"""Memory that is touched before it is needed, on a CPU. Owns how far it is; must not know pages or steps.

The first touch of memory is when the system finds it and clears it. A virtual machine whose free memory has gone back to
its host does so at 0.4 GB/s a thread, measured (two threads 0.75; 8 GB/s where the host has kept it): a quarter of the time
of a prefill that goes to fresh pages. So a stretch ahead of what is in use is kept ready: first while the process starts,
then whenever there is nothing else to do. Memory that is far from being used stays with the system.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable

import torch

from engine.kv.host_memory import available_bytes

PIECE_BYTES = 2 << 20  # a huge page: who rests for one piece is back after 5 ms at most, as measured
LOOK_BYTES = 64 << 20  # how much is touched between two looks at the memory that is left
RESERVE_BYTES = 1 << 30  # what is left to everybody else: nobody is to be killed for memory that is not in use yet
MADV_POPULATE_WRITE = 23  # Linux 5.14; it leaves what lies there as it is


class Prefault:
    """Keeps `ahead_bytes` of `buffer` ready, half as many at least, beyond what `reach` was told.

    It touches nothing by itself: `start` does, `piece` does, and a thread of its own does after `reach` where `on_its_own` says
    so (asked each time). Where the system cannot do it nothing happens: memory is touched when it is used, as ever.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        *,
        ahead_bytes: int,
        on_its_own: Callable[[], bool] = lambda: False,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        """`available`: memory that can be had, in bytes; it is touched down to RESERVE_BYTES (None: not known, go on)."""
        assert buffer.dtype == torch.uint8 and buffer.device.type == "cpu", (buffer.dtype, buffer.device)
        self._buffer = buffer
        self._ahead = ahead_bytes
        self._on_its_own = on_its_own
        self._available = available
        self._madvise = _madvise()
        self._lock = threading.Lock()  # of the three below
        self._ready = 0  # bytes from the start that are touched, or being touched
        self._goal = min(ahead_bytes, buffer.numel())
        self._allowed = 0  # bytes until the next look
        self._thread: threading.Thread | None = None

    def start(self, *, num_threads: int, timeout_s: float) -> None:
        """The first `ahead_bytes`, by so many threads; what is not ready by then is left to the others."""
        deadline_s = time.monotonic() + timeout_s
        threads = [threading.Thread(target=self._touch_until, args=(deadline_s,)) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def reach(self, end: int) -> None:
        """Bytes 0..end-1 are in use from now on. Never waits."""
        with self._lock:
            if end + self._ahead // 2 > self._goal:
                self._ready = max(self._ready, end)
                self._goal = max(self._goal, min(end + self._ahead, self._buffer.numel()))
            more = self._ready < self._goal
        if more and (self._thread is None or not self._thread.is_alive()) and self._on_its_own():
            self._thread = threading.Thread(target=self._touch_until, args=(float("inf"),), daemon=True)
            self._thread.start()

    def piece(self) -> bool:
        """Touch one piece, if there is one to touch. Drops the GIL."""
        taken = self._take()
        return taken is not None and self._touch(*taken)

    def wait(self, timeout_s: float) -> bool:
        """Whether its own thread is at rest within that time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _touch_until(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s and self.piece():
            pass

    def _take(self) -> tuple[int, int] | None:
        """The next piece, (address, bytes)."""
        with self._lock:
            if self._ready >= self._goal or not self._may_touch():
                return None
            base = self._buffer.data_ptr()
            begin = (base + self._ready) // mmap.PAGESIZE * mmap.PAGESIZE
            end = min((begin // PIECE_BYTES + 1) * PIECE_BYTES, base + self._goal)
            self._ready = end - base
            self._allowed -= end - begin
            return begin, end - begin

    def _may_touch(self) -> bool:
        if self._allowed <= 0:
            left = self._available()
            self._allowed = LOOK_BYTES if left is None else min(LOOK_BYTES, left - RESERVE_BYTES)
        return self._allowed > 0

    def _touch(self, address: int, size: int) -> bool:
        if self._madvise(address, size, MADV_POPULATE_WRITE) == 0:
            return True
        with self._lock:
            self._goal = self._ready = self._buffer.numel()  # an older kernel, or no memory: then its use will tell
        return False


def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function  # type: ignore[no-any-return]
